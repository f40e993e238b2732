"""Folders that people name: refused before anything starts if nothing can be written there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from helpers.errors import Refused

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUTPUT = ROOT / "outputs"


def folder(given: Any, what: str) -> Path:
    """The folder that `given` means, `~` among it, which may not exist yet; makes nothing.

    Raises Refused, `what` in front, for what is no path, is too long, is a file or below one, or may not be written.
    """
    if not isinstance(given, str | os.PathLike):
        raise Refused(f"{what} {given!r}: not a path")
    text = os.path.expanduser(os.fspath(given))
    if not text or "\0" in text:
        raise Refused(f"{what} {text!r}: {'a null character in it, ' if text else 'empty, '}no path")
    if text.startswith("~"):
        raise Refused(f"{what} {text}: there is no user of that name")
    path = Path(text).absolute()
    for above in (path, *path.parents):
        try:
            os.stat(above)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise Refused(f"{what} {text}: {getattr(error, 'strerror', None) or error}") from error
        if not above.is_dir():
            raise Refused(f"{what} {text}: {above} is a file, not a folder")
        if not os.access(above, os.W_OK | os.X_OK):
            raise Refused(f"{what} {text}: {above} cannot be written; choose another")
        break
    return path


def check_file(path: Path) -> None:
    """Raises Refused for what is there and no file: opening a pipe would wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise Refused(f"{path}: {kind(path)}, not a file; move it away, or choose another folder")


def kind(path: Path) -> str:
    """What is there and no file, in words."""
    return "a folder" if os.path.isdir(path) else "a device or a pipe"


def check_writable(path: Path) -> None:
    """Make a file's folder, and the file. Raises Refused if it cannot be written."""
    check_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(f"{path} cannot be written ({reason}); choose another output folder") from error


def try_out(path: Path, what: str) -> None:
    """Make and remove a file where a folder is or will be. Raises Refused, `what` in front, where that cannot be."""
    there = next(above for above in (path, *path.parents) if above.exists())
    try:
        with tempfile.TemporaryFile(dir=there):  # nameless where the file system can: nothing to leave behind
            pass
    except OSError as error:
        raise Refused(f"{what} {path} cannot be written ({error.strerror}); choose another") from error


def write_atomically(path: Path, data: str | bytes) -> Path:
    """Replace a file's content in one step: readers see the old content or the new, never a part. Returns the path.

    Raises OSError with the file's name if it can't be written; the old file is then still intact.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only now
        os.replace(temporary, path)
    except OSError as error:
        kept = ", the earlier file is unchanged" if path.exists() else ""
        raise OSError(error.errno, f"{error.strerror}{kept}", str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
