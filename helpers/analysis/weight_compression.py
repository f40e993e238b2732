"""Question 3: what 4-bit weights save and cost, with the weights on the GPU and on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from helpers.analysis.disk_reads import DiskReads, reads_of
from helpers.analysis.matching import QuestionRow, Rows, homework_rows
from helpers.analysis.values import (
    Answer,
    Part,
    Value,
    pass_time,
    plain,
    seconds,
    size,
    throughput,
    times,
    visible_part,
)
from helpers.runs import Run

SAME_SHARE = 0.05  # shares from disk this close count as the same page cache


@dataclass(frozen=True)
class Change:
    """One split without and with --compress-weight; both runs have figures. Times are seconds of a pass."""

    without: QuestionRow
    compressed: QuestionRow
    ratio: Value  # throughput with / without
    pass_before_s: Value
    pass_after_s: Value
    reads_before: DiskReads | None
    reads_after: DiskReads | None

    @property
    def label(self) -> str:
        return self.without.label

    @property
    def direction(self) -> str:
        if self.ratio.exceeds(Value.of(1.0)):
            return "faster"
        return "slower" if Value.of(1.0).exceeds(self.ratio) else "unchanged"

    @property
    def seconds_saved(self) -> float:
        """Negative where compression costs time."""
        return self.pass_before_s.value - self.pass_after_s.value

    @property
    def bytes_before(self) -> int:
        return self.without.run.placement.host_to_device_bytes_per_pass

    @property
    def bytes_after(self) -> int:
        return self.compressed.run.placement.host_to_device_bytes_per_pass

    @property
    def byte_ratio(self) -> float:
        """How much smaller the stored weights get."""
        return self.without.run.placement.total_bytes / self.compressed.run.placement.total_bytes

    @property
    def page_cache(self) -> int | None:
        """Which run's reads page cache served more: 1 the compressed one's, -1 the other's, 0 neither; None: unknown.

        The emulation paces its disk tier, so there page cache makes no difference.
        """
        before, after = self.reads_before, self.reads_after
        if before is None or after is None or before.paced:
            return 0
        if before.share_from_disk is not None and after.share_from_disk is not None:
            difference = before.share_from_disk - after.share_from_disk
            return 0 if abs(difference) < SAME_SHARE else 1 if difference > 0 else -1
        if after.partly_cached != before.partly_cached and "unknown" not in (before.verdict, after.verdict):
            return 1 if after.partly_cached else -1
        return None

    @property
    def dominates(self) -> str | None:
        """Whether the cost of dequantization or the saving of bytes decides the direction; None: neither shows, or
        something else may decide it."""
        if self.direction == "faster" and self.bytes_before:
            return "saving"
        return "cost" if self.direction == "slower" and self.page_cache in (0, 1) else None


@dataclass(frozen=True, kw_only=True)
class WeightCompression(Answer):
    """The changes behind the answer to question 3, one for each split that has both runs."""

    question: ClassVar[str] = "q3"
    changes: tuple[Change, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return _costs(self), _magnitude(self)

    def change(self, label: str) -> Change | None:
        """(α), (β) or another split's label."""
        return next((change for change in self.changes if change.label == label), None)

    @property
    def gpu(self) -> Change | None:
        return self.change("(α)")

    @property
    def disk(self) -> Change | None:
        return self.change("(β)")

    @property
    def byte_ratio(self) -> float | None:
        return self.changes[0].byte_ratio if self.changes else None


def analyze(runs: Iterable[Run]) -> WeightCompression:
    """The answer to question 3 from whichever splits have a run without and one with 4-bit weights."""
    rows = homework_rows(runs)
    shown = [row for row in rows.question("q3") if row.done and throughput(row.run)]
    plain_rows = {row.label: row for row in shown if not row.run.compress_weight}
    changes = tuple(
        _change(plain_rows[row.label], row, rows)
        for row in shown
        if row.run.compress_weight and row.label in plain_rows
    )
    return WeightCompression(rows=rows, changes=changes)


def _change(without: QuestionRow, compressed: QuestionRow, rows: Rows) -> Change:
    before, after = throughput(without.run), throughput(compressed.run)
    pass_before, pass_after = pass_time(without.run), pass_time(compressed.run)
    assert before and after and pass_before and pass_after  # `shown` holds no other rows
    reads = reads_of(without, rows), reads_of(compressed, rows)
    return Change(without, compressed, after.over(before), pass_before, pass_after, *reads)


