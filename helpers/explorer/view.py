"""A state's bytes, memory and time in numbers and words, without pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from helpers import lab
from helpers.analysis.values import Value, plain, seconds, throughput
from helpers.explorer.bench import EMULATED, Bench, once
from helpers.explorer.split_map import SplitMap, split_map
from helpers.explorer.state import State
from helpers.machine.profiles import MachineProfile
from helpers.placement import TIERS, Tier, place
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.time_model import Prediction, predict
from helpers.runs import Run
from helpers.settings import RunSettings
from helpers.units import GIB, MIB

RUN_START_S = {"cuda": 4.0, "emulated": 1.0}  # a process, its copy buffers and its end; opt-1.3b on an H200


@dataclass(frozen=True)
class TierShare:
    """A tier's part of the weights: asked in percent, achieved in percent and bytes as stored."""

    asked_percent: int
    achieved_percent: float
    achieved_bytes: int


@dataclass(frozen=True)
class MemoryUse:
    """What a memory must hold, likely and at most, and its capacity, in bytes.

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
    """Everything that is shown of a state.

    `measured` are the machine's runs, none for a hypothetical one; `why_not` says what doesn't fit, if anything.
    """

    state: State
    profile: MachineProfile
    prediction: Prediction
    weights: dict[Tier, TierShare]
    gpu: MemoryUse
    host: MemoryUse
    why_not: str
    measured: Mapping[RunSettings, Run]

    @property
    def settings(self) -> RunSettings:
        return self.state.settings

    @property
    def aside(self) -> str:
        """The qualifier that every figure's title adds to its numbers."""
        return ", emulated" * (self.state.machine == EMULATED) + ", hypothetical" * bool(self.state.what_if)

    @property
    def run(self) -> Run | None:
        """The measured run of exactly this state."""
        return self.measured.get(once(self.settings))

    @property
    def measured_tok_s(self) -> Value | None:
        return throughput(self.run)

    @property
    def breakdown(self) -> Run | None:
        """The run of this state with FlexGen's own timers of loading and computing."""
        run = self.measured.get(once(self.settings).model_copy(update={"debug_mode": "breakdown"}))
        return run if run and run.load_weight_s else None

    @property
    def splits(self) -> SplitMap:
        return split_map(without_split(once(self.settings)), self.profile)

    def measured_like(self, alike: Callable[[RunSettings], RunSettings]) -> list[tuple[RunSettings, Value]]:
        """Token/s of the measured runs, except this state's, that equal it in all that `alike` leaves."""
        wanted, own = alike(once(self.settings)), once(self.settings)
        return [
            (settings, tok_s)
            for settings, run in self.measured.items()
            if settings != own and alike(settings) == wanted and (tok_s := throughput(run))
        ]

    @property
    def parts_of_a_pass_s(self) -> dict[str, float]:
        """Seconds that each part of the machine takes of a forward pass (the run's mean), longest first."""
        passes = self.settings.workload.gen_len
        parts = {name: term / passes for name, term in self.prediction.terms_s.items() if term > 0}
        return dict(sorted(parts.items(), key=lambda part: -part[1]))

    @property
    def pass_s(self) -> float:
        return self.prediction.total_latency_s / self.settings.workload.gen_len

    @property
    def measuring_s(self) -> float:
        """About how long it takes to measure this: start, weights, warm-up and generation of each repeat."""
        generation_s = self.prediction.total_latency_s
        repeats = min(self.settings.repeats, 1 + int(lab.REPEAT_BUDGET_S / generation_s))
        in_ram = self.weights["gpu"].achieved_bytes + self.weights["cpu"].achieved_bytes
        loading_s = in_ram / 1e9 / self.profile.disk_gb_s if self.settings.device == "cuda" else 0.0
        warm_up_s = self.prediction.prefill_latency_s
        return loading_s + repeats * (RUN_START_S[self.settings.device] + warm_up_s + generation_s)

    @property
    def headline(self) -> str:
        """The prediction in one sentence, or why there can be no run."""
        predicted, work = self.prediction, self.settings.workload
        if self.why_not:
            return self.why_not
        low, high = predicted.total_throughput_tok_s_bounds
        cached = ", its files from the page cache" if predicted.page_cache_serves_disk else ""
        return (
            f"Predicted: {plain(predicted.total_throughput_tok_s)} token/s (between {plain(low)} and {plain(high)}) "
            f"on {self.state.where}{cached}; {predicted.bottleneck} takes longest. {work.generated_tokens:,} tokens "
            f"in {seconds(predicted.total_latency_s)}, {seconds(predicted.prefill_latency_s)} of it prefill."
        )

    @property
    def off_by(self) -> str:
        """How far the prediction is off the measured throughput."""
        if not self.measured_tok_s:
            return ""
        off = round(100 * (self.prediction.total_throughput_tok_s / self.measured_tok_s.value - 1))
        return f"{off:+d} %" if off else "within 1 %"


