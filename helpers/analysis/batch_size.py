"""Question 2: how well a larger batch amortises moving the weights, and where that ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from helpers.analysis.link_rates import LinkRates, link_rates
from helpers.analysis.matching import QuestionRow, Rows, homework_rows
from helpers.analysis.values import (
    EMULATED,
    Answer,
    Interval,
    Part,
    Value,
    latency,
    listed,
    memory,
    pass_time,
    plain,
    ratio,
    seconds,
    size,
    throughput,
    times,
    visible_part,
)
from helpers.predict import gpu_memory
from helpers.runs import Run
from helpers.units import GIB

# Shares of the ideal ratio that count as matching it.
SCALES_FROM = 0.95
ABOVE_FROM = 1.05
STEADY_WITHIN = 0.05  # wall times this close count as the same
MOST_OF_A_PASS = 0.5


@dataclass(frozen=True)
class BatchStep:
    """Two neighbouring batches: the ratio of throughputs next to the ideal one, and the ratio of wall times."""

    before: int
    after: int
    ratio: Value
    wall_time_ratio: Value

    @property
    def name(self) -> str:
        return f"b{self.after}/b{self.before}"

    @property
    def ideal(self) -> float:
        return self.after / self.before

    @property
    def share_of_ideal(self) -> float:
        return self.ratio.value / self.ideal

    @property
    def grows(self) -> bool:
        return self.ratio.exceeds(Value.of(1.0))


@dataclass(frozen=True)
class Growth:
    """Peak GPU memory against the batch, and the batches at which growth ends; None where unknown."""

    gib_per_sequence: float | None  # from the peaks of the smallest and the largest batch
    kv_cache_gib_per_sequence: float
    gpu_mem_gib: float | None
    largest_batch: int | None  # that fits, by the memory model
    compute_overtakes_at: float | None  # computing takes no longer than moving the weights up to this batch


@dataclass(frozen=True, kw_only=True)
class BatchSize(Answer):
    """The steps and the growth behind the answer to question 2."""

    question: ClassVar[str] = "q2"
    steps: tuple[BatchStep, ...]
    growth: Growth | None
    moving_share: Interval | None  # of a pass at the reference batch that moving weights takes, not hidden by computing
    computing_may_explain_growth: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        return _scaling(self), _limits(self)

    @property
    def done(self) -> list[QuestionRow]:
        return [row for row in self.rows.question("q2") if row.done]

    @property
    def timed(self) -> list[QuestionRow]:
        return [row for row in self.done if throughput(row.run)]


def analyze(runs: Iterable[Run], gpu_mem_gib: float | None = None) -> BatchSize:
    """The answer to question 2. `gpu_mem_gib` is the GPU's capacity, where the runs don't hold it."""
    rows = homework_rows(runs)
    done = [row for row in rows.question("q2") if row.done]
    timed = [row for row in done if throughput(row.run)]
    rates = link_rates(rows.question("q1"))
    return BatchSize(
        rows=rows,
        steps=tuple(_step(a.run, b.run) for a, b in itertools.pairwise(timed)),
        growth=_growth(done, rates, rows, gpu_mem_gib) if done else None,
        moving_share=_moving_share(rates, rows),
        computing_may_explain_growth=_computing_may_explain(timed, rates, rows),
    )


def _step(a: Run, b: Run) -> BatchStep:
    speeds, walls = ratio(throughput(b), throughput(a)), ratio(latency(b), latency(a))
    assert speeds and walls  # both runs have figures
    return BatchStep(a.workload.gpu_batch_size, b.workload.gpu_batch_size, speeds, walls)


def _moving_share(rates: LinkRates, rows: Rows) -> Interval | None:
    """The share of the all-disk pass that isn't computing or launching."""
    whole = pass_time(rows.done("q1-5"))
    if whole is None or rows.done("q1-1") is None:
        return None
    time = whole.interval
    return Interval(max(0.0, 1 - rates.compute.high / time.low), 1.0)


def _growth(shown: list[QuestionRow], rates: LinkRates, rows: Rows, gpu_mem_gib: float | None) -> Growth:
    first, last = shown[0].run, shown[-1].run
    work = first.workload
    kv_cache = first.opt_model.kv_cache_bytes(work.num_gpu_batches, work.prompt_len, work.gen_len) / GIB
    capacity = gpu_mem_gib if gpu_mem_gib is not None else first.gpu_mem_gib
    peaks = [(row.run.workload.gpu_batch_size, peak) for row in shown if (peak := row.run.peak_gpu_mem_gib) is not None]
    per_sequence = largest = overtakes = None
    if len(peaks) > 1:
        (small, low), (large, high) = peaks[0], peaks[-1]
        per_sequence = (high - low) / (large - small)
    if capacity is not None:
        largest = gpu_memory.largest_batch(last.settings, int(capacity * GIB))
    on_gpu, on_disk = rows.done("q1-1"), pass_time(rows.done("q1-5"))
    if on_gpu and on_disk and on_disk.interval.low > rates.compute.high:
        moving = on_disk.interval.low - rates.compute.high
        if moving >= rates.compute.high:  # else launches, which don't grow with the batch, may be all there is
            overtakes = on_gpu.workload.gpu_batch_size * moving / rates.compute.high
    return Growth(per_sequence, kv_cache, capacity, largest, overtakes)


def _computing_may_explain(timed: list[QuestionRow], rates: LinkRates, rows: Rows) -> bool:
    """Whether computing, grown in proportion to the batch, can be as long as wall time grew."""
    on_gpu = rows.done("q1-1")
    if on_gpu is None or len(timed) < 2:
        return True
    passes = [(row.run.workload.gpu_batch_size, time.value) for row in timed if (time := pass_time(row.run))]
    (_, fastest), (batch, slowest) = min(passes, key=lambda p: p[1]), max(passes, key=lambda p: p[1])
    return rates.compute.high * max(1.0, batch / on_gpu.workload.gpu_batch_size) >= 0.5 * (slowest - fastest)


