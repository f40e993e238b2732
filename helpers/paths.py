"""Folders and files that users name, checked before anything starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from helpers.errors import Refused

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUTPUT = ROOT / "outputs"


def folder(given: Any, what: str) -> Path:
    """The absolute path of a folder, `~` expanded; it need not exist and isn't created.

    Raises Refused, starting with `what`, unless it is a path that can be a writable folder.
    """
    if not isinstance(given, str | os.PathLike):
        raise Refused(f"{what} {given!r}: not a path")
    text = os.path.expanduser(os.fspath(given))
    if not text or "\0" in text:
        raise Refused(f"{what} {text!r}: {'it has a null character' if text else 'empty'}")
    if text.startswith("~"):
        raise Refused(f"{what} {text}: no user has that name")
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
    """Raises Refused if something other than a file is there: opening a pipe would wait forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise Refused(f"{path}: {kind(path)}, not a file; move it away, or choose another folder")


def kind(path: Path) -> str:
    """A folder, device or pipe in words."""
    return "a folder" if os.path.isdir(path) else "a device or a pipe"


def check_writable(path: Path) -> None:
    """Create a file and its folder. Raises Refused if the file can't be written."""
    check_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(f"{path} cannot be written ({reason}); choose another output folder") from error


def try_out(path: Path, what: str) -> None:
    """Check that files can be created where a folder is or will be. Raises Refused, starting with `what`."""
    there = next(above for above in (path, *path.parents) if above.exists())
    try:
        with tempfile.TemporaryFile(dir=there):  # without a name where the file system allows
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
