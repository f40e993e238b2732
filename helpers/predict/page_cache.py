"""How much of what a run reads from its disk tier in every pass Linux's page cache serves."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.float64]
History = Literal["worst", "likely", "best"]


class Served(NamedTuple):
    """Share of the bytes that come from the page cache: 0 to 1, at worst, most likely, and at best."""

    worst: NDArray[np.float64]
    likely: NDArray[np.float64]
    best: NDArray[np.float64]

    @classmethod
    def nothing(cls) -> Served:
        return cls(*(np.zeros((1, 1, 1, 1)) for _ in cls._fields))


def served(read_bytes: Bytes, room_bytes: Bytes, active_bytes: Bytes | float) -> Served:
    """The share served of `read_bytes`, which every pass reads once in the same order, with `room_bytes` for them.

    If they fit, all of them. If not, a cyclic scan evicts each page before its turn comes again and nothing is served
    (measured: no page, even with room for 90 %), unless refaulting pages are activated, which keeps them from eviction.
    The kernel activates them if their refault distance, here the bytes that don't fit, is at most the active file pages
    (mm/workingset.c, `workingset_test_recent`; classic LRU, no swap): `active_bytes`, mostly the process's libraries.
    Activated pages then compete with the rest, and history decides how many stay: none at worst, all that fit at best.
    FlexGen's own runs had half of what fits (`tests/test_page_cache_model.py` has the figures), the likely value.
    """
    fits = read_bytes <= room_bytes
    stay = np.clip(room_bytes / np.maximum(read_bytes, 1.0), 0.0, 1.0) * (read_bytes - room_bytes <= active_bytes)
    return Served(np.where(fits, 1.0, 0.0), np.where(fits, 1.0, stay / 2), np.where(fits, 1.0, stay))
