"""GPU memory over time, as the driver counts it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import psutil
import pynvml

from helpers.machine import gpus
from helpers.results import MemorySeries
from helpers.units import GIB


class GpuMemory:
    """Samples CUDA's device 0. Raises pynvml.NVMLError without a driver, LookupError without a usable GPU."""

    def __init__(self) -> None:
        self._nvml = ExitStack()
        self._nvml.enter_context(gpus.nvml())
        faults: list[str] = []
        try:
            handles = gpus.visible_handles(faults)
            if not handles:
                raise LookupError("; ".join(faults) or "CUDA may use no GPU here")
        except BaseException:
            self.close()
            raise
        self._handle = handles[0][1]
        self._samples: list[tuple[float, float]] = []
        self._others_before: int | None = None
        self._most_processes = 0
        self.notes: list[str] = []

    def baseline(self) -> None:
        """Note who holds memory on the GPU before the run."""
        self._others_before = self._processes()
        if self._others_before:
            self.notes.append(
                f"before the run: {_count(self._others_before)} on the GPU, "
                f"{self._used_gib():.2f} GiB of its memory in use"
            )

    def sample(self, processes: Sequence[psutil.Process]) -> None:
        self._samples.append((time.monotonic(), self._used_gib()))
        self._most_processes = max(self._most_processes, self._processes() or 0)

    def series(self, origin_s: float) -> MemorySeries | None:
        # The run itself is one; ids are the host's and cannot be matched inside a container, so they are counted.
        if self._others_before is not None and self._most_processes > self._others_before + 1:
            more = self._most_processes - self._others_before - 1
            self.notes.append(f"during the run {_count(more)} came to the GPU")
        samples = list(self._samples)
        if not samples:
            return None
        return MemorySeries(
            what="device memory in use by all processes (NVML)",
            time_s=tuple(round(time_s - origin_s, 3) for time_s, _ in samples),
            used_gib=tuple(round(used_gib, 4) for _, used_gib in samples),
        )

    def close(self) -> None:
        self._nvml.close()

    def _used_gib(self) -> float:
        return pynvml.nvmlDeviceGetMemoryInfo(self._handle).used / GIB

    def _processes(self) -> int | None:
        """How many processes hold memory on the GPU, without this one; None where NVML doesn't say."""
        found = gpus.memory_by_process(self._handle)
        return None if found is None else len(found.keys() - {os.getpid()})


def _count(processes: int) -> str:
    return f"{processes} other process{'es' if processes > 1 else ''}"
