"""Sample disk reads, GPU memory and host memory during a run, on one clock, and notice pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers.results import Samples
from helpers.sampling.disk import DiskReads, disk_counter, own_read_bytes
from helpers.sampling.gpu_memory import GpuMemory
from helpers.sampling.host_memory import HostMemory, process_tree

__all__ = ["Sampler", "disk_counter", "own_read_bytes"]


PAUSE_S = 1.5  # a busy machine delays a sample by less
CLOCK_WITH_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_REALTIME)  # time.monotonic() stops while Linux sleeps


@dataclass(frozen=True)
class Pause:
    """An interval between samples (time.monotonic()) in which the run stood still; `seconds` includes system sleep."""

    began_s: float
    ended_s: float
    seconds: float


class Sampler:
    """Samples one run: `baseline()` before it, `start()`, `follow()` each of its processes, and `stop()` once, however
    the run ends.

    Nothing here raises: a missing or broken source becomes a note in the Samples, which keep
    everything sampled until then.
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
        self._clocks: tuple[float, float] | None = None  # of the last sample: running time, time that counts sleep too
        self._pauses: list[Pause] = []
        sources = {"disk reads": self._disk, "GPU memory": self._gpu, "host memory": self._host}
        self._live = {what: source for what, source in sources.items() if source is not None}

    def baseline(self, seconds: float = 0.5) -> None:
        """Observe other processes' activity on this machine for some seconds."""
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
        """Sample this process and its children from now on."""
        self._root = self._attempt("processes of the run", psutil.Process, pid)
        if self._disk:
            self._disk.next_process()

    def stop(self) -> Samples:
        """Stop sampling; returns everything sampled."""
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

    def paused_s(self, started_s: float, ended_s: float) -> float:
        """Seconds for which the run, or the whole machine, stood still in a window of time.monotonic()."""
        return sum(pause.seconds for pause in self._pauses if pause.began_s < ended_s and pause.ended_s >= started_s)

    def _sample(self) -> None:
        processes = process_tree(self._root) if self._root else []
        self._notice_pause(processes)
        for what, source in list(self._live.items()):
            try:
                source.sample(processes)
            except Exception as error:
                self._notes.append(f"{what} not sampled any more: {_reason(error)}")
                del self._live[what]

    def _notice_pause(self, processes: list[psutil.Process]) -> None:
        """A pause stops the sampler too (a container's pause, a frozen cgroup, a laptop's sleep), or shows in the state
        of the run's processes (SIGSTOP)."""
        now_s, with_sleep_s = time.monotonic(), time.clock_gettime(CLOCK_WITH_SLEEP)
        before_s, before_with_sleep_s = self._clocks or (now_s, with_sleep_s)
        self._clocks = now_s, with_sleep_s
        elapsed_s = with_sleep_s - before_with_sleep_s
        if elapsed_s > self._interval_s + PAUSE_S or any(map(_is_stopped, processes)):
            self._pauses.append(Pause(before_s, now_s, elapsed_s))

    def _attempt(self, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:  # sampling never fails a run
            self._notes.append(f"{what} not sampled: {_reason(error)}")
            return None


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
