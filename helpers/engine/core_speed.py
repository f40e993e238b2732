"""How fast the core is that this thread runs on, as launching kernels feels it.

A virtual machine's core is one half of a real one, and somebody else may use the other half: Python, and with it each
launch, then takes up to twice as long. Which cores these are changes by the second. One that has been busy for a while
was oftener at full speed on H200s' hosts (benchmarks/README.md); FlexGen's own command is busy importing for 8 s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

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

    def wait_for_full_speed(self) -> None:
        """Keep busy until the core is as fast as the fastest seen, for a while at most; for all of it where none was
        seen yet, to have something to go by."""
        until_s = time.monotonic() + PATIENCE_S
        nothing_known = self.fastest_loop_s is None
        while FULL_SPEED * self._timed_s() > self.fastest_loop_s or nothing_known:
            if time.monotonic() >= until_s:
                return

    def _timed_s(self) -> float:
        now_s = loop_s()
        self.fastest_loop_s = min(self.fastest_loop_s or now_s, now_s)
        return now_s


def loop_s() -> float:
    """Seconds of a fixed piece of Python."""
    began_s = time.perf_counter()
    for _ in range(LOOP_STEPS):
        pass
    return time.perf_counter() - began_s