# ---- words ----------------------------------------------------------------------------------------------------------


def _scaling(answer: BatchSize) -> Part:
    steps, share = answer.steps, answer.moving_share
    if not steps:
        return Part("Ratios:", "Can't tell: no two batches have figures.")
    walls = [time.value for row in answer.timed if (time := latency(row.run))]
    steady = max(walls) <= (1 + STEADY_WITHIN) * min(walls)
    wall = f"stays at {seconds(walls[0])}" if steady else f"goes from {seconds(walls[0])} to {seconds(walls[-1])}"
    run = answer.timed[0].run
    moved = f"the same {size(run.placement.host_to_device_bytes_per_pass)} of weights"
    causes = "other load" if run.kind == EMULATED else "page cache or other load"
    if any(step.share_of_ideal > ABOVE_FROM for step in steps):
        why = f"Every pass moves {moved}, so some passes got faster for another reason: {causes}."
    elif not steady and answer.computing_may_explain_growth:
        why = f"Every pass moves {moved}; computing, which grows with the batch, may no longer hide behind that."
    elif not steady:
        why = f"Every pass moves {moved}, and computing is too short to explain the growth: {causes} changed."
    elif share is None:
        why = f"Every pass moves {moved}, whatever the batch, and yields more tokens."
    elif share.low >= MOST_OF_A_PASS:
        why = f"Moving {moved} takes {_share(share.low)} of every pass; a larger batch spreads it over more tokens."
    else:
        why = f"Every pass moves {moved} and launches the same kernels; a larger batch spreads that over more tokens."
    return visible_part("Ratios:", _ratio_verdict(steps), (f"Wall time {wall}.", why))


def _share(least: float) -> str:
    return "almost all" if least >= 0.9 else "most"


def _ratio_verdict(steps: tuple[BatchStep, ...]) -> str:
    if all(SCALES_FROM <= step.share_of_ideal <= ABOVE_FROM for step in steps):
        ideals = listed(dict.fromkeys(f"{step.ideal:g}×" for step in steps))
        figures = listed(f"{step.name} {times(step.ratio)}" for step in steps)
        which = {1: "it matches", 2: "both match"}.get(len(steps), "all match")
        return f"{which} the ideal {ideals}: {figures}."
    groups: dict[str, list[str]] = {}
    for step in steps:
        groups.setdefault(_compared(step), []).append(f"{step.name} ({times(step.ratio.value)} of {step.ideal:g}×)")
    return "; ".join(f"{listed(names)} {compared}" for compared, names in groups.items()) + "."


def _compared(step: BatchStep) -> str:
    if step.share_of_ideal > ABOVE_FROM:
        return "above the ideal"
    if step.share_of_ideal >= SCALES_FROM:
        return "as ideal"
    return "short of the ideal" if step.grows else "without gain"


def _limits(answer: BatchSize) -> Part:
    growth = answer.growth
    if growth is None:
        return Part("Unlimited batch?", "Can't tell: no batch has figures.")
    kv_mib, per_sequence = growth.kv_cache_gib_per_sequence * 1024, growth.gib_per_sequence
    peaks = [peak for row in answer.done if (peak := row.run.peak_gpu_mem_gib) is not None]
    kv = f"The fp16 KV cache, {plain(kv_mib)} MiB per sequence, stays on the GPU"
    if per_sequence is None:
        verdict, reason = "No: GPU memory runs out.", f"{kv}."
    elif per_sequence <= 0:
        verdict = f"No, although the peak doesn't grow yet ({memory(peaks[0])} to {memory(peaks[-1])})."
        reason = f"{kv}, so memory runs out once that outgrows what makes the peak now."
    else:
        mib = per_sequence * 1024
        grows = f"peak GPU memory grows by {plain(mib)} MiB per sequence"
        verdict = f"No: {grows} ({memory(peaks[0])} to {memory(peaks[-1])})."
        reason = f"{kv}."
        if mib > kv_mib:
            reason = f"Of that, {plain(kv_mib)} MiB are its fp16 KV cache, which stays on the GPU."
    return visible_part(
        "Unlimited batch?", verdict, (reason, _full_at(peaks, growth)), _overtaking(growth, answer.steps)
    )


def _full_at(peaks: list[float], growth: Growth) -> str:
    if growth.gpu_mem_gib is None:
        return "Scaling ends out of memory."
    capacity = f"{plain(growth.gpu_mem_gib)} GiB"
    if peaks and peaks[-1] > growth.gpu_mem_gib:
        return f"The stated capacity, {capacity}, is below the measured peak, so it isn't this GPU's."
    if growth.largest_batch is None:
        return f"Scaling ends when {capacity} are full."
    return f"{capacity} hold a batch of at most {growth.largest_batch:,} by the memory model."


def _overtaking(growth: Growth, steps: tuple[BatchStep, ...]) -> str:
    """How far throughput grows before computing takes as long as moving the weights."""
    if growth.compute_overtakes_at is None or not all(step.grows for step in steps):
        return ""
    words = (
        "Throughput grows at least until computing takes as long as moving the weights, at a batch of "
        f"{plain(growth.compute_overtakes_at, 2)} or more (the 100 % GPU pass taken as all computing, in proportion to "
        "the batch; launches don't grow with it)."
    )
    if growth.largest_batch is not None and growth.largest_batch < growth.compute_overtakes_at:
        words += " Memory is the limit met first."
    return words
