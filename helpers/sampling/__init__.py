"""What is sampled beside every run: disk reads, GPU memory and host memory, on one clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from helpers.results import Samples
from helpers.sampling.disk import DiskReads, disk_counter, own_read_bytes
from helpers.sampling.gpu_memory import GpuMemory
from helpers.sampling.host_memory import HostMemory, process_tree

__all__ = ["Sampler", "disk_counter", "own_read_bytes"]


class Sampler:
    """Samples beside one run: `baseline()` before it, `start()`, `follow()` each of its processes, `stop()` once,
    whatever became of the run.

    Nothing here raises: what this machine cannot give, or what breaks, becomes a note of the Samples, and what
    was sampled until then is kept.
    """

    def __init__(self, offload_dir: Path, gpu: bool, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._notes: list[str] = []
        self._origin_s = 0.0
        self._root: psutil.Process | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._disk = self._attempt("disk reads", DiskReads, offload_dir)
        self._gpu = self._attempt("GPU memory", GpuMemory) if gpu else None
        self._host = HostMemory()
        sources = {"disk reads": self._disk, "GPU memory": self._gpu, "host memory": self._host}
        self._live = {what: source for what, source in sources.items() if source is not None}

    def baseline(self, seconds: float = 0.5) -> None:
        """See for some seconds what others do on this machine."""
        if self._gpu:
            self._attempt("GPU memory before the run", self._gpu.baseline)
        if self._disk:
            self._attempt("disk reads before the run", self._disk.baseline, seconds)

    def start(self, origin_s: float) -> None:
        """Sample until stop(); `origin_s`, of time.monotonic(), is zero in the series."""
        self._origin_s = origin_s
        if self._disk:
            self._attempt("disk reads by iostat", self._disk.start)
        self._sample()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)
        self._attempt("anything after the start", self._thread.start)

    def follow(self, pid: int) -> None:
        """The run is now this process, and its children."""
        self._root = self._attempt("processes of the run", psutil.Process, pid)
        if self._disk:
            self._disk.next_process()

    def stop(self) -> Samples:
        """End the sampling; all that was sampled."""
        self._stopping.set()
        if self._thread:
            self._thread.join(timeout=5)
            self._sample()
        disk = self._attempt("disk series", self._disk.series, self._origin_s, self._interval_s) if self._disk else None
        gpu = self._attempt("GPU memory series", self._gpu.series, self._origin_s) if self._gpu else None
        host = self._attempt("host memory series", self._host.series, self._origin_s)
        for source in (self._disk, self._gpu):
            if source:
                self._attempt("an end of sampling", source.close)
                self._notes += source.notes
        return Samples(disk=disk, gpu=gpu, host=host, notes=tuple(self._notes))

    def _loop(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        processes = process_tree(self._root) if self._root else []
        for what, source in list(self._live.items()):
            try:
                source.sample(processes)
            except Exception as error:
                self._notes.append(f"{what} not sampled any more: {_reason(error)}")
                del self._live[what]

    def _attempt(self, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:  # a run is never lost to what is sampled beside it
            self._notes.append(f"{what} not sampled: {_reason(error)}")
            return None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