# ---- (a) costs ------------------------------------------------------------------------------------------------------


def _costs(answer: WeightCompression) -> Part:
    general = "Compression saves bytes to move, adds dequantization."
    if not answer.changes:
        return Part("(a)", f"{general} Can't tell which dominates: no split has both runs.")
    verdicts = "; ".join(f"{change.label} {_verdict(change)}" for change in answer.changes)
    return visible_part("(a)", f"{general} {verdicts}.", map(_reason, answer.changes))


def _verdict(change: Change) -> str:
    figure = f"{times(change.ratio.value)}×"
    if change.direction == "unchanged":
        return f"stays the same ({figure})"
    why = f": the {change.dominates} dominates" if change.dominates else ""
    return f"{'slows down' if change.direction == 'slower' else 'speeds up'} ({figure}){why}"


def _reason(change: Change) -> str:
    before, by = seconds(change.pass_before_s.value, 2), seconds(abs(change.seconds_saved), 2)
    if not change.bytes_before:
        return {
            "slower": f"On the GPU nothing moves: {by} of cost on a pass of {before}.",
            "faster": "On the GPU nothing moves: reading less GPU memory must outweigh the cost, or load changed.",
            "unchanged": "On the GPU nothing moves, and the cost doesn't show.",
        }[change.direction]
    tier = "From disk" if change.without.run.placement.disk_bytes_per_pass else "From the CPU"
    moved = f"{size(change.bytes_before)} shrink to {size(change.bytes_after)}"
    if change.direction == "faster":
        return f"{tier}, {moved} per pass: {by} less on a pass of {before}."
    if change.direction == "unchanged":
        return f"{tier}, {moved} per pass, but moving them was hidden, or other costs make up for it."
    return f"{tier}, a pass takes {by} longer although {moved}: {_why_slower(change)}"


def _why_slower(change: Change) -> str:
    if change.dominates and change.reads_before:
        return "FlexGen's conversion through an fp16 buffer costs more."
    if change.dominates:
        return "dequantization costs more."
    if change.page_cache == -1:
        return "page cache served fp16 better, so they don't compare."
    return "can't tell whether conversion or less page cache."


# ---- (b) magnitude --------------------------------------------------------------------------------------------------


def _magnitude(answer: WeightCompression) -> Part:
    if not answer.changes:
        return Part("(b)", "Can't tell: no split has both runs.")
    shrink = f"Weights shrink {plain(answer.changes[0].byte_ratio)}×, not 4× (each group keeps a scale and a minimum)"
    reasons = ["(α) has no weight I/O to shrink."] if answer.gpu else []
    reasons += [_against_bytes(answer.disk)] if answer.disk else []
    return visible_part("(b)", f"{shrink}, and a pass is more than weight I/O.", reasons)


def _against_bytes(disk: Change) -> str:
    measured = f"{times(disk.ratio.value)}×"
    if disk.direction != "faster":
        return "(β) gains nothing."
    if disk.ratio.is_close_to(Value.of(disk.byte_ratio)):
        reasons = {
            0: "reading weights is nearly all of its pass",
            1: "page cache also served more of its reads",
            -1: "page cache served fewer of its reads",
            None: "how much page cache served isn't known",
        }
        return f"(β) comes close ({measured}): {reasons[disk.page_cache]}."
    if disk.ratio.value < disk.byte_ratio:
        by_bytes, after = disk.pass_before_s.value / disk.byte_ratio, disk.pass_after_s.value
        more = " Page cache also served the fp16 run better." if disk.page_cache == -1 else ""
        return (
            f"(β) gains only {measured}: a pass takes {seconds(after, 2)}, not {seconds(by_bytes, 2)}; computing, "
            f"dequantization and launches don't shrink.{more}"
        )
    words = f"(β) gains more, {measured}, so its reads also got faster"
    if disk.page_cache == 1 and disk.reads_after:
        return f"{words}: page cache served {disk.reads_after.from_page_cache} ({disk.reads_after.in_words})."
    return f"{words}; these figures don't tell why."
