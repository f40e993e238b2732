"""Cold reads: each file of the disk tier leaves the page cache as soon as FlexGen has read it."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np


def drop(path: str) -> None:
    """Ask the kernel to forget a file's clean pages that nothing maps."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_back(path: str) -> None:
    """Put a file's written pages on the disk: until then the kernel cannot forget them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ColdReads:
    """Keeps the disk tier out of the page cache, one copy thread at a time.

    Each memory map that a thread opens is noted; `drop_opened`, after the thread's copy, unmaps its pages (the
    kernel keeps what a process maps) and drops them.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def watch_memory_maps(self) -> None:
        """Note every file that NumPy maps in this process from now on: FlexGen reads its disk tier so."""
        original = np.lib.format.open_memmap

        def open_memmap(filename: str, *args: Any, **kwargs: Any) -> np.memmap:
            array = original(filename, *args, **kwargs)
            self._opened().append((filename, array._mmap))
            return array

        np.lib.format.open_memmap = open_memmap

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