def view(state: State, bench: Bench, measured: Mapping[RunSettings, Run]) -> View:
    """The view of a state; `measured`: the runs that its machine has figures of."""
    profile, settings = bench.profile(state), state.settings
    gpu, host = _gpu_memory(settings, profile), _host_memory(settings, profile)
    return View(
        state=state,
        profile=profile,
        prediction=predict(settings, profile),
        weights=_weights(settings),
        gpu=gpu,
        host=host,
        why_not=_why_not(gpu, host, state),
        measured={} if state.what_if else measured,
    )


def without_split(settings: RunSettings) -> RunSettings:
    """The same settings for all splits of the weights."""
    split = settings.split.model_copy(update={"weights_gpu": 0, "weights_cpu": 0})
    return settings.model_copy(update={"split": split})


def without_batch(settings: RunSettings) -> RunSettings:
    """The same settings for all batches."""
    workload = settings.workload.model_copy(update={"gpu_batch_size": 1, "num_gpu_batches": 1})
    return settings.model_copy(update={"workload": workload})


def _weights(settings: RunSettings) -> dict[Tier, TierShare]:
    split = settings.split
    placed = place(settings.opt_model, split.weights_gpu, split.weights_cpu, settings.compress_weight)
    asked = {"gpu": split.weights_gpu, "cpu": split.weights_cpu, "disk": split.weights_disk}
    return {tier: TierShare(asked[tier], placed.percent(tier), placed.bytes_by_tier[tier]) for tier in TIERS}


def _gpu_memory(settings: RunSettings, profile: MachineProfile) -> MemoryUse:
    peak, overhead = peak_gpu_memory(settings, profile.cublas_workspace_bytes), profile.gpu_overhead_gib * GIB
    parts = {name: float(size) for name, size in peak.parts.items()} | {"CUDA context": overhead}
    need, most = peak.likeliest_bytes + overhead, peak.high_bytes + overhead
    return MemoryUse("GPU memory", need, most, _without_zeros(parts), profile.gpu_mem_gib * GIB)


def _host_memory(settings: RunSettings, profile: MachineProfile) -> MemoryUse:
    memory, overhead = host_memory(settings), profile.host_overhead_gib * GIB
    parts = {name: float(size) for name, size in memory.parts.items()} | {"Python and torch": overhead}
    need = sum(parts.values())
    return MemoryUse("RAM", need, need, _without_zeros(parts), profile.host_ram_gib * GIB)


def _without_zeros(parts: dict[str, float]) -> dict[str, float]:
    return {name: size for name, size in parts.items() if size}


def _why_not(gpu: MemoryUse, host: MemoryUse, state: State) -> str:
    lacking = []
    for memory in (gpu, host):
        if not memory.fits:
            need, there = _told_apart(memory.most_bytes / GIB, memory.capacity_bytes / GIB)
            upto = "up to " if memory.most_bytes > memory.need_bytes else ""
            lacking.append(f"needs {upto}{need} GiB of {memory.name}, {state.where} has {there}")
    return f"Does not fit: {'; '.join(lacking)}." if lacking else ""


def _told_apart(larger: float, smaller: float) -> tuple[str, str]:
    """Two numbers with one decimal, or as many as it takes to see which is larger."""
    texts = "", ""
    for decimals in (1, 2, 3):
        texts = f"{larger:.{decimals}f}", f"{smaller:.{decimals}f}"
        if texts[0] != texts[1]:
            break
    return texts


def bytes_in_words(count: float, digits: int = 3) -> str:
    """Bytes in GiB, small ones in MiB."""
    return f"{plain(count / GIB, digits)} GiB" if count >= 0.1 * GIB else f"{plain(count / MIB, digits)} MiB"
