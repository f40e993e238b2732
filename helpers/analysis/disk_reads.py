"""Bytes a run had to read from the disk tier, against the bytes that the disk itself delivered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.matching import QuestionRow, Rows, homework_rows
from helpers.analysis.values import EMULATED, latency, listed, percent, rate, size
from helpers.homework import QUESTIONS
from helpers.runs import Run
from helpers.units import KIB

# Shares of the needed bytes that came from the disk.
COLD_FROM = 0.9
WARM_BELOW = 0.1
# A mean rate this little above the highest sampled one still counts as possible.
RATE_TOLERANCE = 0.02


@dataclass(frozen=True)
class DiskReads:
    """The reads of one generation: bytes, and bytes/s over its wall time."""

    row_id: str
    label: str
    run_id: str
    bytes_needed: int
    needed_bytes_per_s: float | None
    disk_bytes_per_s: float | None  # the highest rate sampled
    disk_rate_is_own: bool  # sampled during this run, not during another of the same machine
    bytes_given: int | None
    paced: bool = False  # the emulation holds the disk tier to a rate, wherever the bytes come from

    @property
    def share_from_disk(self) -> float | None:
        """Bytes from the disk over bytes needed; at most 1, since a counter sees other reads too."""
        return (
            None if self.bytes_given is None or not self.bytes_needed else min(1, self.bytes_given / self.bytes_needed)
        )

    @property
    def least_from_page_cache(self) -> float | None:
        """The share that can't have come from the disk, by its highest rate."""
        if not self.needed_bytes_per_s or self.disk_bytes_per_s is None:
            return None
        if self.needed_bytes_per_s <= self.disk_bytes_per_s * (1 + RATE_TOLERANCE):
            return 0.0
        return 1 - self.disk_bytes_per_s / self.needed_bytes_per_s

    @property
    def verdict(self) -> str:
        """cold, mixed or warm by the bytes; without a byte count, what the rates allow."""
        share = self.share_from_disk
        if share is not None:
            return "cold" if share >= COLD_FROM else "warm (page cache)" if share < WARM_BELOW else "mixed"
        least = self.least_from_page_cache
        if least is None:
            return "unknown"
        if least == 0:
            return "cold or mixed: the disk could deliver it all"
        return "warm (page cache)" if least == 1 else f"mixed or warm: at least {percent(least)} page cache"

    @property
    def partly_cached(self) -> bool:
        """Whether page cache certainly served part of the reads."""
        share = self.share_from_disk
        return share < COLD_FROM if share is not None else bool(self.least_from_page_cache)

    @property
    def from_page_cache(self) -> str:
        """The share that page cache served, in words."""
        if self.share_from_disk is not None:
            return percent(1 - self.share_from_disk)
        least = self.least_from_page_cache or 0.0
        return "all" if least == 1 else f"at least {percent(least)}"

    @property
    def in_words(self) -> str:
        """0 of 45.4 GB came from the disk."""
        if self.bytes_given is not None:
            given = size(self.bytes_given).removesuffix(" B") if not self.bytes_given else size(self.bytes_given)
            return f"{given} of {size(self.bytes_needed)} came from the disk"
        if self.disk_bytes_per_s is None or not self.needed_bytes_per_s:
            return f"{size(self.bytes_needed)} read, from disk or page cache"
        return f"reads averaged {rate(self.needed_bytes_per_s)}, and the disk peaked at {rate(self.disk_bytes_per_s)}"


def reads_of(row: QuestionRow, rows: Rows) -> DiskReads | None:
    """The reads of a row with weights on disk, or None. The disk's rate is the run's own peak, else the campaign's."""
    run = row.run
    per_pass = run.placement.disk_bytes_per_pass
    if not row.done or not per_pass:
        return None
    needed = run.bytes_expected_from_disk or per_pass * run.passes
    time = latency(run)
    own = run.disk_rkb_s_peak
    best = own if own is not None else max((r.disk_rkb_s_peak for r in rows.runs if r.disk_rkb_s_peak), default=None)
    return DiskReads(
        row.id,
        row.name,
        run.run_id,
        needed,
        needed / time.value if time else None,
        None if best is None else best * KIB,
        own is not None,
        run.bytes_from_disk,
        paced=run.kind == EMULATED,
    )


def analyze(runs: Iterable[Run]) -> tuple[DiskReads, ...]:
    """The reads of every measured row with weights on disk, each once, in the questions' order."""
    rows = homework_rows(runs)
    found: dict[int, DiskReads] = {}
    for question in QUESTIONS:
        for row in rows.question(question):
            reads = reads_of(row, rows) if row.run.debug_mode is None else None
            if reads is not None:
                found.setdefault(id(row.run), reads)
    return tuple(found.values())


def markdown(runs: Iterable[Run]) -> str:
    """Which runs' reads page cache served, in two sentences."""
    reads = analyze(runs)
    if reads and all(r.paced for r in reads):
        return (
            "The emulation paces the disk tier, so it makes no difference here whether page cache or disk serves it.\n"
        )
    if all(r.verdict == "unknown" for r in reads):
        return "Can't tell how much page cache served: nothing counted what the disk delivered.\n"
    cached = [r for r in reads if r.partly_cached]
    if not cached:
        return "No run read faster than the disk can.\n"
    if len(cached) == len(reads) and all(r.verdict.startswith("warm") for r in cached):
        return "**Page cache served the reads of every run**, so none shows the disk.\n"
    served = listed(f"{r.label} ({r.from_page_cache})" for r in cached)
    return (
        f"**Page cache served reads of {served}.** A ratio with one such run also contains the difference between page "
        "cache and disk.\n"
    )
