"""Question 2: how far a larger batch spreads the cost of moving the weights, and where that must end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import (
    EMULATED,
    Answer,
    Part,
    Value,
    gaps,
    gib,
    latency,
    listed,
    pass_time,
    percent,
    plain,
    ratio,
    seconds,
    size,
    throughput,
    times,
)
from helpers.predict import gpu_memory
from helpers.runs import Run
from helpers.units import GIB

BATCHES = ("q2-b1", "q1-5", "q2-b16")
# A step that reaches this share of the ideal ratio scales.
SCALES_FROM = 0.95
# Adding batch without adding throughput: the batch stops scaling below this share of the ideal.
STOPS_BELOW = 0.5


@dataclass(frozen=True)
class BatchStep:
    """Two neighbouring batches: the ratio of throughputs beside the ideal one, and of wall times."""

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


@dataclass(frozen=True)
class Growth:
    """Peak GPU memory against the batch, and the batches at which growth ends; None is "not known"."""

    gib_per_sequence: float | None  # from the peaks of the smallest and the largest batch
    kv_cache_gib_per_sequence: float
    gpu_mem_gib: float | None
    largest_batch: int | None  # by the memory model
    compute_overtakes_at: float | None  # at the earliest


@dataclass(frozen=True, kw_only=True)
class BatchSize(Answer):
    """The steps and the growth behind the answer to question 2."""

    steps: tuple[BatchStep, ...]
    growth: Growth | None


def analyze(points: Iterable[Run], gpu_mem_gib: float | None = None) -> BatchSize:
    """The answer to question 2. `gpu_mem_gib` is the GPU's capacity, where the points do not hold it."""
    rows = homework_rows(points)
    batches = [rows.done(row_id) for row_id in BATCHES]
    steps = tuple(_step(a, b) for a, b in itertools.pairwise(batches) if throughput(a) and throughput(b))
    growth = _growth(rows, gpu_mem_gib)
    return BatchSize(
        question="q2",
        gaps=gaps(rows, "q2"),
        steps=steps,
        growth=growth,
        parts=(
            Part("How do the measured ratios compare with the ideal?", "", _scaling(rows, steps)),
            Part("Can the batch be scaled indefinitely?", "", _limits(rows, growth)),
        ),
    )


def _step(a: Run, b: Run) -> BatchStep:
    return BatchStep(
        a.workload.gpu_batch_size,
        b.workload.gpu_batch_size,
        ratio(throughput(b), throughput(a)),
        ratio(latency(b), latency(a)),
    )


def _growth(rows: Rows, gpu_mem_gib: float | None) -> Growth | None:
    known = [point for row_id in BATCHES if (point := rows.done(row_id))]
    if not known:
        return None
    first, last = known[0], known[-1]
    work = first.workload
    kv_cache = first.opt_model.kv_cache_bytes(work.num_gpu_batches, work.prompt_len, work.gen_len) / GIB
    capacity = gpu_mem_gib if gpu_mem_gib is not None else first.gpu_mem_gib
    per_sequence = largest = None
    if len(known) > 1 and first.peak_gpu_mem_gib is not None and last.peak_gpu_mem_gib is not None:
        more = last.workload.gpu_batch_size - first.workload.gpu_batch_size
        per_sequence = (last.peak_gpu_mem_gib - first.peak_gpu_mem_gib) / more
    if capacity is not None:
        largest = gpu_memory.largest_batch(last.settings, int(capacity * GIB))
    overtakes = None
    on_gpu, on_disk = rows.done("q1-1"), rows.done("q1-5")
    compute, pass_s = pass_time(on_gpu), pass_time(on_disk)
    if compute and pass_s and pass_s.exceeds(compute):
        overtakes = on_gpu.workload.gpu_batch_size * pass_s.value / compute.value
    return Growth(per_sequence, kv_cache, capacity, largest, overtakes)


def _scaling(rows: Rows, steps: tuple[BatchStep, ...]) -> str:
    if not steps:
        return "No two neighbouring batches have figures, so there is no ratio to compare."
    sentences = [
        listed(f"{step.name} = {times(step.ratio)}" for step in steps)
        + f", against the ideal {listed(dict.fromkeys(f'{step.ideal:g}' for step in steps))}: "
        + "; ".join(_verdict(step) for step in steps)
        + "."
    ]
    sentences.append(
        "Wall time: "
        + listed(
            f"batch {p.workload.gpu_batch_size} {seconds(latency(p).value, 5)}"
            for row_id in BATCHES
            if latency(p := rows.done(row_id))
        )
        + " ("
        + listed(
            f"{step.name} {'+' if step.wall_time_ratio.value >= 1 else '−'}"
            f"{percent(abs(step.wall_time_ratio.value - 1))}"
            for step in steps
        )
        + ")."
    )
    first = next(p for row_id in BATCHES if throughput(p := rows.done(row_id)))
    per_pass = first.placement.host_to_device_bytes_per_pass
    fixed = f"Every pass brings the same {size(per_pass)} of weights to the GPU, whatever the batch"
    shares = [step.share_of_ideal for step in steps]
    if max(shares) > 2 - SCALES_FROM:
        causes = "other load" if first.kind == EMULATED else "the page cache, other load"
        sentences.append(
            f"{fixed}, so the wall time can stay at best. Where it fell, something else than the batch changed "
            f"between the runs ({causes}): these ratios do not show amortization alone."
        )
    elif min(shares) >= SCALES_FROM:
        sentences.append(
            f"{fixed}: with the batch the time of a pass hardly changes, and each pass gives that many more tokens. "
            "Moving the weights is nearly the whole wall time; a larger batch shares it out over more tokens."
        )
    else:
        sentences.append(
            f"{fixed}, so if that were all, wall time would stay and the ratio be the ideal one. The wall time grew: "
            "something that grows with the batch (computing, the KV cache) is no longer hidden behind the weights"
            + (
                "."
                if any(step.wall_time_ratio.repeated for step in steps)
                else ", or the machine was busier: each batch was measured once."
            )
        )
        sentences += _computing(rows)
    return " ".join(sentences)


