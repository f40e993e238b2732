"""Question 4: how the disk is read, by the homework's classes and by the bytes, and what offloading changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.disk_reads import IOSTAT_KB, DiskReads, of_point
from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import (
    CLOSE_WITHIN,
    EMULATED,
    FAR,
    Answer,
    Part,
    Value,
    gaps,
    in_line,
    latency,
    listed,
    orders,
    percent,
    plain,
    seconds,
    times,
)
from helpers.runs import Run

# The homework's rule, and how its words are read here.
LARGE_REQUEST_KB = 32
ABOUT_4_KB = 8  # "about 4 KB": up to twice
HIGH_REQUESTS_PER_S = 1000  # "high r/s"
MUCH_LOWER = 0.5  # "much lower than the disk can give": below this share

RULE = (
    f"The homework's rule, by the peaks: A (sequential, large blocks) if rareq-sz ≥ {LARGE_REQUEST_KB} KiB; B (random, "
    f"small blocks) if it is smaller and r/s is high (here: {HIGH_REQUESTS_PER_S:,} or more); C (page cache hits) if "
    f"it is about 4 KiB (here: up to {ABOUT_4_KB}) and rkB/s is much lower than the disk can give (here: below "
    f"{percent(MUCH_LOWER)})."
)

# Compute times nearer than this factor are called the same.
SAME_COMPUTE = 1.25
WITHIN = f"{100 * (SAME_COMPUTE - 1):.0f} %"

CLASS_NAMES = {
    "A": "A, sequential reads in large blocks",
    "B": "B, random reads in small blocks",
    "C": "C, page cache hits",
}


@dataclass(frozen=True)
class DiskClass:
    """How one run reads the disk: the homework's class (A, B, C, "none" or "unknown") beside the bytes."""

    row_id: str
    label: str
    by_rule: str
    why: str
    reads: DiskReads | None

    @property
    def agrees(self) -> bool | None:
        """Whether rule and bytes tell the same story; None if one of them is not known."""
        share = self.reads.share_from_disk if self.reads else None
        if self.by_rule not in CLASS_NAMES or share is None:
            return None
        return not self.reads.partly_cached if self.by_rule in "AB" else self.reads.partly_cached


@dataclass(frozen=True)
class Breakdown:
    """FlexGen's timers of one run, s: means over layers and layer-steps, as it prints them."""

    load_weight_s: float
    compute_s: float
    compute_s_median: float | None = None
    load_weight_s_median: float | None = None

    @property
    def load_over_compute(self) -> float | None:
        return self.load_weight_s / self.compute_s if self.compute_s else None

    @property
    def load_over_compute_by_median(self) -> float | None:
        if self.load_weight_s_median is None or not self.compute_s_median:
            return None
        return self.load_weight_s_median / self.compute_s_median


@dataclass(frozen=True, kw_only=True)
class DiskIO(Answer):
    """The classes and breakdowns behind the answer to question 4."""

    classes: tuple[DiskClass, ...]
    gpu: Breakdown | None
    disk: Breakdown | None

    @property
    def load_ratio(self) -> float | None:
        """load_weight on disk over load_weight on the GPU."""
        if self.gpu is None or self.disk is None or not self.gpu.load_weight_s:
            return None
        return self.disk.load_weight_s / self.gpu.load_weight_s

    @property
    def compute_median_ratio(self) -> float | None:
        """The same by the medians, which a slow first call does not move; None where they are not known."""
        if self.gpu is None or self.disk is None or not self.gpu.compute_s_median or not self.disk.compute_s_median:
            return None
        return self.disk.compute_s_median / self.gpu.compute_s_median

    @property
    def compute_is_the_same(self) -> bool:
        """Whether the usual layer-step takes as long: by the medians, where they are known."""
        ratio = self.compute_median_ratio or self.compute_ratio
        return ratio is not None and _is_same(ratio)

    @property
    def compute_ratio(self) -> float | None:
        """compute_layer_decoding with the weights on disk over the same on the GPU."""
        if self.gpu is None or self.disk is None or not self.gpu.compute_s:
            return None
        return self.disk.compute_s / self.gpu.compute_s


