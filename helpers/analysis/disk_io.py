"""Question 4: how the disk is read, by the homework's classes, and what offloading changes in a layer's times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from helpers.analysis.disk_reads import COLD_FROM, WARM_BELOW, DiskReads, reads_of
from helpers.analysis.disturbances import another_reader
from helpers.analysis.matching import QuestionRow, Rows, homework_rows
from helpers.analysis.values import (
    SAME_WITHIN,
    Answer,
    Part,
    Value,
    capital,
    in_line,
    listed,
    orders,
    pass_time,
    percent,
    plain,
    possible,
    seconds,
    size,
    times,
    visible_part,
)
from helpers.runs import Run, samples_within
from helpers.units import KIB

# The homework's rule, and how its words are read here.
LARGE_REQUEST_KB = 32
ABOUT_4_KB = 8  # "about 4 KB": up to twice
HIGH_REQUESTS_PER_S = 1000  # "high r/s"
MUCH_LOWER = 0.5  # "much lower than your disk's spec": below this share

RULE = (
    f"The homework's rule, by the peaks: A (sequential, large blocks) if rareq-sz ≥ {LARGE_REQUEST_KB} KB; B (random, "
    f"small blocks) if it is smaller and r/s is high (here {HIGH_REQUESTS_PER_S:,} or more); C (page cache hits) if it "
    f"is about 4 KB (here up to {ABOUT_4_KB}) and rkB/s is much lower than the disk's spec (here below "
    f"{percent(MUCH_LOWER)}), or if nothing reached the disk."
)
READAHEAD = "Readahead merges consecutive pages into large requests."
MEANING = {"A": "sequential reads in large blocks", "B": "random reads in small blocks", "C": "page cache hits"}

SAME_COMPUTE = 1.25  # compute times within this factor count as the same

DiskClassName = Literal["A", "B", "C", "unknown"]


@dataclass(frozen=True)
class DiskClass:
    """How one run reads the disk, by the homework's rule, with the median request size and the bytes next to it."""

    row: QuestionRow
    by_rule: DiskClassName
    why: str
    reads: DiskReads | None
    request_kb_median: float | None = None
    samples: int = 0  # with reads, within the measured repeats
    samples_disagreeing: int = 0  # on the other side of the rule's 32 KB than the peak

    @property
    def row_id(self) -> str:
        return self.row.id

    @property
    def label(self) -> str:
        return self.row.name


@dataclass(frozen=True)
class Breakdown:
    """FlexGen's timers of one run, s: means over layers and layer-steps, as it prints them, and medians."""

    row: QuestionRow
    load_weight_s: float
    compute_s: float
    load_weight_s_median: float | None = None
    compute_s_median: float | None = None
    layers: int = 0
    pass_s: float | None = None  # of the same split's run without the breakdown

    @property
    def load_over_compute(self) -> float | None:
        return self.load_weight_s / self.compute_s if self.compute_s else None

    @property
    def compute_exceeds_pass(self) -> bool:
        """Whether the mean, once per layer, is longer than a whole pass, and so not a typical layer's."""
        return self.pass_s is not None and self.layers * self.compute_s > SAME_COMPUTE * self.pass_s

    @property
    def typical_compute_s(self) -> float:
        """The median, which slow first calls don't move, else the mean."""
        return self.compute_s if self.compute_s_median is None else self.compute_s_median


