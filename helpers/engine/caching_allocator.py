"""A model of CUDA's caching allocator that reproduces its statistics, such as `torch.cuda.max_memory_allocated`.

After c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes are rounded up to 512 bytes; blocks come from
segments of 2 MiB (up to 1 MiB) or 20 MiB (below 10 MiB), larger ones get a segment of their own, rounded up to 2 MiB.
The smallest sufficient free block of the stream is taken, and split unless too little would be left: then
all of it counts as allocated.
"""

from __future__ import annotations

import bisect
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from helpers.units import GIB, MIB

BLOCK_ROUNDING = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_FROM = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment; `before` and `after` are its neighbours there."""

    size: int
    pool: list[tuple[int, int, Block]]  # of free blocks, smallest first
    number: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def entry(self) -> tuple[int, int, Block]:
        return self.size, self.number, self


class CachingAllocator:
    """Counts the storages that are alive on the emulated GPU, in bytes: `allocated`, `reserved` and their peaks."""

    def __init__(self, capacity_bytes: float = math.inf) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved = self.peak_reserved = self.peak = self._allocated = 0
        self._pools: dict[Hashable, list[tuple[int, int, Block]]] = defaultdict(list)
        self._alive: dict[int, tuple[Block, weakref.ref]] = {}
        # Storages die at any time, even inside an allocation (garbage collection); they are freed before the next one.
        self._dead: deque[int] = deque()
        self._lock = threading.Lock()
        self._blocks_made = 0

    @property
    def allocated(self) -> int:
        with self._lock:
            self._free_the_dead()
            return self._allocated

    def add(self, storage: torch.UntypedStorage, stream: Hashable = None) -> None:
        """Count a storage until it is freed; ignore one already counted.

        Raises torch.OutOfMemoryError, in CUDA's words, if it does not fit.
        """
        with self._lock:
            self._free_the_dead()
            identity, nbytes = storage._cdata, storage.nbytes()
            if identity in self._alive or not nbytes:
                return
            block = self._block(-(-nbytes // BLOCK_ROUNDING) * BLOCK_ROUNDING, stream)
            self._alive[identity] = block, weakref.ref(storage, lambda _: self._dead.append(identity))
            self._allocated += block.size
            self.peak = max(self.peak, self._allocated)

    def _block(self, size: int, stream: Hashable) -> Block:
        small = size <= LARGEST_SMALL
        pool = self._pools[stream, small]
        at = bisect.bisect_left(pool, (size, -1))
        block = pool.pop(at)[2] if at < len(pool) else self._new_segment(size, pool)
        block.is_free = False
        rest = block.size - size
        if rest >= BLOCK_ROUNDING if small else rest > LARGEST_SMALL:
            free = self._new_block(rest, pool)
            free.before, free.after = block, block.after
            if block.after:
                block.after.before = free
            block.after, block.size = free, size
            self._put_back(free)
        return block

    def _new_segment(self, size: int, pool: list[tuple[int, int, Block]]) -> Block:
        if size <= LARGEST_SMALL:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT_FROM:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        if self.reserved + segment > self.capacity_bytes:
            self._give_back_free_segments()
        free = self.capacity_bytes - self.reserved
        if segment > free:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {segment / MIB:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.capacity_bytes / GIB:.2f} GiB of which {free / MIB:.2f} MiB is free."
            )
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self._new_block(segment, pool)

    def _new_block(self, size: int, pool: list[tuple[int, int, Block]]) -> Block:
        self._blocks_made += 1
        return Block(size, pool, self._blocks_made)

    def _free_the_dead(self) -> None:
        while self._dead:
            block, _ = self._alive.pop(self._dead.popleft())
            self._allocated -= block.size
            if block.before and block.before.is_free:
                block = self._merge(block.before, block)
            if block.after and block.after.is_free:
                block = self._merge(block, block.after)
            self._put_back(block)

    def _merge(self, first: Block, second: Block) -> Block:
        """Merge two blocks; whichever was free leaves its pool."""
        for block in (first, second):
            if block.is_free:
                block.pool.remove(block.entry)
                block.is_free = False
        first.size += second.size
        first.after = second.after
        if second.after:
            second.after.before = first
        return first

    def _put_back(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(block.pool, block.entry)

    def _give_back_free_segments(self) -> None:
        for pool in self._pools.values():
            for size, _, block in list(pool):
                if not block.before and not block.after:
                    pool.remove(block.entry)
                    self.reserved -= size