def analyze(points: Iterable[Run], disk_kb_s: float | None = None) -> DiskIO:
    """The answer to question 4. `disk_kb_s` is what the disk can give (KiB/s), where it was measured apart."""
    rows = homework_rows(points)
    classes = tuple(
        _classify(row_id, label, point, rows, disk_kb_s)
        for row_id, label in (("q1-5", "100 % disk"), ("q4-disk-cold", "100 % disk, page cache dropped"))
        if (point := rows.done(row_id)) and (row_id == "q1-5" or point is not rows.done("q1-5"))
    )
    answer = DiskIO(
        question="q4",
        gaps=gaps(rows, "q4"),
        classes=classes,
        parts=(),
        gpu=_breakdown(rows.done("q4-breakdown-gpu")),
        disk=_breakdown(rows.done("q4-breakdown-disk")),
    )
    parts = (
        Part("Part 1: how is the disk read?", "", _part_1(classes)),
        Part("Part 2: load / compute ratio", "", _part_2(rows, answer)),
        Part("(a) compute_layer_decoding, baseline against disk", "", _compute(answer)),
        Part("(b) load_weight, baseline against disk", "", _load(rows, answer)),
    )
    return DiskIO(question="q4", gaps=answer.gaps, classes=classes, parts=parts, gpu=answer.gpu, disk=answer.disk)


# ---- part 1 ---------------------------------------------------------------------------------------------------------


def _classify(row_id: str, label: str, point: Run, rows: Rows, disk_kb_s: float | None) -> DiskClass:
    reads = of_point(label, point, rows)
    by_rule, why = _by_rule(point, reads, disk_kb_s)
    return DiskClass(row_id, label, by_rule, why, reads)


def _by_rule(point: Run, reads: DiskReads | None, disk_kb_s: float | None) -> tuple[str, str]:
    requests, read_kb, request_kb = point.disk_r_s_peak, point.disk_rkb_s_peak, point.disk_rareq_kb_peak
    if requests is None and read_kb is None and request_kb is None:
        note = f" ({in_line('; '.join(point.notes))})" if point.notes else ""
        return "unknown", f"this machine's disk counters are not known{note}, so no class can be given"
    if not requests and not read_kb and not request_kb:
        return "none", (
            "the disk was not read at all while the run was measured: every read was a page cache hit, and the rule, "
            "which goes by the size of requests, cannot be applied"
        )
    if request_kb is None:
        return "unknown", (
            "the disk was read so little, or the run was so short, that no sample within it tells the size of "
            "requests, so no class can be given"
        )
    size_words = f"rareq-sz peaks at {plain(request_kb, 4)} KiB"
    if request_kb >= LARGE_REQUEST_KB:
        return "A", f"{size_words} ≥ {LARGE_REQUEST_KB} KiB: readahead joined consecutive pages into large requests"
    small = f"{size_words} < {LARGE_REQUEST_KB} KiB"
    if request_kb <= ABOUT_4_KB and read_kb is not None:
        limit, what = _what_the_disk_gives(reads, disk_kb_s)
        if limit is not None and read_kb < MUCH_LOWER * limit:
            return "C", (
                f"{size_words}, about one page, and rkB/s peaks at {plain(read_kb, 4)}, much lower "
                f"than {what}: most reads do not reach the disk"
            )
    if requests is not None and requests >= HIGH_REQUESTS_PER_S:
        return "B", f"{small} with {plain(requests, 4)} r/s: each request stands alone, the kernel could not join them"
    seen = "r/s is not known" if requests is None else f"r/s peaks at only {plain(requests, 4)}"
    return "none", f"{small}, but {seen}: too few small requests for B, and not what the rule calls C"


def _what_the_disk_gives(reads: DiskReads | None, disk_kb_s: float | None) -> tuple[float | None, str]:
    if disk_kb_s is not None:
        return disk_kb_s, f"the {plain(disk_kb_s, 4)} that this disk can give"
    if reads is not None and reads.needed_bytes_per_s:
        needed = reads.needed_bytes_per_s / IOSTAT_KB
        return needed, f"the {plain(needed, 4)} that the run took in (the disk's own limit is not given)"
    return None, ""