def _verdict(step: BatchStep) -> str:
    share = step.share_of_ideal
    if step.ratio.repeated and step.ratio.low <= step.ideal <= step.ratio.high:
        return f"{step.name} is the ideal, within the range of its repeats"
    if share > 2 - SCALES_FROM:
        return (
            f"{step.name} is {percent(share)} of the ideal, more than the batch can explain: the wall time fell, "
            "so the later run met other conditions"
        )
    if share >= SCALES_FROM:
        return f"{step.name} is {percent(share)} of it, as good as ideal"
    if not step.ratio.exceeds(Value.of(1.0)):
        return f"{step.name} brings nothing, throughput does not grow any more"
    if share < STOPS_BELOW:
        return f"{step.name} is only {percent(share)} of it, the batch has all but stopped scaling"
    return f"{step.name} falls short, {percent(share)} of it"


def _computing(rows: Rows) -> list[str]:
    compute, largest = pass_time(rows.done("q1-1")), rows.done("q2-b16")
    if not compute or not pass_time(largest):
        return []
    batch = largest.workload.gpu_batch_size
    estimate = compute.value * batch / rows.done("q1-1").workload.gpu_batch_size
    return [
        f"Computing alone takes {seconds(compute.value)} a pass at batch {rows.done('q1-1').workload.gpu_batch_size} "
        f"(100 % GPU); in proportion that is {seconds(estimate)} at batch {batch}, of the "
        f"{seconds(pass_time(largest).value)} measured."
    ]


def _limits(rows: Rows, growth: Growth | None) -> str:
    if growth is None:
        return "No batch has figures, so nothing can be said."
    kv_mib = growth.kv_cache_gib_per_sequence * 1024
    known = [point for row_id in BATCHES if (point := rows.done(row_id)) and point.peak_gpu_mem_gib is not None]
    words = []
    if growth.gib_per_sequence is None:
        words.append(
            "No. How memory grows with the batch is not known: two peaks are needed. The KV cache alone takes "
            f"{plain(kv_mib)} MiB for each sequence."
        )
    elif growth.gib_per_sequence <= 0:
        words.append(
            f"In these figures the peak does not grow with the batch ({_peaks(known)}), although the KV cache alone "
            f"takes {plain(kv_mib)} MiB for each sequence: something else makes the peak. Once the KV cache passes it, "
            "memory grows and must end the scaling."
        )
    else:
        mib = growth.gib_per_sequence * 1024
        words.append(f"No. The peak grows with the batch ({_peaks(known)}), by {plain(mib)} MiB for each sequence.")
        if mib > kv_mib:
            words.append(
                f"{plain(kv_mib)} MiB of that is the sequence's fp16 KV cache, which stays on the GPU "
                "here; the rest is activations and other buffers of the batch."
            )
        else:
            words.append(
                f"A sequence's fp16 KV cache takes {plain(kv_mib)} MiB: the smaller batches' peaks still hold "
                "something that does not grow."
            )
    if growth.largest_batch is not None:
        last = known[-1] if known else None
        if last is None or last.peak_gpu_mem_gib <= growth.gpu_mem_gib:
            words.append(
                f"By the memory model, which follows FlexGen's allocations, {plain(growth.gpu_mem_gib)} GiB "
                f"of GPU memory hold a batch of {growth.largest_batch:,}, if nothing else takes any; beyond "
                "it the run ends out of memory."
            )
        else:
            words.append(
                f"The stated {plain(growth.gpu_mem_gib)} GiB of GPU memory are less than the peak of "
                f"batch {last.workload.gpu_batch_size} itself, so that capacity is not this run's."
            )
    elif growth.gpu_mem_gib is None:
        words.append(
            "The GPU's capacity is not given, so the batch at which it is full cannot be worked out; that it "
            "ends there, out of memory, is certain."
        )
    if growth.compute_overtakes_at is not None:
        words.append(
            f"Throughput stops growing too, where computing takes as long as bringing the weights: at a batch of "
            f"{plain(growth.compute_overtakes_at, 2)} at the earliest. That takes the 100 % GPU pass as all computing, "
            "in proportion to the batch; launching kernels and reading the weights out of GPU memory, which it holds "
            "too, do not grow."
        )
        if growth.largest_batch is not None:
            words.append(
                "Memory is the limit that is met first."
                if growth.largest_batch < growth.compute_overtakes_at
                else "Whether memory or computing is met first, these figures do not say."
            )
    elif throughput(rows.done("q1-1")) is None:
        words.append(
            "At which batch computing would take as long as bringing the weights cannot be worked out without "
            "the run with 100 % on the GPU (`python -m helpers run q1`)."
        )
    return " ".join(words)


def _peaks(known: list[Run]) -> str:
    return listed(f"batch {p.workload.gpu_batch_size}: {gib(p.peak_gpu_mem_gib)} GiB" for p in known)
