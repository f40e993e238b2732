"""Cold reads: drop each file of the disk tier from the page cache as soon as FlexGen has read it."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np


def drop(path: str) -> None:
    """Ask the kernel to drop a file's clean, unmapped pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_back(path: str) -> None:
    """Write a file's dirty pages to disk; only then can the kernel drop them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ColdReads:
    """Keeps the disk tier out of the page cache, separately for each copy thread.

    Notes every memory map that a thread opens. After the thread's copy, `drop_opened` unmaps their pages (the kernel
    keeps mapped pages) and drops them.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def watch_memory_maps(self) -> None:
        """Note every file that NumPy maps in this process from now on, since FlexGen reads its disk tier that way."""
        original = np.lib.format.open_memmap

        def open_memmap(filename: str, *args: Any, **kwargs: Any) -> np.memmap:
            array = original(filename, *args, **kwargs)
            self._opened().append((filename, getattr(array, "_mmap")))  # noqa: B009
            return array

        setattr(np.lib.format, "open_memmap", open_memmap)  # noqa: B010

    def drop_opened(self) -> None:
        opened = self._opened()
        while opened:
            path, mapped = opened.pop()
            mapped.madvise(mmap.MADV_DONTNEED)
            drop(path)

    def _opened(self) -> list[tuple[str, Any]]:
        if not hasattr(self._thread, "opened"):
            self._thread.opened = []
        return self._thread.opened