def _part_1(classes: tuple[DiskClass, ...]) -> str:
    if not classes:
        return "There is no run with all weights on disk, so there is nothing to classify."
    return "\n\n".join((RULE, *(_class_in_words(found) for found in classes)))


def _class_in_words(found: DiskClass) -> str:
    name = CLASS_NAMES.get(found.by_rule)
    words = f"{found.label}: " + (f"class {name}. By the homework's rule, " if name else "no class of the rule: ")
    words += found.why + "."
    reads = found.reads
    if reads is None:
        return words
    words += f" By the bytes: {reads.sentence}"
    if reads.bytes_given == 0 and found.by_rule in CLASS_NAMES:
        words += " (The peaks are over all repeats, the bytes are the median repeat's.)"
    if found.agrees is False:
        share = "no or few" if reads.verdict.startswith("warm") else "only part of the"
        words += (
            f" Here the two disagree: the rule says reads reach the disk, by the bytes {share} reads did. The "
            "peak tells "
            "the size of those requests that reached the disk, not how many did."
            if found.by_rule in "AB"
            else " Here the two disagree: the rule says page cache, by the bytes the disk gave the reads, "
            "in small requests."
        )
    elif found.by_rule in "AB" and reads.share_from_disk is None and reads.least_from_page_cache:
        words += " So the class holds for the requests that reached the disk, and they were not all."
    return words


# ---- part 2 ---------------------------------------------------------------------------------------------------------


def _breakdown(point: Run | None) -> Breakdown | None:
    if point is None or point.load_weight_s is None or point.compute_layer_decoding_s is None:
        return None
    return Breakdown(
        point.load_weight_s,
        point.compute_layer_decoding_s,
        point.compute_layer_decoding_s_median,
        point.load_weight_s_median,
    )


def _without(answer: DiskIO) -> str | None:
    missing = [name for name, found in (("the baseline", answer.gpu), ("the disk run", answer.disk)) if found is None]
    return f"Cannot be said: no breakdown of {listed(missing)}." if missing else None


def _part_2(rows: Rows, answer: DiskIO) -> str:
    words = []
    for name, found in (("Baseline (100 % GPU)", answer.gpu), ("100 % disk", answer.disk)):
        if found is None:
            words.append(f"{name}: no breakdown.")
            continue
        by_mean, by_median = found.load_over_compute, found.load_over_compute_by_median
        ratio = "" if by_mean is None else f" = {times(by_mean)}"
        words.append(
            f"{name}: load / compute = {seconds(found.load_weight_s)} / {seconds(found.compute_s)}{ratio}"
            + (" by the means that FlexGen prints." if by_median is not None else ".")
        )
        if by_median is not None:
            words.append(
                f"By the medians {seconds(found.load_weight_s_median)} / {seconds(found.compute_s_median)} = "
                f"{times(by_median)}."
            )
        usual = by_median if by_median is not None else by_mean
        if usual is not None:
            longer = "load_weight" if usual > 1 else "computing"
            of_what = " of a usual layer-step" if by_median is not None else ""
            words.append(f"So {longer} is the longer part{of_what}.")
        words += _slow_calls(found)
    if answer.disk is not None:
        words += _against_the_pass(rows, answer.disk)
    return " ".join(words)


def _slow_calls(found: Breakdown) -> list[str]:
    """Which means a few slow calls move, where the medians tell."""
    moved = ["load_weight"] if _moved(found.load_weight_s, found.load_weight_s_median) else []
    moved += ["compute_layer_decoding"] if _moved(found.compute_s, found.compute_s_median) else []
    return [f"A few slow calls, the first, cold ones among them, raise the mean of {listed(moved)}."] if moved else []


def _is_same(ratio: float) -> bool:
    return 1 / SAME_COMPUTE <= ratio <= SAME_COMPUTE


