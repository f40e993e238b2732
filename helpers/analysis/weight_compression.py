"""Question 3: what 4-bit weights save and cost, with the weights on the GPU and on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.disk_reads import DiskReads, of_point
from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import (
    EMULATED,
    Answer,
    Part,
    Value,
    gaps,
    pass_time,
    plain,
    ratio,
    seconds,
    size,
    throughput,
    times,
    uncapital,
)
from helpers.runs import Run

SCENARIOS = (("(α)", "100 % GPU", "q1-1", "q3-gpu-4bit"), ("(β)", "100 % disk", "q1-5", "q3-disk-4bit"))


@dataclass(frozen=True)
class Change:
    """One scenario without and with --compress-weight; None where a row is missing."""

    sign: str
    scenario: str
    ratio: Value | None  # throughput with / without
    seconds_saved: float | None  # a pass; negative: it costs
    pass_before_s: float | None
    bytes_before: int | None  # of weights that a pass moves to the GPU
    bytes_after: int | None

    @property
    def direction(self) -> str | None:
        if self.ratio is None:
            return None
        if self.ratio.exceeds(Value.of(1.0)):
            return "faster"
        return "slower" if Value.of(1.0).exceeds(self.ratio) else "unchanged"

    @property
    def factor(self) -> float:
        """The change as a factor of at least 1, whichever its direction."""
        return max(self.ratio.value, 1 / self.ratio.value)


@dataclass(frozen=True, kw_only=True)
class WeightCompression(Answer):
    """The two changes, and the ratio of stored bytes, behind the answer to question 3."""

    gpu: Change
    disk: Change
    byte_ratio: float | None


def analyze(points: Iterable[Run]) -> WeightCompression:
    """The answer to question 3 from whichever of its four rows are there."""
    rows = homework_rows(points)
    gpu, disk = (_change(rows, *scenario) for scenario in SCENARIOS)
    byte_ratio = _byte_ratio(rows)
    return WeightCompression(
        question="q3",
        gaps=gaps(rows, "q3"),
        gpu=gpu,
        disk=disk,
        byte_ratio=byte_ratio,
        parts=(
            Part("Direction and size of the change", "", " ".join(_direction(change) for change in (gpu, disk))),
            Part(
                "(a) What does compression save, what does it cost, and which dominates?",
                "",
                _saves_and_costs(rows, gpu, disk),
            ),
            Part(
                "(b) Why is the change not the compression ratio?", "", _not_the_byte_ratio(rows, gpu, disk, byte_ratio)
            ),
        ),
    )


def _change(rows: Rows, sign: str, scenario: str, before_id: str, after_id: str) -> Change:
    before, after = rows.done(before_id), rows.done(after_id)
    both = pass_time(before) and pass_time(after)
    return Change(
        sign,
        scenario,
        ratio(throughput(after), throughput(before)),
        pass_time(before).value - pass_time(after).value if both else None,
        pass_time(before).value if both else None,
        before.placement.host_to_device_bytes_per_pass if before else None,
        after.placement.host_to_device_bytes_per_pass if after else None,
    )


def _byte_ratio(rows: Rows) -> float | None:
    for _, _, before_id, after_id in SCENARIOS:
        before, after = rows.done(before_id), rows.done(after_id)
        if before and after:
            return before.placement.total_bytes / after.placement.total_bytes
    return None


def _direction(change: Change) -> str:
    name = f"{change.sign} {change.scenario}"
    if change.ratio is None:
        return f"{name}: not known, it takes a run without and one with --compress-weight."
    words = {"faster": "faster", "slower": "slower", "unchanged": "no change outside the spread of the figures"}[
        change.direction
    ]
    return f"{name}: {times(change.ratio, 'x')} the throughput, {words}."


def _saves_and_costs(rows: Rows, gpu: Change, disk: Change) -> str:
    words = [
        "It saves bytes to move and to hold; it costs the conversion of the 4-bit values back to fp16 before each use, "
        "in every layer of every pass."
    ]
    if gpu.ratio is not None:
        words.append(_on_gpu(gpu))
    if disk.ratio is not None:
        words.append(_on_disk(rows, disk, gpu))
    if gpu.ratio is None and disk.ratio is None:
        words.append("Which dominates cannot be said: neither scenario has both of its runs.")
    return "\n\n".join(words)


def _on_gpu(gpu: Change) -> str:
    moved = "On the GPU no weight moves in either run, so there is no transfer to save"
    if gpu.direction == "slower":
        return (
            f"{moved}: what remains is the cost, {seconds(-gpu.seconds_saved)} more on a pass of "
            f"{seconds(gpu.pass_before_s)}. The cost dominates, throughput falls."
        )
    if gpu.direction == "faster":
        return (
            f"{moved}; and yet a pass is {seconds(gpu.seconds_saved)} shorter than "
            f"{seconds(gpu.pass_before_s)}. The "
            "conversion costs less than it saves here, for instance in reading the weights from GPU memory."
        )
    return f"{moved}, and the conversion costs nothing that shows on a pass of {seconds(gpu.pass_before_s)}."


def _on_disk(rows: Rows, disk: Change, gpu: Change) -> str:
    words = (
        f"On disk a pass moves {size(disk.bytes_before)} before and {size(disk.bytes_after)} after, "
        f"{size(disk.bytes_before - disk.bytes_after)} less."
    )
    extra = ""
    if gpu.direction == "slower":
        extra = f" (on the GPU that cost is {seconds(-gpu.seconds_saved)} a pass)"
    if disk.direction == "faster":
        return (
            f"{words} A pass is {seconds(disk.seconds_saved)} shorter than {seconds(disk.pass_before_s)}, "
            f"net of the conversion{extra}. What is saved dominates, throughput rises."
        )
    relay = (
        "FlexGen relays a compressed tensor from disk through an fp16 buffer, one byte becomes two, with a conversion "
        "of type each way on the CPU"
    )
    cached = [r for r in _reads(rows) if r.partly_cached and not r.paced]
    warm = ""
    if cached:
        warm = (
            " "
            + " ".join(r.sentence for r in cached)
            + " Reads from the page cache cost less than the disk's, so there is less to save."
        )
    if disk.direction == "slower":
        at_most = disk.pass_before_s * (1 - disk.bytes_after / disk.bytes_before)
        return (
            f"{words} And yet a pass is {seconds(-disk.seconds_saved)} longer than "
            f"{seconds(disk.pass_before_s)}{extra}. "
            f"{relay}: here that costs more than the smaller reads save, which is {seconds(at_most)} at most, "
            f"if all of a pass was reading.{warm} The cost dominates, throughput falls."
        )
    return (
        f"{words} A pass still takes as long, {seconds(disk.pass_before_s)}: what the smaller reads save, "
        f"the conversion takes. {relay}.{warm}"
    )


def _reads(rows: Rows) -> list[DiskReads]:
    found = [("Without compression it", "q1-5"), ("With compression it", "q3-disk-4bit")]
    reads = [of_point(label, rows.done(row_id), rows) for label, row_id in found if rows.done(row_id)]
    return [r for r in reads if r is not None]


def _not_the_byte_ratio(rows: Rows, gpu: Change, disk: Change, byte_ratio: float | None) -> str:
    if byte_ratio is None:
        return "There is no scenario with both of its runs, so there is no change to compare."
    words = [
        f"The stored weights shrink {plain(byte_ratio)} times, not 4: each group of 64 values also keeps an "
        "fp16 scale and minimum, and vectors stay fp16."
    ]
    if gpu.ratio is not None:
        words.append(
            f"{gpu.sign} changes by a factor of {times(gpu.factor)} ({gpu.direction}): no weight moves "
            "there, so the byte ratio has nothing to act on."
        )
    if disk.ratio is not None:
        words.append(_disk_against_bytes(rows, disk, byte_ratio))
    return " ".join(words)


def _disk_against_bytes(rows: Rows, disk: Change, byte_ratio: float) -> str:
    start = f"{disk.sign} changes by a factor of {times(disk.factor)} ({disk.direction})"
    if disk.direction != "faster":
        save = "less than" if disk.direction == "slower" else "about what"
        return f"{start}: the smaller reads save {save} converting costs, and neither is in proportion to the bytes."
    if disk.ratio.is_close_to(Value.of(byte_ratio)):
        return f"{start}, close to the byte ratio: reading the weights is nearly all of a pass, before and after."
    if disk.ratio.value < byte_ratio:
        remains = disk.pass_before_s / disk.ratio.value - disk.pass_before_s / byte_ratio
        return (
            f"{start}, less than the bytes: if a pass were reading alone it would take "
            f"{seconds(disk.pass_before_s / byte_ratio)} after compression; {seconds(remains)} more are computing, "
            "conversion, the KV cache and launches, which compression does not shrink."
        )
    words = (
        f"{start}, more than the bytes can explain: at the same rate a pass would take "
        f"{seconds(disk.pass_before_s / byte_ratio)} after compression, and it takes "
        f"{seconds(disk.pass_before_s / disk.ratio.value)}. So the reads themselves became faster"
    )
    if rows.done("q3-disk-4bit").kind == EMULATED:
        return f"{words}, although the emulation paces the disk tier: the two runs met other conditions."
    cached = [r for r in _reads(rows) if r.partly_cached and r.run_id == rows.done("q3-disk-4bit").run_id]
    if cached:
        return (
            f"{words}: {uncapital(cached[0].sentence)} The smaller weights fit the page cache "
            "better. Computing and conversion, which compression does not shrink, pull the other way."
        )
    return words + "; whether the page cache gave them is not known from these figures."
