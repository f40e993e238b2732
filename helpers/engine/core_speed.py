"""How fast the core is that this thread runs on, as launching kernels feels it.

A virtual machine's core is one half of a real one, and somebody else may use the other half: Python, and with it each
launch, then takes up to twice as long. Which cores these are changes by the second. On an H200's host about half of 16
cores were slow at any moment, half of the runs started on such a one, and on another host those that only waited for a
better one waited in vain for three seconds as often as not.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import cycle

LOOP_STEPS = 1_000_000  # some 10 ms: longer than the slices in which two threads of this machine take turns
FULL_SPEED = 0.87  # of the fastest seen: cores with a busy other half had 0.4 to 0.8, others differed by 0.05
PATIENCE_S = 1.0


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

    def change(self) -> None:
        """Go to a core that is about as fast as the fastest seen, or after some tries to the fastest there is. The
        thread may be moved by the system afterwards as before."""
        allowed = os.sched_getaffinity(0)
        known_s, until_s = self.fastest_loop_s or 0.0, time.monotonic() + PATIENCE_S
        took_s: dict[int, float] = {}
        for cpu in cycle(sorted(allowed, reverse=True)):  # the first ones serve interrupts
            if _keep_to({cpu}):
                took_s[cpu] = self._timed_s()
                if FULL_SPEED * took_s[cpu] <= known_s:
                    break
                if len(took_s) == len(allowed):
                    known_s = self.fastest_loop_s
            if time.monotonic() >= until_s:
                _keep_to({min(took_s, key=lambda cpu: took_s[cpu])} if took_s else allowed)
                break
        _keep_to(allowed)

    def _timed_s(self) -> float:
        now_s = loop_s()
        self.fastest_loop_s = min(self.fastest_loop_s or now_s, now_s)
        return now_s


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
