"""Estimate what a set of runs will take on this machine: time, memory, disk, and the basis of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from helpers import homework, lab
from helpers.engine import emulated_cost
from helpers.engine.emulated_cost import in_words
from helpers.errors import Refused
from helpers.machine import gpus, limits, profiles
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.profiles import MachineProfile
from helpers.placement import Placement, place
from helpers.predict import memory_check, time_model
from helpers.predict.gpu_memory import DEBUG_LAYER_STEPS, peak_gpu_memory
from helpers.predict.host_memory import copy_buffer_elements, host_memory_here
from helpers.settings import RunSettings
from helpers.units import GIB
from helpers.weights import store

# On an H200, a run takes 2 s to start and to sample; copy buffers take 0.8 s to pin and 0.7 s to release.
CUDA_START_S = 2.0
COPY_BUFFERS_S = 1.5
SLOW_OPTIONAL_S = 150.0  # optional runs that would take longer are skipped


@dataclass(frozen=True)
class Forecast:
    """Runs to make and runs already known. `seconds` is None on a machine of unknown speed; `basis` says what the
    estimate rests on. GiB are the most that one run takes. `refused` has the runs that don't fit, and why; the other
    figures leave them out."""

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
            return "nothing to run: every result is known"
        known = f" ({self.known} known)" if self.known else ""
        words = [f"{self.runs} run{'s' if self.runs > 1 else ''}{known}"]
        words.append(self.basis if self.seconds is None else f"{in_words(self.seconds)} ({self.basis})")
        sizes = {"of GPU memory": self.gpu_gib, "of RAM": self.host_gib, "on disk": self.disk_gib}
        takes = [f"{size:.1f} GiB {where}" for where, size in sizes.items() if size >= 0.05]
        if takes:
            words.append(f"at most {', '.join(takes)}")
        words += [f"{name} will be refused ({why})" for name, why in self.refused.items()]
        return ", ".join(words)


def of(runs: Mapping[str, RunSettings], output_dir: Path, fresh: bool = False) -> Forecast:
    """Forecast the runs that `lab.run` would make, leaving out those already in the output folder."""
    to_run = {name: runs[name] for name in (runs if fresh else lab.without_figures(runs, output_dir))}
    refused = {name: why for name, run in to_run.items() if (why := _why_refused(run))}
    new = [run for name, run in to_run.items() if name not in refused]
    on_cuda = [run for run in new if run.device == "cuda"]
    profile, basis = _profile(output_dir) if on_cuda else (None, "estimated from the emulated links")
    seconds = [_emulated_s(run) if run.device == "emulated" else _cuda_s(run, profile) for run in new]
    workspace = (profile or profiles.T4_COLAB).cublas_workspace_bytes
    return Forecast(
        runs=len(new),
        known=len(runs) - len(to_run),
        seconds=None if None in seconds else sum(filter(None, seconds)),
        basis=basis,
        gpu_gib=max((peak_gpu_memory(run, workspace).likeliest_gib for run in on_cuda), default=0.0),
        host_gib=max((host_memory_here(run).total_gib for run in on_cuda), default=0.0),
        disk_gib=max((_placement(run).bytes_by_tier["disk"] / GIB for run in new), default=0.0),
        refused=refused,
    )


def affordable(
    runs: Mapping[str, RunSettings], output_dir: Path, fresh: bool = False
) -> tuple[dict[str, RunSettings], dict[str, float]]:
    """Split off optional runs that would take longer than SLOW_OPTIONAL_S here; return the rest, and their seconds.

    Known results, the homework's own runs, and everything on a machine of unknown speed stay.
    """
    asked = [run for name, run in runs.items() if name not in homework.BESIDE]
    beside = {name: run for name, run in runs.items() if name in homework.BESIDE and run not in asked}
    unknown = beside if fresh else lab.without_figures(beside, output_dir)
    dear = {name: found.seconds for name in unknown if (found := of({name: beside[name]}, output_dir, fresh)).seconds}
    dear = {name: seconds for name, seconds in dear.items() if seconds > SLOW_OPTIONAL_S}
    return {name: run for name, run in runs.items() if name not in dear}, dear


def _why_refused(run: RunSettings) -> str | None:
    """Why `lab.run` would refuse a run on this machine right now."""
    try:
        memory_check.check_gpu(run, lab.describe_machine(run.device), gpus.compute_capability())
        if run.device == "cuda":
            memory_check.check_host(run, limits.memory_allowance())
        else:
            emulated_cost.check(run, store.kept(run.model) is not None, limits.memory_allowance(), allow_long=False)
    except Refused as refusal:
        return str(refusal)
    return None


def of_homework(device: Literal["cuda", "emulated"], output_dir: Path) -> dict[str, Forecast]:
    """Forecast each question, without the runs that an earlier question already makes."""
    forecasts, planned = {}, set()
    for question in homework.QUESTIONS:
        plan, _ = affordable(homework.plan(question, device), output_dir)
        runs = {name: run for name, run in plan.items() if name not in planned}
        planned |= set(runs)
        forecasts[question] = of(runs, output_dir)
    return forecasts


def profile_here(device: str, output_dir: Path) -> MachineProfile | None:
    """The profile that predictions for this machine are made from, or None before notebook 00 has measured it."""
    return EMULATED_T4 if device == "emulated" else _profile(output_dir)[0]


def _profile(output_dir: Path) -> tuple[MachineProfile | None, str]:
    """The profile to predict from: notebook 00's measurement of this machine, or the Colab T4's, and its name."""
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
    return None, f"time unknown until notebook 00 has measured this machine{damaged}"


def _cuda_s(run: RunSettings, profile: MachineProfile | None) -> float | None:
    """Start, weights, warm-up and generation, times the repeats."""
    if profile is None:
        return None
    predicted = time_model.predict(run, profile)
    placed = _placement(run)
    on_disk = placed.bytes_by_tier["disk"]
    # fp16 weights are linked into the offload folder; 4-bit ones are made of the fp16 files, and written.
    split = run.split
    fp16_bytes = place(run.opt_model, split.weights_gpu, split.weights_cpu, False).total_bytes
    to_read, to_write = (fp16_bytes, on_disk) if run.compress_weight else (placed.total_bytes - on_disk, 0)
    # Files that are read again stay in the page cache if they fit.
    cached = predicted.host_mem_gib * GIB + to_read + on_disk <= profile.shared_host_bytes
    read_gb_s, write_gb_s = (profile.page_cache_gb_s,) * 2 if cached else (profile.disk_gb_s, profile.disk_write_gb_s)
    prefill_s, decode_s = predicted.prefill_latency_s, predicted.decode_latency_s
    if run.debug_mode:  # FlexGen times only these layer-steps and projects the rest
        decode_s *= DEBUG_LAYER_STEPS / ((run.workload.gen_len - 1) * len(run.opt_model.layers))
    loading_s = to_read / 1e9 / read_gb_s + to_write / 1e9 / write_gb_s
    warm_up_s = prefill_s  # one token: one pass through the layers
    start_s = CUDA_START_S + COPY_BUFFERS_S * bool(copy_buffer_elements(run))
    return _repeats(run, prefill_s + decode_s) * (start_s + loading_s + warm_up_s + prefill_s + decode_s)


def _emulated_s(run: RunSettings) -> float:
    found = emulated_cost.cost(run, store.kept(run.model) is not None)
    return _repeats(run, found.measured_s) * found.seconds


def _repeats(run: RunSettings, generation_s: float) -> int:
    """`lab.run` measures no further repeat once it has used its budget."""
    budget_s = lab.EMULATED_REPEAT_BUDGET_S if run.device == "emulated" else lab.REPEAT_BUDGET_S
    return min(run.repeats, math.ceil(budget_s / generation_s))


def _placement(run: RunSettings) -> Placement:
    return place(run.opt_model, run.split.weights_gpu, run.split.weights_cpu, run.compress_weight)