def _moved(mean: float, median: float | None) -> bool:
    return median is not None and mean > SAME_COMPUTE * median


def _against_the_pass(rows: Rows, disk: Breakdown) -> list[str]:
    """Layers x load_weight beside the pass that was measured without the breakdown."""
    point = rows.done("q1-5")
    whole = latency(point)
    if whole is None:
        return []
    layers = len(point.opt_model.layers)
    expected, measured = layers * disk.load_weight_s, whole.value / point.passes
    same = Value.of(expected).is_close_to(Value.of(measured))
    cache = "" if point.kind == EMULATED else ", or the page cache was in another state"
    verdict = (
        f"loading weights takes as long as the pass, to within {100 * CLOSE_WITHIN:.0f} %"
        if same
        else f"copies and computing overlap there{cache}"
        if expected > measured
        else f"something besides loading weights takes time there{cache}"
    )
    return [
        f"{layers} layers of {seconds(disk.load_weight_s)} are {seconds(expected)}, against "
        f"{seconds(measured)} for a pass of the undisturbed run: {verdict}."
    ]


def _compute(answer: DiskIO) -> str:
    missing = _without(answer)
    if missing:
        return missing
    before, after, change = answer.gpu.compute_s, answer.disk.compute_s, answer.compute_ratio
    if change is None:
        return f"Cannot be compared: the baseline's compute_layer_decoding is {seconds(before)}."
    words = f"{seconds(before)} against {seconds(after)}, {plain(change)} times"
    by_median = answer.compute_median_ratio
    if by_median is not None:
        words += (
            f" (by the medians {seconds(answer.gpu.compute_s_median)} against "
            f"{seconds(answer.disk.compute_s_median)}, {plain(by_median)} times)"
        )
    others = "threads that copy on the same cores, others who use them, other clocks"
    if _is_same(change) and not answer.compute_is_the_same:
        return (
            f"{words}: the means are the same to within {WITHIN}, the medians are not. A few slow calls weigh more "
            "in the means than what the usual layer-step differs by. The amount to compute is the same; the timer "
            f"must hold something besides ({others})."
        )
    if _is_same(change):
        return (
            f"{words}: the same to within {WITHIN}. Offloading changes where the weights are kept, not what is "
            "computed with them: the layer works on the same numbers once they have arrived."
        )
    if answer.compute_is_the_same:
        return (
            f"{words}: the means differ, the medians are the same to within {WITHIN}. A few slow calls, a cold "
            "first one among them, move the mean; offloading does not change what is computed."
        )
    slow_calls = by_median is None or any(
        _moved(found.compute_s, found.compute_s_median) for found in (answer.gpu, answer.disk)
    )
    causes = f"cold first calls, {others}" if slow_calls else others
    return (
        f"{words}: not the same, although what is computed is. The timer must hold something besides computing "
        f"({causes})."
    )


def _load(rows: Rows, answer: DiskIO) -> str:
    missing = _without(answer)
    if missing:
        return missing
    before, after, change = answer.gpu.load_weight_s, answer.disk.load_weight_s, answer.load_ratio
    if not change:
        return f"{seconds(before)} against {seconds(after)}: one of them is 0, so there is no ratio."
    words = f"{seconds(before)} against {seconds(after)}: about {plain(change, 2)}x, "
    words += f"{orders(change)}." if change >= FAR else "less than an order of magnitude."
    if change >= FAR:
        words += (
            " With the weights on the GPU load_weight has nothing to move; from disk each layer comes "
            "through CPU memory and over PCIe before it can be used."
        )
        if answer.compute_is_the_same:
            words += " Together with (a): offloading changes the path of the data and its cost, not the computing."
    else:
        words += " In these figures bringing the weights from the disk tier costs hardly more than having them."
    medians = [rows.done(row_id).load_weight_s_median for row_id in ("q4-breakdown-gpu", "q4-breakdown-disk")]
    if None not in medians and medians[0]:
        words += f" By the medians it is about {plain(medians[1] / medians[0], 2)}x."
    return words
