"""Checks for the notebooks' exercises and guesses: right or wrong, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from helpers.homework import DISK
from helpers.placement import place
from helpers.predict.gpu_memory import largest_batch as largest_batch_that_fits
from helpers.runs import Run
from helpers.settings import OffloadSplit, RunSettings
from helpers.units import GIB, MIB

WITHIN = 0.05  # relative; exercises ask for figures worked out by hand


@dataclass(frozen=True)
class Remark:
    """One line shown below a cell."""

    text: str

    def _repr_markdown_(self) -> str:
        return self.text


def check(yours: Any, right: float, hint: str = "", within: float = WITHIN) -> Remark:
    """Mark an answer right or wrong. One left at `...` is neither, so an unanswered notebook runs through."""
    if yours is ... or yours is None:
        return Remark("✏️ Replace the `...` above with your answer and run this cell again.")
    if not _is_number(yours):
        return Remark(f"❌ `{yours!r}` is not a number.")
    if abs(yours - right) <= within * abs(right):
        return Remark(f"✅ Right: {right:.3g}.")
    return Remark(f"❌ Not {yours:g}." + (f" Hint: {hint}" if hint else ""))


def how_far_off(guess: Any, measured: float | None, unit: str = "times") -> Remark:
    """How far a guess was from the measured figure."""
    if measured is None:
        return Remark("There is no measured figure to compare your guess with.")
    if guess is ... or guess is None:
        return Remark(f"Measured: **{measured:.3g} {unit}**. You made no guess.")
    if not _is_number(guess) or guess <= 0:
        return Remark(f"Measured: **{measured:.3g} {unit}**. Your guess `{guess!r}` is not a positive number.")
    ratio = max(guess / measured, measured / guess)
    verdict = "spot on" if ratio < 1.1 else "close" if ratio < 1.5 else f"off by a factor of {ratio:.2g}"
    return Remark(f"You guessed {guess:g} {unit}, measured: **{measured:.3g} {unit}**. {verdict.capitalize()}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- measured figures that a guess is about -------------------------------------------------------------------------


def fastest_over_slowest(runs: Iterable[Run]) -> float | None:
    """Throughput of the fastest run over that of the slowest."""
    speeds = [run.total_throughput_tok_s for run in runs if run.total_throughput_tok_s and not run.debug_mode]
    return max(speeds) / min(speeds) if len(speeds) > 1 else None


def speedup_by_4bit(runs: Iterable[Run], percent: str) -> float | None:
    """Throughput with 4-bit weights over throughput with fp16 weights, both at this split."""
    split = OffloadSplit.parse(percent)
    speeds = {run.compress_weight: run.total_throughput_tok_s for run in runs if run.split == split}
    fp16, compressed = speeds.get(False), speeds.get(True)
    return compressed / fp16 if fp16 and compressed else None


def load_over_compute(runs: Iterable[Run], percent: str) -> float | None:
    """Seconds of loading a layer over seconds of computing it, from the breakdown at this split."""
    split = OffloadSplit.parse(percent)
    for run in runs:
        if run.split == split and run.load_weight_s and run.compute_layer_decoding_s:
            return run.load_weight_s / run.compute_layer_decoding_s
    return None


# ---- figures that exercises ask for ---------------------------------------------------------------------------------


def percent_on_gpu(run: RunSettings, percent: str) -> float:
    """The share of the weights that FlexGen really puts on the GPU."""
    return _placement(run, percent).percent("gpu")


def gib_per_pass(run: RunSettings, percent: str, tier: str) -> float:
    """GiB of weights that come from a tier in every forward pass."""
    return _placement(run, percent).bytes_by_tier[tier] / GIB


def kv_cache_mib(run: RunSettings) -> float:
    """MiB of keys and values of one sequence, at its full length."""
    model, work = run.opt_model, run.workload
    return 2 * model.num_layers * (work.prompt_len + work.gen_len) * model.hidden_size * 2 / MIB


def largest_batch(run: RunSettings, gpu_mem_gib: float) -> int:
    """The largest batch whose peak GPU memory fits, with all weights on disk."""
    on_disk = run.model_copy(update={"split": OffloadSplit.parse(DISK)})
    return largest_batch_that_fits(on_disk, int(gpu_mem_gib * GIB))


def size_ratio_of_4bit(run: RunSettings) -> float:
    """Bytes of the model's fp16 weights over bytes of its 4-bit weights."""
    model = run.opt_model
    return place(model, 100, 0, False).total_bytes / place(model, 100, 0, True).total_bytes


def _placement(run: RunSettings, percent: str) -> Any:
    split = OffloadSplit.parse(percent)
    return place(run.opt_model, split.weights_gpu, split.weights_cpu, False)
