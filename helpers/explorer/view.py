"""What a state shows: bytes, memory, time and the map of all splits, in numbers and words, without a picture."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from helpers.analysis.values import plain, seconds
from helpers.explorer.bench import EMULATED, Bench, MeasuredRun
from helpers.explorer.split_map import SplitMap, split_map
from helpers.explorer.state import State
from helpers.machine.profiles import MachineProfile
from helpers.placement import TIERS, Tier, place
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.time_model import Prediction, predict
from helpers.settings import RunSettings
from helpers.units import GIB, MIB


@dataclass(frozen=True)
class TierShare:
    """A tier's part of the weights: asked in percent, achieved in percent and bytes as stored."""

    asked_percent: int
    achieved_percent: float
    asked_bytes: float
    achieved_bytes: int


@dataclass(frozen=True)
class MemoryUse:
    """A memory's need at its likeliest and at most, what it is made of, and its capacity, in bytes.

    `parts` add up to `need_bytes`; the machine's own overhead (CUDA, Python) is one of them.
    """

    name: str
    need_bytes: float
    most_bytes: float
    parts: dict[str, float]
    capacity_bytes: float

    @property
    def fits(self) -> bool:
        return self.most_bytes <= self.capacity_bytes


@dataclass(frozen=True, eq=False)
class View:
    """Everything that is shown of a state."""

    state: State
    profile: MachineProfile
    prediction: Prediction
    weights: dict[Tier, TierShare]
    gpu: MemoryUse
    host: MemoryUse
    why_not: str  # what does not fit, in words; empty if all does
    measured: MeasuredRun | None  # of exactly this state
    measured_splits: tuple[MeasuredRun, ...]  # of other splits of the weights, all else equal

    @property
    def splits(self) -> SplitMap:
        return split_map(_without_split(self.state.settings), self.profile)

    @property
    def emulated(self) -> bool:
        return self.state.machine == EMULATED

    @property
    def where(self) -> str:
        """The machine as every label names it."""
        return self.state.machine

    @property
    def parts_of_a_pass_s(self) -> dict[str, float]:
        """Seconds that each part of the machine takes of a forward pass (the run's mean), longest first."""
        passes = self.state.settings.workload.gen_len
        parts = {name: term / passes for name, term in self.prediction.terms_s.items() if term > 0}
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    @property
    def pass_s(self) -> float:
        return self.prediction.total_latency_s / self.state.settings.workload.gen_len

    @property
    def command(self) -> str:
        """FlexGen's command line, to copy."""
        arguments = self.state.settings.flexgen_arguments()
        # The shell finds the home folder for a tilde that is not quoted.
        return " ".join(text if text.startswith("~/") else shlex.quote(text) for text in arguments)

    @property
    def headline(self) -> str:
        """The prediction in one sentence, or why there can be no run."""
        predicted, work = self.prediction, self.state.settings.workload
        if self.why_not:
            return self.why_not
        low, high = predicted.total_throughput_tok_s_bounds
        cached = ", its files from the page cache" if predicted.page_cache_serves_disk else ""
        return (
            f"Predicted: {plain(predicted.total_throughput_tok_s)} token/s (between {plain(low)} and {plain(high)}) "
            f"on {self.where}{cached}; {predicted.bottleneck} takes longest. {work.generated_tokens} tokens in "
            f"{seconds(predicted.total_latency_s)}, {seconds(predicted.prefill_latency_s)} of it prefill."
        )


def view(state: State, bench: Bench, measured: Sequence[MeasuredRun]) -> View:
    """The view of a state; `measured`: the runs that its machine has figures of."""
    profile, settings = bench.machines[state.machine], state.settings
    gpu, host = _gpu_memory(settings, profile), _host_memory(settings, profile)
    here = [run for run in measured if run.is_of(settings)]
    return View(
        state=state,
        profile=profile,
        prediction=predict(settings, profile),
        weights=_weights(settings),
        gpu=gpu,
        host=host,
        why_not=_why_not(gpu, host, state.machine),
        measured=here[-1] if here else None,
        measured_splits=tuple(
            run
            for run in measured
            if not run.is_of(settings) and _without_split(run.settings) == _without_split(settings)
        ),
    )


def _weights(settings: RunSettings) -> dict[Tier, TierShare]:
    split = settings.split
    placed = place(settings.opt_model, split.weights_gpu, split.weights_cpu, settings.compress_weight)
    asked = {"gpu": split.weights_gpu, "cpu": split.weights_cpu, "disk": split.weights_disk}
    return {
        tier: TierShare(
            asked[tier], placed.percent(tier), placed.total_bytes * asked[tier] / 100, placed.bytes_by_tier[tier]
        )
        for tier in TIERS
    }


@lru_cache(maxsize=1024)
def _gpu_memory(settings: RunSettings, profile: MachineProfile) -> MemoryUse:
    peak, overhead = peak_gpu_memory(settings, profile.cublas_workspace_bytes), profile.gpu_overhead_gib * GIB
    parts = {name: float(size) for name, size in peak.parts.items() if size} | {"CUDA context": overhead}
    return MemoryUse(
        "GPU memory",
        peak.likeliest_bytes + overhead,
        peak.high_bytes + overhead,
        {name: size for name, size in parts.items() if size},
        profile.gpu_mem_gib * GIB,
    )


@lru_cache(maxsize=1024)
def _host_memory(settings: RunSettings, profile: MachineProfile) -> MemoryUse:
    memory, overhead = host_memory(settings), profile.host_overhead_gib * GIB
    capacity = profile.host_ram_gib * GIB
    parts = {name: float(size) for name, size in memory.parts.items()} | {"Python and torch": overhead}
    need = sum(parts.values())
    return MemoryUse("RAM", need, need, {name: size for name, size in parts.items() if size}, capacity)


def _why_not(gpu: MemoryUse, host: MemoryUse, machine: str) -> str:
    lacking = []
    for memory in (gpu, host):
        if not memory.fits:
            need, there = _told_apart(memory.most_bytes / GIB, memory.capacity_bytes / GIB)
            upto = "up to " if memory.most_bytes > memory.need_bytes else ""
            lacking.append(f"needs {upto}{need} GiB of {memory.name}, {machine} has {there}")
    return f"Does not fit: {'; '.join(lacking)}." if lacking else ""


def _told_apart(larger: float, smaller: float) -> tuple[str, str]:
    """Two numbers with as many decimals, one or more, as it takes to see which is larger."""
    for decimals in (1, 2, 3):
        texts = f"{larger:.{decimals}f}", f"{smaller:.{decimals}f}"
        if texts[0] != texts[1]:
            break
    return texts


def _without_split(settings: RunSettings) -> RunSettings:
    """The same for all splits of the weights, and however often a run was repeated."""
    split = settings.split.model_copy(update={"weights_gpu": 0, "weights_cpu": 0})
    return settings.model_copy(update={"split": split, "repeats": 1})


def bytes_in_words(count: float) -> str:
    """Bytes in GiB, small ones in MiB."""
    return f"{plain(count / GIB)} GiB" if count >= 0.1 * GIB else f"{plain(count / MIB)} MiB"


def off_by(view: View) -> str:
    """How far the prediction is off the measured throughput, in words."""
    off = round(100 * (view.prediction.total_throughput_tok_s / view.measured.throughput_tok_s.value - 1))
    return f"{abs(off)} % {'above' if off > 0 else 'below'} it" if off else "within 1 % of it"
