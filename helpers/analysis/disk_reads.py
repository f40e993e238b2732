"""What the disk tier had to deliver, and what the disk is known to have given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import EMULATED, latency, listed, percent, rate, size
from helpers.homework import QUESTIONS, Row
from helpers.runs import Run

# Shares of the needed bytes that the disk gave.
COLD_FROM = 0.9
WARM_BELOW = 0.1
# An average that needs this little more than the highest rate sampled is not called more.
RATE_TOLERANCE = 0.02
IOSTAT_KB = 1024  # iostat's kB


@dataclass(frozen=True)
class DiskReads:
    """The reads of one run: bytes of one generation, and bytes per second over it."""

    label: str
    run_id: str
    bytes_needed: int
    needed_bytes_per_s: float | None
    disk_bytes_per_s: float | None  # the highest rate that the disk was seen to give
    disk_rate_is_own: bool  # seen during this run, not during another of the same machine
    bytes_given: int | None
    paced: bool = False  # the disk tier was held to a rate by the emulation, whatever gave the bytes

    @property
    def share_from_disk(self) -> float | None:
        """Bytes the disk gave over bytes that had to be read."""
        return None if self.bytes_given is None or not self.bytes_needed else self.bytes_given / self.bytes_needed

    @property
    def least_from_page_cache(self) -> float | None:
        """The share that cannot have come from the disk, by its highest rate."""
        if not self.needed_bytes_per_s or self.disk_bytes_per_s is None:
            return None
        if self.needed_bytes_per_s <= self.disk_bytes_per_s * (1 + RATE_TOLERANCE):
            return 0.0
        return 1 - self.disk_bytes_per_s / self.needed_bytes_per_s

    @property
    def verdict(self) -> str:
        """cold, mixed or warm by the bytes; without a byte count what the rates allow; or unknown."""
        share = self.share_from_disk
        if share is not None:
            return "cold" if share >= COLD_FROM else "warm (page cache)" if share < WARM_BELOW else "mixed"
        least = self.least_from_page_cache
        if least is None:
            return "unknown"
        if least == 0:
            return "cold or mixed: the disk could give it all"
        return f"mixed or warm: page cache gave at least {percent(least)}"

    @property
    def partly_cached(self) -> bool:
        """Whether it is certain that page cache gave part of the reads."""
        share = self.share_from_disk
        return share < COLD_FROM if share is not None else bool(self.least_from_page_cache)

    @property
    def sentence(self) -> str:
        """What had to be read beside what the disk gave."""
        words = f"{self.label} had to read {size(self.bytes_needed)}"
        if self.needed_bytes_per_s:
            words += f", {rate(self.needed_bytes_per_s)} over its wall time"
        if self.bytes_given is not None:
            given = f"{size(self.bytes_given)} ({percent(self.share_from_disk)})"
            return words + f"; the disk gave {given}: {self.verdict}."
        if self.disk_bytes_per_s is not None and self.needed_bytes_per_s:
            whose = "" if self.disk_rate_is_own else ", as sampled in another run"
            return words + f"; the disk gave at most {rate(self.disk_bytes_per_s)}{whose}: {self.verdict}."
        return words + "; what the disk gave is not known."


def of_point(label: str, point: Run, rows: Rows) -> DiskReads | None:
    """The reads of a run that has weights on disk, or None. The disk's rate is the run's own peak, else
    the highest of the campaign's."""
    per_pass = point.placement.disk_bytes_per_pass
    if point.status != "done" or not per_pass:
        return None
    needed = point.bytes_expected_from_disk or per_pass * point.passes
    time = latency(point)
    own = point.disk_rkb_s_peak
    seen = [p.disk_rkb_s_peak for p in rows.by_id.values() if p.disk_rkb_s_peak]
    best = own if own is not None else max(seen, default=None)
    return DiskReads(
        label,
        point.run_id,
        needed,
        needed / time.value if time else None,
        None if best is None else best * IOSTAT_KB,
        own is not None,
        point.bytes_from_disk,
        paced=point.kind == EMULATED,
    )


def analyze(points: Iterable[Run]) -> tuple[DiskReads, ...]:
    """The reads of every homework row with weights on disk, in the homework's order; runs that FlexGen
    projected are left out, their wall time was not measured."""
    rows = homework_rows(points)
    found: dict[str, DiskReads] = {}
    for question in QUESTIONS.values():
        for row in question:
            point = rows.done(row.id)
            known = any(point is rows.done(row_id) for row_id in found)
            if point is not None and not known and point.debug_mode is None:
                reads = of_point(_label(row), point, rows)
                if reads is not None:
                    found[row.id] = reads
    return tuple(found.values())


def _label(row: Row) -> str:
    """The row's label as one term of a list: 100 % disk (batch 16)."""
    label = f"100 % disk, {row.label}" if row.label.startswith("batch") else row.label
    return label.replace(", ", " (") + ")" * label.count(", ")


def markdown(points: Iterable[Run]) -> str:
    """Which runs read more than the disk can have given, in words."""
    reads = [r for r in analyze(points) if r.verdict != "unknown"]
    if not reads:
        return "What the disk gave is not known for any run, so nothing is said about the page cache.\n"
    cached = [r for r in reads if r.partly_cached]
    counted = all(r.bytes_given is not None for r in cached)
    share = "" if all(r.verdict.startswith("warm") for r in cached) else "part of "
    words = "\n".join(f"- {r.sentence}" for r in reads) + "\n\n"
    if cached:
        words += (
            f"So {share}the reads of {listed(r.label for r in cached)} came from the page cache"
            f"{'' if counted else ', unless the disk was faster than it was ever sampled'}"
        )
        words += (
            ". It makes no difference to these times: the emulation paces the disk tier, whatever gives the bytes."
            if all(r.paced for r in cached)
            else ": a ratio with such a run on one side also holds the difference between page cache and disk."
        )
    else:
        words += "No run needed more than the disk gave."
    return words + "\n"
