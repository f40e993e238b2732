"""GPU tensors that FlexGen's copy threads keep alive after a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heappop, heappush

from helpers.predict.tensors import COPY_THREADS, block_bytes
from helpers.units import MIB

Owner = tuple[str, int, int]  # the kind of tensor, its pass, its layer


@dataclass(frozen=True)
class Buffer:
    """A GPU tensor that a copy thread writes or reads."""

    owner: Owner
    number: int
    requested: int


def owned(owner: Owner, sizes: tuple[int, ...], first: int = 0) -> list[Buffer]:
    return [Buffer(owner, number, size) for number, size in enumerate(sizes, start=first)]


class CopyThreads:
    """The tensor each of FlexGen's copy threads still refers to (`copy_worker_func`'s `item`, `dst_data`).

    The thread that has waited longest takes the next copy. A thread drops its last tensor only after opening the next
    one's source. By then the main thread has moved on, so at a step's allocations each thread holds what it held when
    the step began. In a `race`, a thread takes two small copies in a row before a waiting one wakes up (FlexGen's own
    threads do so in about one pass of seven), which leaves one more thread holding its tensor.
    """

    SMALL = MIB // 8  # above the largest vector of any OPT, and no larger than the smallest matrix
    OPENING = MIB // 4  # a copy's fixed time, in bytes of reading

    def __init__(self, race: bool) -> None:
        self.race = race
        self.waiting = deque(range(COPY_THREADS))
        self.holds: list[tuple[Buffer | None, int]] = [(None, 0)] * COPY_THREADS

    def held_bytes(self, alive: Collection[Owner]) -> int:
        """Bytes held of tensors that nothing else keeps alive; `alive`: owners whose tensors are alive anyway."""
        held = {buffer: counted for buffer, counted in self.holds if buffer is not None and buffer.owner not in alive}
        return sum(held.values())

    def copy(self, copies: list[Buffer]) -> None:
        """Hand out a step's copies and wait for them."""
        busy: list[tuple[int, int]] = []
        last_small = None
        for buffer in copies:
            size = buffer.requested
            small = size < self.SMALL
            if self.race and small and last_small is not None:
                thread, start = last_small, 0
            elif self.waiting:
                thread, start = self.waiting.popleft(), 0
            else:
                start, thread = heappop(busy)
            self.holds[thread] = (buffer, block_bytes(size))
            if self.race and small and last_small == thread:
                continue
            heappush(busy, (start + size + self.OPENING, thread))
            last_small = thread if small else None
        while busy:
            self.waiting.append(heappop(busy)[1])
