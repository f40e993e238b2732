"""What a set of runs will take on this machine, told before it starts: minutes, GiB, and what that rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers import homework, lab
from helpers.errors import Refused
from helpers.machine import gpus, limits, profiles
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.profiles import MachineProfile
from helpers.models import EMULATED_MODEL
from helpers.placement import Placement, place
from helpers.predict import memory_check, time_model
from helpers.predict.gpu_memory import DEBUG_LAYER_STEPS, peak_gpu_memory
from helpers.predict.host_memory import copy_buffer_elements, host_memory_here
from helpers.settings import RunSettings
from helpers.units import GIB

# Beside loading and generating, on an H200: 2 s to start and to sample; where there are copy buffers 0.8 s to pin them,
# and 0.7 s more to end.
CUDA_START_S = 2.0
COPY_BUFFERS_S = 1.5
DEAR_S = 150.0  # a run beside the homework that takes longer is left out
# Of opt-mini on the emulated GPU, measured on two CPU cores: a process, and a pass without its transfers.
EMULATED_START_S = 0.7
EMULATED_PASS_S = 0.015


@dataclass(frozen=True)
class Forecast:
    """Runs still to make and runs known already; `seconds` of the former, None where nothing says how fast this
    machine is, and `basis` in words; the most GiB that one of them takes of each memory. `refused`: those that will
    not fit, by name, and why; they are not in the other figures."""

    runs: int
    known: int
    seconds: float | None
    basis: str
    gpu_gib: float
    host_gib: float
    disk_gib: float
    refused: dict[str, str]

    def __str__(self) -> str:
        if not self.runs and not self.refused:
            return "nothing to run, every result is known already"
        known = f" ({self.known} known already)" if self.known else ""
        words = [f"{self.runs} run{'s' if self.runs > 1 else ''}{known}"]
        words.append(self.basis if self.seconds is None else f"{in_words(self.seconds)} ({self.basis})")
        sizes = {"of GPU memory": self.gpu_gib, "of RAM": self.host_gib, "on disk": self.disk_gib}
        takes = [f"{size:.1f} GiB {where}" for where, size in sizes.items() if size >= 0.05]
        if takes:
            words.append(f"at most {', '.join(takes)}")
        words += [f"{name} will be refused ({why})" for name, why in self.refused.items()]
        return ", ".join(words)


def of(runs: Mapping[str, RunSettings], output_dir: Path, fresh: bool = False) -> Forecast:
    """The forecast of some runs, as `lab.run` would make them: without those that the output folder knows."""
    to_run = {name: runs[name] for name in (runs if fresh else lab.without_figures(runs, output_dir))}
    refused = {name: why for name, run in to_run.items() if (why := _why_refused(run))}
    new = [run for name, run in to_run.items() if name not in refused]
    on_cuda = [run for run in new if run.device == "cuda"]
    profile, basis = _profile(output_dir) if on_cuda else (None, "estimated from the emulated links")
    seconds = [_emulated_s(run) if run.device == "emulated" else _cuda_s(run, profile) for run in new]
    known = None not in seconds
    workspace = (profile or profiles.T4_COLAB).cublas_workspace_bytes
    return Forecast(
        runs=len(new),
        known=len(runs) - len(to_run),
        seconds=sum(seconds) if known else None,
        basis=basis if known or on_cuda else "time not known beforehand",
        gpu_gib=max((peak_gpu_memory(run, workspace).likeliest_gib for run in on_cuda), default=0.0),
        host_gib=max((host_memory_here(run).total_gib for run in on_cuda), default=0.0),
        disk_gib=max((_placement(run).bytes_by_tier["disk"] / GIB for run in new), default=0.0),
        refused=refused,
    )


def affordable(
    runs: Mapping[str, RunSettings], output_dir: Path, fresh: bool = False
) -> tuple[dict[str, RunSettings], dict[str, float]]:
    """The runs without those beside the homework that are dear on this machine, and the seconds of each of those.

    What is known already costs nothing and stays, and so does what the homework runs anyway. None is left out where
    nothing says how fast this machine is.
    """
    asked = [run for name, run in runs.items() if name not in homework.BESIDE]
    beside = {name: run for name, run in runs.items() if name in homework.BESIDE and run not in asked}
    unknown = beside if fresh else lab.without_figures(beside, output_dir)
    dear = {name: found.seconds for name in unknown if (found := of({name: beside[name]}, output_dir, fresh)).seconds}
    dear = {name: seconds for name, seconds in dear.items() if seconds > DEAR_S}
    return {name: run for name, run in runs.items() if name not in dear}, dear


def _why_refused(run: RunSettings) -> str | None:
    """What `lab.run` will say of a run that does not fit in this machine's memory as it is now."""
    try:
        memory_check.check_gpu(run, lab.describe_machine(run.device), gpus.compute_capability())
        if run.device == "cuda":
            memory_check.check_host(run, limits.memory_allowance())
    except Refused as refusal:
        return str(refusal)
    return None


