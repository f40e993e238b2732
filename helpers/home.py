"""The lab's own folder, its locks, and run folders that are removed with their process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from helpers import paths
from helpers.errors import Refused

SAME_START_S = 60.0  # start times count from a boot time that moves when the clock is set
# A run folder's name identifies its owner: process id, start time in seconds, and the host and container.
OWNED = re.compile(r"run-(\d+)-(\d+)-([0-9a-f]{8})-")


def home() -> Path:
    """The folder for what is kept between runs: $OFFLOAD_LAB_HOME, else offload-lab in the user's cache.

    Where the cache can't be written: a private folder in the temporary folder, which this creates. Raises Refused for
    an $OFFLOAD_LAB_HOME that can't be written, and for a temporary one that others control.
    """
    named = os.environ.get("OFFLOAD_LAB_HOME")
    if named:
        return paths.folder(named, "OFFLOAD_LAB_HOME")
    cache = os.environ.get("XDG_CACHE_HOME", "")
    wanted = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")).absolute() / "offload-lab"
    there = next(above for above in (wanted, *wanted.parents) if os.path.exists(above))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return wanted
    return _private(Path(tempfile.gettempdir()).absolute() / f"offload-lab-{os.getuid()}")


def _private(folder: Path) -> Path:
    """Create a folder that only this user can enter, in one that everybody can write. Raises Refused for one that
    somebody else has put there."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        what = "a link or a file" if not stat.S_ISDIR(found.st_mode) else "a folder that others own or can enter"
        raise Refused(f"{folder} is {what}: remove it, or set OFFLOAD_LAB_HOME to a folder of your own")
    return folder


@contextlib.contextmanager
def locked(path: Path, when_taken: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`, after `when_taken()` and a wait if another process has it. The kernel releases a dead
    holder's lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_taken()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def run_folder(root: Path) -> Iterator[Path]:
    """A folder that belongs to this process and is removed afterwards, with the parents that it needed; first removes
    those of dead processes."""
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    me = psutil.Process()
    # The name marks the owner even if creating or removing the folder is cut short.
    folder = Path(tempfile.mkdtemp(prefix=f"run-{me.pid}-{me.create_time():.0f}-{whereabouts()}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for empty in made:
            with contextlib.suppress(OSError):  # somebody else has created something there
                empty.rmdir()


def remove_leftovers(root: Path) -> list[Path]:
    """Remove the run folders under `root` whose owner is dead; returns them.

    Leaves those of other hosts and containers alone, whose processes can't be seen from here.
    """
    gone = []
    try:
        folders = list(root.iterdir())
    except OSError:  # missing, or not readable
        return []
    for folder in folders:
        owner = OWNED.match(folder.name)
        if not owner or owner[3] != whereabouts():
            continue
        try:
            alive = abs(psutil.Process(int(owner[1])).create_time() - int(owner[2])) < SAME_START_S
        except psutil.NoSuchProcess:
            alive = False
        except psutil.Error:
            alive = True  # another user's
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder)
    return gone


def whereabouts() -> str:
    """Identify this host and container, within which process ids are valid, in 8 hexadecimal digits."""
    try:
        ids = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        ids = 0
    return hashlib.sha256(f"{platform.node()} {ids}".encode()).hexdigest()[:8]
