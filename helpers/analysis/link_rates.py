"""Rates of PCIe and the disk tier, and the time of each part of a pass, as far as the rows determine them.

A pass takes at least its longest part and at most the sum of its parts, because FlexGen overlaps copies with computing.
So each row bounds each link: bytes / pass time from below, and bytes / (pass time - other parts) from above. Bytes from
disk also cross PCIe, so a row with such bytes bounds PCIe from below too. Reads differ in how much the page cache
served, so the disk tier has a rate for each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from helpers.analysis.matching import QuestionRow
from helpers.analysis.values import ZERO, Interval, Value, pass_time


@dataclass(frozen=True)
class PassParts:
    """Seconds of one row's pass and of each part alone. `pcie` includes launching the copies, `compute` the kernels.
    No part is longer than the pass."""

    whole: Value
    compute: Interval
    pcie: Interval
    disk: Interval
    disk_rate: Interval | None  # bytes/s of this row's reads, from disk or page cache

    @property
    def by_name(self) -> dict[str, Interval]:
        return {"compute": self.compute, "PCIe": self.pcie, "Disk": self.disk}

    @property
    def may_be_longest(self) -> tuple[str, ...]:
        """The longest part, or every part that could be."""
        most = max(part.low for part in self.by_name.values())
        return tuple(name for name, part in self.by_name.items() if part.high and part.high >= most)

    @property
    def longest(self) -> str | None:
        """The longest part; None where the intervals don't decide it."""
        return self.may_be_longest[0] if len(self.may_be_longest) == 1 else None


@dataclass(frozen=True)
class LinkRates:
    """Bytes/s of PCIe, the parts of each row's pass by row id, and the row whose reads stand for the disk tier."""

    compute: Interval
    pcie: Interval | None
    parts: dict[str, PassParts]
    disk_row: QuestionRow | None

    @property
    def disk(self) -> Interval | None:
        """The disk tier's rate in the row that reads most from it."""
        return self.parts[self.disk_row.id].disk_rate if self.disk_row else None

    @property
    def pcie_over_disk(self) -> Interval | None:
        if self.pcie is None or self.disk is None:
            return None
        return Interval(self.pcie.low / self.disk.high, self.pcie.high / self.disk.low)

    @property
    def faster_link(self) -> str | None:
        """PCIe, or None where the intervals don't decide it: what comes from disk can't outrun PCIe."""
        return "PCIe" if self.pcie_over_disk and self.pcie_over_disk.low > 1 else None


def link_rates(rows: Iterable[QuestionRow]) -> LinkRates:
    """Rates and parts from all rows of one batch that have figures."""
    timed = [(row, time) for row in rows if row.done and (time := pass_time(row.run))]
    intervals = [(row, time.interval) for row, time in timed]
    compute = _compute(intervals)
    pcie = _pcie(intervals, compute)
    parts = {row.id: _parts(row, time, compute, pcie) for row, time in timed}
    reading = [row for row, _ in timed if _moved(row)[1]]
    return LinkRates(compute, pcie, parts, max(reading, key=lambda row: _moved(row)[1], default=None))


def _moved(row: QuestionRow) -> tuple[int, int]:
    """Bytes of a pass over PCIe, and of those the bytes from the disk tier."""
    return row.run.placement.host_to_device_bytes_per_pass, row.run.placement.disk_bytes_per_pass


def _compute(times: Sequence[tuple[QuestionRow, Interval]]) -> Interval:
    """Every row computes the same, so no pass is shorter; a row that moves nothing does nothing else."""
    shortest = min((time.high for _, time in times), default=math.inf)
    return Interval(max((min(time.low, shortest) for row, time in times if not _moved(row)[0]), default=0.0), shortest)


def _pcie(times: Sequence[tuple[QuestionRow, Interval]], compute: Interval) -> Interval | None:
    lows, highs = [], []
    for row, time in times:
        copied, read = _moved(row)
        if copied:
            lows.append(copied / time.high)
            if not read and time.low > compute.high:
                highs.append(copied / (time.low - compute.high))
    if not lows:
        return None
    low, high = max(lows), min(highs, default=math.inf)
    return Interval(low, high if high >= low else math.inf)  # ignore a row that contradicts the others


def _parts(row: QuestionRow, whole: Value, compute: Interval, pcie: Interval | None) -> PassParts:
    (copied, read), time = _moved(row), whole.interval
    copying = pcie.under(copied) if pcie and copied else ZERO
    copying = Interval(copying.low, min(copying.high, time.high))
    computing = Interval(min(compute.low, time.high), min(compute.high, time.high))
    if not read:
        return PassParts(whole, computing, copying, ZERO, None)
    reading = Interval(max(0.0, time.low - computing.high - copying.high), time.high)
    return PassParts(whole, computing, copying, reading, reading.under(read))