@dataclass(frozen=True, kw_only=True)
class DiskIO(Answer):
    """The classes and breakdowns behind the answer to question 4. Ratios are 100 % disk over 100 % GPU."""

    question: ClassVar[str] = "q4"
    classes: tuple[DiskClass, ...]
    breakdowns: tuple[Breakdown, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return _disk_part(self.classes), _compute_part(self), _load_part(self)

    @property
    def gpu(self) -> Breakdown | None:
        return self._breakdown("q4-breakdown-gpu")

    @property
    def disk(self) -> Breakdown | None:
        return self._breakdown("q4-breakdown-disk")

    def _breakdown(self, row_id: str) -> Breakdown | None:
        return next((found for found in self.breakdowns if found.row.id == row_id), None)

    @property
    def load_ratio(self) -> float | None:
        if self.gpu is None or self.disk is None or not self.gpu.load_weight_s:
            return None
        return self.disk.load_weight_s / self.gpu.load_weight_s

    @property
    def compute_ratio(self) -> float | None:
        if self.gpu is None or self.disk is None or not self.gpu.compute_s:
            return None
        return self.disk.compute_s / self.gpu.compute_s

    @property
    def compute_is_the_same(self) -> bool | None:
        """Whether a typical layer-step takes as long, by medians where both are known."""
        gpu, disk = self.gpu, self.disk
        if gpu is None or disk is None:
            return None
        both = gpu.compute_s_median is not None and disk.compute_s_median is not None
        pair = (gpu.typical_compute_s, disk.typical_compute_s) if both else (gpu.compute_s, disk.compute_s)
        return _alike(*pair) if min(pair) > 0 else None


def analyze(runs: Iterable[Run], disk_kb_s: float | None = None) -> DiskIO:
    """The answer to question 4. `disk_kb_s` is the disk's sequential rate (KiB/s), if measured separately."""
    rows = homework_rows(runs)
    shown = [row for row in rows.question("q4") if row.done]
    classes: dict[int, DiskClass] = {}
    for row in shown:
        if row.run.debug_mode is None:
            classes.setdefault(id(row.run), _classify(row, rows, disk_kb_s))
    breakdowns = tuple(found for row in shown if (found := _breakdown(row, rows)))
    return DiskIO(rows=rows, classes=tuple(classes.values()), breakdowns=breakdowns)


# ---- part 1 ---------------------------------------------------------------------------------------------------------


def _classify(row: QuestionRow, rows: Rows, disk_kb_s: float | None) -> DiskClass:
    run, reads = row.run, reads_of(row, rows)
    by_rule, why = _by_rule(run, reads, disk_kb_s)
    requests: list[float] = []
    if run.disk:
        inside = samples_within(run.disk, run.windows_s)
        requests = [kib for i in inside if (kib := run.disk.request_kib[i])]
    disagreeing = sum((kib >= LARGE_REQUEST_KB) != (by_rule == "A") for kib in requests)
    median = statistics.median(requests) if requests else None
    return DiskClass(row, by_rule, why, reads, median, len(requests), disagreeing if by_rule in "AB" else 0)


def _by_rule(run: Run, reads: DiskReads | None, disk_kb_s: float | None) -> tuple[DiskClassName, str]:
    requests, read_kb, request_kb = run.disk_r_s_peak, run.disk_rkb_s_peak, run.disk_rareq_kb_peak
    if (reads and reads.bytes_given == 0 and not read_kb) or requests == read_kb == 0:
        needed = f"0 of {size(reads.bytes_needed)}" if reads else "nothing"
        return "C", f"{needed} came from the disk; rareq-sz is undefined."
    if requests is None and read_kb is None and request_kb is None:
        note = f" ({in_line('; '.join(run.notes))})" if run.notes else ""
        return "unknown", f"nothing counted this disk's reads{note}."
    if request_kb is None:
        return "unknown", "no sample within the run gives a request size."
    peak = f"rareq-sz peaks at {plain(request_kb)} KB"
    if request_kb >= LARGE_REQUEST_KB:
        return "A", f"{peak} (≥ {LARGE_REQUEST_KB} KB)."
    limit = disk_kb_s or (reads.needed_bytes_per_s / KIB if reads and reads.needed_bytes_per_s else None)
    much_lower = read_kb is not None and limit is not None and read_kb < MUCH_LOWER * limit
    high = requests is not None and requests >= HIGH_REQUESTS_PER_S
    if much_lower and (request_kb <= ABOUT_4_KB or not high):
        what = "the disk can deliver" if disk_kb_s else "the run took in"
        return "C", f"{peak}, and the disk's {_kb_s(read_kb)} are far below the {_kb_s(limit)} that {what}."
    if high:
        return "B", f"{peak} (< {LARGE_REQUEST_KB} KB) at {plain(requests or 0, 4)} requests per second."
    seen = "an unknown number of" if requests is None else f"only {plain(requests)}"
    return "unknown", f"{peak}, with {seen} requests per second: neither B's rate nor C's."


def _kb_s(value: float | None) -> str:
    return f"{plain((value or 0) * KIB / 1e6)} MB/s"


def _disk_part(classes: tuple[DiskClass, ...]) -> Part:
    if not classes:
        return Part("Part 1:", "Can't tell: no run has all weights on disk.")
    first, *others = classes
    known = first.by_rule in MEANING
    verdict = f"Class {first.by_rule}, {MEANING[first.by_rule]}: {first.why}" if known else f"Can't tell: {first.why}"
    disagreement = _disagreement(first)
    reason = READAHEAD if first.by_rule == "A" and not disagreement else ""
    figures = []
    if first.by_rule in ("A", "B") and not disagreement:
        if first.request_kb_median is not None:
            figures.append(f"The median request is {plain(first.request_kb_median)} KB.")
        if first.reads:
            figures.append(f"{capital(first.reads.in_words)}.")
    details = [RULE]
    for found in others:
        known = found.by_rule in MEANING
        name = f"class {found.by_rule}, {MEANING[found.by_rule]}: " if known else "can't tell, "
        extra = f" {_disagreement(found)}" if _disagreement(found) else ""
        details.append(f"{found.label}: {name}{found.why}{extra}")
    return visible_part("Part 1:", verdict, (disagreement, reason, *figures), "\n\n".join(details))


def _disagreement(found: DiskClass) -> str:
    """Evidence against the class: another reader, most samples, or the bytes."""
    if another_reader(found.row.run):
        return "But another process was reading, too, so the peak may be its."
    if found.samples_disagreeing * 2 > found.samples:
        side = "below" if found.by_rule == "A" else "at or above"
        return (
            f"But {found.samples_disagreeing} of {found.samples} samples are {side} {LARGE_REQUEST_KB} KB "
            f"(median {plain(found.request_kb_median or 0)})."
        )
    share = found.reads.share_from_disk if found.reads else None
    if found.reads is None or share is None:
        return ""
    if found.by_rule in ("A", "B") and share < COLD_FROM:
        return f"But only {found.reads.in_words}: page cache served the rest."
    if found.by_rule == "C" and share >= WARM_BELOW:
        return f"But {found.reads.in_words}."
    return ""


# ---- part 2 ---------------------------------------------------------------------------------------------------------


def _breakdown(row: QuestionRow, rows: Rows) -> Breakdown | None:
    run = row.run
    load, compute = run.load_weight_s, run.compute_layer_decoding_s
    if run.debug_mode is None or load is None or compute is None:
        return None
    if not all(figure == 0 or possible(figure) for figure in (load, compute)):
        return None
    same_split = (other.run for other in rows.question("q1") if other.done and other.run.split == run.split)
    whole = pass_time(next(same_split, None))
    return Breakdown(
        row,
        load,
        compute,
        run.load_weight_s_median,
        run.compute_layer_decoding_s_median,
        len(run.opt_model.layers),
        whole.value if whole else None,
    )


def _alike(a: float, b: float) -> bool:
    return 1 / SAME_COMPUTE <= a / b <= SAME_COMPUTE


def _missing(answer: DiskIO) -> str:
    missing = [name for name, found in (("100 % GPU", answer.gpu), ("100 % disk", answer.disk)) if found is None]
    return f"Can't tell: no breakdown of {listed(missing)}." if missing else ""


def _compute_part(answer: DiskIO) -> Part:
    gpu, disk, change = answer.gpu, answer.disk, answer.compute_ratio
    if gpu is None or disk is None:
        return Part("Part 2 (a)", _missing(answer))
    figures = f"{seconds(gpu.compute_s)} vs {seconds(disk.compute_s)}"
    if not change:
        return Part("Part 2 (a)", f"Can't tell: compute_layer_decoding is {figures}.")
    means_alike, same = _alike(gpu.compute_s, disk.compute_s), bool(answer.compute_is_the_same)
    medians = ""
    if gpu.compute_s_median is not None and disk.compute_s_median is not None:
        medians = f"Medians: {seconds(gpu.compute_s_median)} vs {seconds(disk.compute_s_median)}."
    amount = "Offloading changes where weights are kept, not how much the GPU computes."
    if same and means_alike:
        verdict, reason = f"About the same: {figures} ({times(change)}×).", amount
    elif same:
        verdict = f"The same for a typical layer-step; a few slow calls move the means ({figures})."
        reason = amount
    else:
        verdict = f"Not the same: {figures} ({times(change)}×)."
        if means_alike:
            verdict = f"Not the same: the means agree ({figures}), the medians don't."
        causes = "copies or other load" if medians else "cold first calls, copies or other load"
        reason = f"The GPU computes the same, so the timer includes something else: {causes}."
    return visible_part("Part 2 (a)", verdict, (reason, _against_pass(answer), medians))


def _against_pass(answer: DiskIO) -> str:
    """Where the means of compute are longer than the pass allows."""
    for found in (answer.gpu, answer.disk):
        if found and found.compute_exceeds_pass and found.pass_s:
            total = seconds(found.layers * found.compute_s)
            return (
                f"{found.layers} layers of {seconds(found.compute_s)} would be {total} of a "
                f"{seconds(found.pass_s, 2)} pass, so that mean isn't a typical layer's."
            )
    return ""


def _load_part(answer: DiskIO) -> Part:
    gpu, disk, change = answer.gpu, answer.disk, answer.load_ratio
    if gpu is None or disk is None:
        return Part("Part 2 (b)", _missing(answer))
    figures = f"{seconds(gpu.load_weight_s)} vs {seconds(disk.load_weight_s)}"
    if not change:
        return Part("Part 2 (b)", f"Can't tell: load_weight is {figures}.", "", _ratios(answer))
    factor = f"{plain(change, 2)}×, {figures}"
    if change >= 10:
        verdict = f"By {orders(change)} ({factor})."
        reason = "On the GPU there is nothing to load; from disk every layer comes through CPU memory and over PCIe."
        if answer.compute_is_the_same:
            reason += " With (a): offloading changes the data's path and its cost, not the computation."
    elif change > 1 + SAME_WITHIN:
        verdict = f"By less than an order of magnitude ({factor})."
        reason = "Loading a layer from the disk tier costs little here."
    else:
        verdict = f"Not by an order of magnitude: loading from disk takes no longer ({factor})."
        reason = "These figures don't show what offloading costs."
    return Part("Part 2 (b)", verdict, reason, _ratios(answer))


def _ratios(answer: DiskIO) -> str:
    """Load / compute of each breakdown, and load_weight against the pass."""
    lines = []
    for found in answer.breakdowns:
        if found.load_over_compute is None:
            continue
        line = f"{found.row.name}: load / compute {plain(found.load_over_compute, 4)}"
        if found.load_weight_s_median is not None and found.compute_s_median:
            line += f" ({plain(found.load_weight_s_median / found.compute_s_median, 4)} by medians)"
        if found.pass_s is not None and found.row.run.placement.host_to_device_bytes_per_pass:
            loading = found.layers * found.load_weight_s
            line += (
                f"; {found.layers} layers of {seconds(found.load_weight_s)} are {seconds(loading)}, "
                f"against a pass of {seconds(found.pass_s)} without the breakdown"
            )
            if Value.of(loading).is_close_to(Value.of(found.pass_s)):
                line += ": loading takes as long as the pass"
        lines.append(f"- {line}.")
    return "\n".join(lines)
