"""How fast the core is that this thread runs on, as launching kernels feels it.

A virtual machine's core is one half of a real one, and somebody else may use the other half: Python, and with it each
launch, then takes up to twice as long. Which cores these are changes by the second. On an H200's host about half of 16
cores were slow at any moment, and half of the runs started on such a one. Waiting for a better one helped on one host
of two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LOOP_STEPS = 1_000_000  # some 10 ms: longer than the slices in which two threads of this machine take turns
FULL_SPEED = 0.87  # of the fastest seen: cores with a busy other half had 0.4 to 0.8, others differed by 0.05
PATIENCE_S = 0.5


@dataclass
class Core:
    """The core that this thread is on, whichever that is, beside the fastest that was seen on this machine."""

    fastest_loop_s: float | None = None
    slowest_loop_s: float = 0.0

    @property
    def speed(self) -> float:
        """Of the fastest: the least of all looks."""
        return self.fastest_loop_s / self.slowest_loop_s

    def look(self) -> None:
        """See how fast it is now; takes some milliseconds."""
        self.slowest_loop_s = max(self.slowest_loop_s, self._timed_s())

    @contextmanager
    def off_shared_cores(self) -> Iterator[None]:
        """Meanwhile this thread, and such as it starts, keep off cores that are slower than the fastest seen, or after
        some tries than the fastest there is. Where no core is slower, all stay allowed."""
        try:
            allowed = os.sched_getaffinity(0)
        except OSError:  # a sandbox that does not let it be asked
            yield
            return
        try:
            self._keep_off_slow_ones(allowed)
            yield
        finally:
            _keep_to(allowed)

    def _keep_off_slow_ones(self, allowed: set[int]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        took_s: dict[int, float] = {}
        left: set[int] = set()
        while not left and time.monotonic() < until_s:
            for cpu in sorted(allowed):
                if time.monotonic() < until_s and _keep_to({cpu}):
                    took_s[cpu] = self._timed_s()
            left = allowed - _slower(took_s, self.fastest_loop_s)
        left = left or allowed - _slower(took_s, min(took_s.values(), default=0.0))
        _keep_to(left) or _keep_to(allowed)

    def _timed_s(self) -> float:
        now_s = loop_s()
        self.fastest_loop_s = min(self.fastest_loop_s or now_s, now_s)
        return now_s


def _slower(took_s: dict[int, float], fastest_s: float | None) -> set[int]:
    """Those that are not at full speed where the fastest takes that long."""
    return {cpu for cpu, seconds in took_s.items() if FULL_SPEED * seconds > fastest_s}


def _keep_to(cpus: set[int]) -> bool:
    """Have this thread run on these alone, if the system lets it: a core may be switched off meanwhile."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return False
    return True


def loop_s() -> float:
    """Seconds of a fixed piece of Python."""
    began_s = time.perf_counter()
    for _ in range(LOOP_STEPS):
        pass
    return time.perf_counter() - began_s
