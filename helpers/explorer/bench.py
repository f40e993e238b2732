"""What there is to explore: machines, the models each can be asked about, and what was measured on them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from helpers import homework, lab, models, results, runs
from helpers.analysis import readers
from helpers.analysis.values import Value, throughput
from helpers.errors import Refused
from helpers.explorer.state import State
from helpers.machine import profiles
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.profiles import PROFILES, T4_COLAB, MachineProfile
from helpers.models import EMULATED_MODEL, KNOWN_MODELS, SYNTHETIC_MODELS
from helpers.predict.rates import calibrate
from helpers.predict.time_model import predict
from helpers.report.tables import REFERENCE
from helpers.results import Log, Machine, RunRecord
from helpers.runs import from_record
from helpers.settings import OffloadSplit, RunSettings

EMULATED = f"emulated GPU ({EMULATED_T4.name})"
# Splits whose measured runs may better the emulated profile, each showing another rate: a layer, the link, the disk.
_CALIBRATED_ON = ("q1-1", "q1-2", "q1-5")
# The hand-in's runs that t4-colab's rates are from (see its sources).
_T4_COLAB_IS_FROM = ("q1-1", "q1-2", "q1-5", "q3-gpu-4bit")


@dataclass(frozen=True)
class MeasuredRun:
    """A run with figures: what it was, who measured it, token/s with the range of repeats, peak GPU memory."""

    settings: RunSettings
    kind: runs.Kind
    source: str
    throughput_tok_s: Value
    peak_gpu_mem_gib: float | None

    def is_of(self, settings: RunSettings) -> bool:
        """Whether this is a run of these settings, however often it was repeated."""
        return self.settings == settings.model_copy(update={"repeats": self.settings.repeats})


@dataclass(frozen=True)
class Bench:
    """Machines by name; `here` is the one that runs are measured on, None where no profile describes it.

    `models`: what each machine can be asked about. `calibrated_on`: measured runs that a profile's rates are from.
    """

    machines: dict[str, MachineProfile]
    models: dict[str, tuple[str, ...]]
    here: str | None
    output: Path
    start: State
    calibrated_on: tuple[RunSettings, ...] = ()

    def device_of(self, machine: str) -> Literal["cuda", "emulated"]:
        return "emulated" if machine == EMULATED else "cuda"

    def first_model(self, machine: str) -> str:
        """What is shown of a machine that cannot be asked about the model at hand."""
        return homework.MODEL[self.device_of(machine)]

    def measured(self, machine: str) -> tuple[MeasuredRun, ...]:
        """What the log has of a machine, the last run of equal ones; of t4-colab, the quoted hand-in's figures."""
        if machine == self.here:
            return tuple(_logged(self.output, lab.describe_machine(self.device_of(machine))))
        return tuple(_quoted()) if machine == T4_COLAB.name else ()

    def was_calibrated_on(self, machine: str, settings: RunSettings) -> bool:
        """Whether the machine's rates are from this very run, so that its prediction proves nothing."""
        if machine not in (EMULATED, T4_COLAB.name):
            return False
        return any(settings == run.model_copy(update={"repeats": settings.repeats}) for run in self.calibrated_on)

    def why_not_measurable(self, machine: str) -> str:
        """Why runs on this machine cannot be measured here, in words; empty if they can."""
        if machine == self.here:
            return ""
        if self.here is None:
            return "To measure, run notebook 00 first: it makes the profile of this machine."
        return f"Predicted only: what can be measured here is “{self.here}”."


def open_bench(
    device: Literal["cuda", "emulated"],
    output: Path,
    model: str = "",
    page_cache: Literal["natural", "cold"] = "natural",
    repeats: int = 3,
) -> Bench:
    """The machines with published profiles, and this one: the emulated GPU, or the GPU that notebook 00 measured.

    Raises Refused for a model that FlexGen has none of, or a damaged profile.
    """
    machines = dict(PROFILES)
    known = tuple(name for name, known in KNOWN_MODELS.items() if known not in SYNTHETIC_MODELS)
    wanted = models.resolve(model).name if model and not models.local_folder(model) else model
    here = None
    hand_in = homework.plan("q1", "cuda") | homework.plan("q3", "cuda")
    calibrated_on = tuple(hand_in[row] for row in _T4_COLAB_IS_FROM)
    workload = homework.WORKLOAD[device]
    if device == "emulated":
        here = EMULATED
        where = lab.describe_machine(device)
        machines[EMULATED], emulated_on = _calibrated(emulated_profile(where), tuple(_logged(output, where)))
        calibrated_on += emulated_on
    else:
        measured = _measured_profile(output)
        if measured:
            here = f"this machine ({measured.name})"
            machines[here] = measured
    first = here or T4_COLAB.name
    everywhere = tuple(dict.fromkeys((*known, wanted) if wanted and device == "cuda" else known))
    of_machine = dict.fromkeys(machines, everywhere)
    if device == "emulated":
        of_machine[EMULATED] = tuple(dict.fromkeys((EMULATED_MODEL.name, wanted) if wanted else (EMULATED_MODEL.name,)))
    settings = RunSettings(
        model=wanted or homework.MODEL[device],
        split=OffloadSplit.parse("50 50 100 0 100 0"),
        device=device,
        workload=workload,
        page_cache=page_cache,
        repeats=repeats,
    )
    return Bench(machines, of_machine, here, output, State(first, settings), calibrated_on)


