"""How fast the core is that this thread runs on, as launching kernels feels it.

A virtual machine's core is one half of a real one, and somebody else may use the other half: Python, and with it each
launch, then takes up to twice as long. The host moves a thread that stays busy to a core of its own, within a second or
two. FlexGen's own command has been busy with its imports for 8 s before it measures; a run that was forked has not.
Seen on an H200's host: 8 of 16 runs were slow after 1 s of work, 1 of 15 after 3 s, 3 of 14 of FlexGen's own command.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

LOOP_STEPS = 100_000
FULL_SPEED = 0.87  # of the fastest seen: cores with a busy other half had 0.5 to 0.8, others differed by 0.05
PATIENCE_S = 3.0


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
        now_s = loop_s()
        self.fastest_loop_s = min(self.fastest_loop_s or now_s, now_s)
        self.slowest_loop_s = max(self.slowest_loop_s, now_s)

    def wait_for_full_speed(self) -> None:
        """Stay busy until it is about as fast as the fastest that was seen before, but not for ever. With nothing seen
        before, for as long as the host usually takes to find a better one."""
        known_s, until_s = self.fastest_loop_s or 0.0, time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            now_s = loop_s()
            self.fastest_loop_s = min(self.fastest_loop_s or now_s, now_s)
            if FULL_SPEED * now_s <= known_s:
                return


def loop_s() -> float:
    """Seconds of a fixed piece of Python of a few milliseconds: the least of three."""
    return min(_loop_once_s() for _ in range(3))


def _loop_once_s() -> float:
    began_s = time.perf_counter()
    for _ in range(LOOP_STEPS):
        pass
    return time.perf_counter() - began_s
