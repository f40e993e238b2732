"""Host memory over time, held by a process and its descendants."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

from helpers.results import MemorySeries
from helpers.units import GIB


def process_tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all its live descendants; empty once it is gone."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


class HostMemory:
    """Samples the memory of a process tree."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    def sample(self, processes: Sequence[psutil.Process]) -> None:
        used_bytes = 0
        seen = False
        for process in processes:
            try:
                used_bytes += process.memory_info().rss
                seen = True
            except psutil.NoSuchProcess:
                continue  # ended since the tree was listed
        if seen:
            self._samples.append((time.monotonic(), used_bytes / GIB))

    def series(self, origin_s: float) -> MemorySeries | None:
        samples = list(self._samples)
        if not samples:
            return None
        return MemorySeries(
            what="resident memory (RSS) summed over the run's processes",
            time_s=tuple(round(time_s - origin_s, 3) for time_s, _ in samples),
            used_gib=tuple(round(used_gib, 4) for _, used_gib in samples),
        )