def _measured_profile(output: Path) -> MachineProfile | None:
    """The profile of this CUDA machine that notebook 00 kept: calibrated, or else from its ceilings."""
    name = lab.describe_machine("cuda").name
    try:
        kept = profiles.kept_in(output)
    except Refused as damaged:
        warnings.warn(f"{damaged}; its ceilings are taken instead, if they are there", stacklevel=2)
        kept = None
    if kept is None and (output / profiles.CEILINGS_NAME).is_file():
        try:
            text = (output / profiles.CEILINGS_NAME).read_text(encoding="utf-8")
            kept = profiles.from_ceilings(MachineCeilings.model_validate_json(text))
        except (Refused, ValueError):  # ceilings without a GPU's, of an older notebook, or no text
            return None
    return kept if kept and kept.name == name else None


# ---- what was measured ----------------------------------------------------------------------------------------------


def _logged(output: Path, where: Machine) -> Iterator[MeasuredRun]:
    """What the laboratory itself would take as known on this machine."""
    latest: dict[str, RunRecord] = {}
    for record in Log(output / results.LOG_NAME):
        if record.status == "done" and record.key == lab.run_key(record.settings, where):
            latest[record.key] = record
    for record in latest.values():
        if record.settings.debug_mode is None and record.repeats:
            point = from_record(record.key, record)
            yield MeasuredRun(record.settings, point.kind, point.source, throughput(point), point.peak_gpu_mem_gib)


def _quoted() -> Iterator[MeasuredRun]:
    for point in readers.read_csv(REFERENCE):
        speed = throughput(point)
        if speed and point.debug_mode is None:
            settings = RunSettings(
                model=point.model,
                split=point.split,
                workload=point.workload,
                device="cuda",
                compress_weight=point.compress_weight,
            )
            yield MeasuredRun(settings, point.kind, point.source, speed, point.peak_gpu_mem_gib)


# ---- the emulated machine -------------------------------------------------------------------------------------------

_TWO_CORES = "measured with opt-mini on two EPYC cores"


def emulated_profile(where: Machine) -> MachineProfile:
    """The machine that the emulated GPU plays, as the time model takes it: its links as they are paced, and a CPU
    core in the place of the GPU."""
    paced = f"the emulation's own pace ({EMULATED_T4.name})"
    numbers = {
        "gpu_mem_gib": (EMULATED_T4.gpu_mem_gib, "the emulation's own limit"),
        "gpu_overhead_gib": (0.0, "there is no CUDA context"),
        "gpu_mem_gb_s": (10.0, _TWO_CORES),
        "gpu_fp16_tflop_s": (0.02, _TWO_CORES),
        "dequantize_gb_s": (0.55, _TWO_CORES),
        "layer_overhead_us": (790.0, _TWO_CORES),
        "prefill_kernel_loading_s": (0.0, "there are no kernels to load"),
        "decode_kernel_loading_s": (0.0, "there are no kernels to load"),
        "h2d_gb_s": (EMULATED_T4.h2d_gb_s, paced),
        "d2h_gb_s": (EMULATED_T4.h2d_gb_s, paced),
        "cache_store_gb_s": (EMULATED_T4.h2d_gb_s, paced),
        "cache_overhead_us": (0.0, "within layer_overhead_us"),
        "host_copy_gb_s": (4.0, _TWO_CORES),
        "page_cache_gb_s": (4.0, _TWO_CORES),
        "file_overhead_us": (0.0, "within page_cache_gb_s"),
        "cpu_attention_gb_s": (0.5, _TWO_CORES),
        "relay_gb_s": (1.0, _TWO_CORES),
        "disk_gb_s": (EMULATED_T4.disk_gb_s, paced),
        "disk_write_gb_s": (EMULATED_T4.disk_gb_s, paced),
        "host_ram_gib": (where.ram_gib, "this machine's"),
        "host_overhead_gib": (0.5, "a process with torch, without CUDA"),
        # The page cache of the emulated disk is none: its pace is kept whatever the machine's own holds.
        "mapped_files_gib": (where.ram_gib, "the emulated disk keeps its pace: no page cache"),
        "cublas_workspace_mib": (0.0, "there is no cuBLAS"),
    }
    return MachineProfile(
        name=EMULATED,
        sources={field: source for field, (_, source) in numbers.items()},
        **{field: value for field, (value, _) in numbers.items()},
    )


def _calibrated(
    profile: MachineProfile, measured: Sequence[MeasuredRun]
) -> tuple[MachineProfile, tuple[RunSettings, ...]]:
    """The profile with the rates that the sweep's measured runs show, and those runs; as it was if they show none."""
    sweep = homework.plan("q1", "emulated")
    taken: dict[str, tuple[RunSettings, float]] = {}
    for row in _CALIBRATED_ON:
        for run in measured:
            if run.is_of(sweep[row]):
                bottleneck = predict(run.settings, profile).bottleneck
                taken.setdefault(bottleneck, (run.settings, run.throughput_tok_s.value))
    if not taken:
        return profile, ()
    try:
        return calibrate(profile, dict(taken.values())), tuple(settings for settings, _ in taken.values())
    except Refused:  # a machine so unlike that no rate explains its runs
        return profile, ()
