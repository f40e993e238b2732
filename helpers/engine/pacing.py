"""The emulated machine's clock: every part works at the profile's rate, and threads sleep until it has finished.

Each part (the GPU, PCIe in either direction, the disk) does one thing at a time. Each thread has its own position in
emulated time, and sleeps until the real clock catches up wherever CUDA or the disk would make it
wait. Emulated time adds up paced times alone, so the next waits make up for a late wake-up. Where the CPU can't
keep up, the pass counts as behind, and the next one starts from the real clock.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from helpers.machine.profiles import MachineProfile

BEHIND = 0.2  # a pass that ends late by more than this share of its length is behind; less is made up for in the next
OPERATORS_A_LAYER = 10  # a layer's launch time covers this many; a copy to the GPU is one more


class Pacer:
    """Paces one process from `begin()` on; until then (weights, warm-up) nothing waits.

    `passes` holds the seconds that each part was busy in each pass, by the time model's term names. Parts
    overlap, so these don't add up to the latency.
    """

    def __init__(
        self,
        profile: MachineProfile,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile = profile
        self.passes: list[defaultdict[str, float]] = []
        self.passes_behind = 0
        self._clock, self._sleep = clock, sleep
        self._pacing = False
        self._makes_up = True
        self._here = threading.local()
        self._lock = threading.Lock()
        self._free_at_s: defaultdict[str, float] = defaultdict(float)  # when each part has done everything
        self._launched_s = 0.0  # when the main thread began to launch the current layer
        self._synchronized_s = 0.0  # no thread is before the last synchronization
        self._pass_began_s = 0.0
        self._behind_s = 0.0

    # --- moments ----------------------------------------------------------------------------------------------------

    def begin(self, makes_up: bool = True) -> None:
        """Start pacing. Without `makes_up`, a late wait doesn't shorten the next ones: for timers of single steps."""
        self._pacing, self._makes_up = True, makes_up
        self._here.reached_s = self._synchronized_s = self._clock()

    def next_pass(self) -> None:
        """Finish the accounts of the last pass and start the next one's."""
        if not self._pacing:
            return
        self._close_pass()
        if not self.passes:
            self._catch_up()
        self._pass_began_s, self._behind_s = self._reached_s, 0.0
        self.passes.append(defaultdict(float))

    def end(self) -> None:
        self._close_pass()
        self._pacing = False

    def seconds_by_term(self) -> dict[str, tuple[float, ...]]:
        """Each term's busy seconds, pass by pass."""
        terms = sorted(set().union(*self.passes))
        return {term: tuple(a_pass[term] for a_pass in self.passes) for term in terms}

    def synchronize(self) -> None:
        """Wait until every part has finished its work."""
        if not self._pacing:
            return
        with self._lock:
            self._reached_s = self._synchronized_s = max(self._reached_s, *self._free_at_s.values(), 0.0)
        self._wait()
        late_s = self._clock() - self._reached_s
        if self._makes_up:
            self._behind_s = late_s
        else:
            self._behind_s += late_s
            self._catch_up()

    def pcie_done_s(self) -> float:
        """When the copies to the GPU given so far will have ended."""
        return self._free_at_s["host to device"]

    def wait_until(self, moment_s: float) -> None:
        if self._pacing:
            self._reached_s = max(self._reached_s, moment_s)
            self._wait()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Copies in this context don't wait for computation; on the default stream, operations run in order."""
        before = self._on_side_stream
        self._here.side_stream = True
        try:
            yield
        finally:
            self._here.side_stream = before

    # --- work -------------------------------------------------------------------------------------------------------

    def launch_layer(self) -> None:
        """The main thread launches a layer's kernels; the GPU works on them meanwhile."""
        if self._pacing:
            self._launched_s = self._reached_s
            self._main_thread(self.profile.layer_overhead_us / 1e6)

    def multiply(self, flop: float, nbytes: float) -> None:
        """A matrix product: bound by arithmetic or by GPU memory, whichever takes longer."""
        if self._pacing:
            compute_s = flop / (self.profile.gpu_fp16_tflop_s * 1e12)
            memory_s = nbytes / (self.profile.gpu_mem_gb_s * 1e9)
            self._note("GPU compute", compute_s)
            self._note("GPU memory", memory_s)
            self._occupy("GPU", max(compute_s, memory_s), max(self._launched_s, self._synchronized_s))

    def dequantise(self, fp16_bytes: float) -> None:
        if self._pacing:
            seconds = fp16_bytes / (self.profile.dequantize_gb_s * 1e9)
            self._note("dequantisation", seconds)
            self._occupy("GPU", seconds, max(self._launched_s, self._synchronized_s))

    def attend_on_cpu(self, fp16_bytes: float) -> None:
        if self._pacing:
            seconds = fp16_bytes / (self.profile.cpu_attention_gb_s * 1e9)
            self._note("CPU attention", seconds)
            self._reached_s += seconds

    def copy_to_device(self, nbytes: int, blocking: bool) -> None:
        if self._pacing:
            self._copy("host to device", nbytes / (self.profile.h2d_gb_s * 1e9), blocking)
            if not blocking and threading.current_thread() is threading.main_thread():
                self._main_thread(self.profile.layer_overhead_us / 1e6 / OPERATORS_A_LAYER)

    def copy_to_host(self, nbytes: int, blocking: bool) -> None:
        if self._pacing:
            self._copy("device to host", nbytes / (self.profile.d2h_gb_s * 1e9), blocking)

    def use_disk(self, nbytes: int) -> None:
        """Read or write the disk tier; the thread waits for it."""
        if self._pacing:
            seconds = nbytes / (self.profile.disk_gb_s * 1e9)
            self._note("disk", seconds)
            self._reached_s = self._occupy("disk", seconds, self._reached_s)
            self._wait()

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    @property
    def _reached_s(self) -> float:
        return max(getattr(self._here, "reached_s", 0.0), self._synchronized_s)

    @_reached_s.setter
    def _reached_s(self, moment_s: float) -> None:
        self._here.reached_s = moment_s

    @property
    def _on_side_stream(self) -> bool:
        return getattr(self._here, "side_stream", False)

    def _close_pass(self) -> None:
        if self.passes and self._behind_s > BEHIND * (self._reached_s - self._pass_began_s):
            self.passes_behind += 1
            self._catch_up()

    def _catch_up(self) -> None:
        self._reached_s = self._synchronized_s = max(self._reached_s, self._clock())

    def _main_thread(self, seconds: float) -> None:
        self._note("launch overhead", seconds)
        self._reached_s += seconds

    def _copy(self, direction: str, seconds: float, blocking: bool) -> None:
        self._note(direction, seconds)
        since_s = self._reached_s
        if not self._on_side_stream:
            since_s = max(since_s, self._free_at_s["GPU"])
        ended_s = self._occupy(direction, seconds, since_s)
        if not self._on_side_stream:
            self._occupy("GPU", 0.0, ended_s)
        if blocking:
            self.wait_until(ended_s)

    def _occupy(self, part: str, seconds: float, since_s: float) -> float:
        """Give a part work that can start at `since_s`; return when it will finish."""
        with self._lock:
            self._free_at_s[part] = max(self._free_at_s[part], since_s) + seconds
            return self._free_at_s[part]

    def _note(self, term: str, seconds: float) -> None:
        with self._lock:
            if self.passes:
                self.passes[-1][term] += seconds

    def _wait(self) -> None:
        left_s = self._reached_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
