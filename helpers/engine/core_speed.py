"""Speed of this thread's CPU core, which determines how long Python takes to launch kernels.

A virtual machine's core is half of a physical one. While someone else uses the other half, Python and every launch take
up to twice as long. On H200 hosts, cores that had been busy for a while ran at full speed more often
(benchmarks/README.md), and FlexGen's own command is busy with imports for 8 s before it measures.
"""

from __future__ import annotations

import time

LOOP_STEPS = 1_000_000  # about 10 ms: longer than the time slices of two threads on one core
FULL_SPEED = 0.87  # cores with a busy other half ran at 0.4 to 0.8 of their speed, others varied by 0.05
BUSY_S = 1.0


def keep_busy(seconds: float = BUSY_S) -> float:
    """Keep the core busy; return its fastest loop time in seconds."""
    until_s = time.monotonic() + seconds
    fastest_s = loop_s()
    while time.monotonic() < until_s:
        fastest_s = min(fastest_s, loop_s())
    return fastest_s


def loop_s() -> float:
    """Time a fixed piece of Python, in seconds."""
    began_s = time.perf_counter()
    for _ in range(LOOP_STEPS):
        pass
    return time.perf_counter() - began_s