def of_homework(device: str, output_dir: Path) -> dict[str, Forecast]:
    """The forecast of each question; a run that an earlier question makes is not counted again."""
    forecasts, planned = {}, set()
    for question in homework.QUESTIONS:
        plan, _ = affordable(homework.plan(question, device), output_dir)
        runs = {name: run for name, run in plan.items() if name not in planned}
        planned |= set(runs)
        forecasts[question] = of(runs, output_dir)
    return forecasts


def in_words(seconds: float) -> str:
    """A duration that is known roughly: "about 40 s", "about 9 min"."""
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s"
    return f"about {round(seconds / 60)} min"


def profile_here(device: str, output_dir: Path) -> MachineProfile | None:
    """The profile that predictions for this machine are made from, or None before notebook 00 has measured it."""
    return EMULATED_T4 if device == "emulated" else _profile(output_dir)[0]


def _profile(output_dir: Path) -> tuple[MachineProfile | None, str]:
    """What says how fast this machine is: notebook 00's measurement of it, or a T4's published figures."""
    name = lab.describe_machine("cuda").name
    damaged = ""
    try:
        measured = profiles.kept_in(output_dir)
    except Refused as refused:
        measured, damaged = None, f"; {refused}"
    if measured and measured.name == name:
        return measured, "predicted from this machine's profile"
    if name == "Tesla T4":
        return profiles.T4_COLAB, f"predicted for a Colab T4{damaged}"
    return None, f"time not known before notebook 00 has measured this machine{damaged}"


def _cuda_s(run: RunSettings, profile: MachineProfile | None) -> float | None:
    """Start, weights, warm-up and generation, as often as they are repeated."""
    if profile is None:
        return None
    predicted = time_model.predict(run, profile)
    placed = _placement(run)
    on_disk = placed.bytes_by_tier["disk"]
    # fp16 weights are linked into the offload folder; 4-bit ones are made of the fp16 files, and written.
    split = run.split
    fp16_bytes = place(run.opt_model, split.weights_gpu, split.weights_cpu, False).total_bytes
    to_read, to_write = (fp16_bytes, on_disk) if run.compress_weight else (placed.total_bytes - on_disk, 0)
    # What is read again and again stays in the page cache, if there is room for it.
    cached = predicted.host_mem_gib * GIB + to_read + on_disk <= profile.shared_host_bytes
    read_gb_s, write_gb_s = (profile.page_cache_gb_s,) * 2 if cached else (profile.disk_gb_s, profile.disk_write_gb_s)
    prefill_s, decode_s = predicted.prefill_latency_s, predicted.decode_latency_s
    if run.debug_mode:  # FlexGen times these layer-steps and projects the rest
        decode_s *= DEBUG_LAYER_STEPS / ((run.workload.gen_len - 1) * len(run.opt_model.layers))
    loading_s = to_read / 1e9 / read_gb_s + to_write / 1e9 / write_gb_s
    warm_up_s = prefill_s  # of one token: once through the layers
    start_s = CUDA_START_S + COPY_BUFFERS_S * bool(copy_buffer_elements(run))
    return _repeats(run, prefill_s + decode_s) * (start_s + loading_s + warm_up_s + prefill_s + decode_s)


def _emulated_s(run: RunSettings) -> float | None:
    if run.opt_model != EMULATED_MODEL:
        return None
    placed = _placement(run)
    on_cpu = placed.bytes_by_tier["cpu"] / 1e9 / EMULATED_T4.h2d_gb_s
    on_disk = placed.bytes_by_tier["disk"] / 1e9 / EMULATED_T4.disk_gb_s
    pass_s = EMULATED_PASS_S + on_cpu + on_disk
    passes = run.workload.gen_len
    if run.debug_mode:
        passes = 1 + DEBUG_LAYER_STEPS / len(run.opt_model.layers)
    warm_up_s = pass_s
    return _repeats(run, passes * pass_s) * (EMULATED_START_S + warm_up_s + passes * pass_s)


def _repeats(run: RunSettings, generation_s: float) -> int:
    """`lab.run` makes no further repeat once it has measured for its budget."""
    return min(run.repeats, math.ceil(lab.REPEAT_BUDGET_S / generation_s))


def _placement(run: RunSettings) -> Placement:
    return place(run.opt_model, run.split.weights_gpu, run.split.weights_cpu, run.compress_weight)
