"""The machines to explore, the models to run on each, and the runs measured there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from helpers import homework, lab, models, results, runs
from helpers.analysis import readers
from helpers.errors import Refused
from helpers.explorer.state import State
from helpers.machine import profiles
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.measured_profile import from_ceilings
from helpers.machine.profiles import PROFILES, T4_COLAB, MachineProfile
from helpers.models import EMULATED_MODEL, KNOWN_MODELS, SYNTHETIC_MODELS
from helpers.report.comparison import REFERENCE
from helpers.results import Log, Machine, RunRecord
from helpers.runs import Run
from helpers.settings import OffloadSplit, RunSettings

EMULATED = f"emulated GPU ({EMULATED_T4.name})"
# The hand-in's runs that t4-colab's rates come from (see its sources).
_T4_COLAB_CALIBRATED_ON = ("q1-1", "q1-2", "q1-5", "q3-gpu-4bit")


def once(settings: RunSettings) -> RunSettings:
    """The settings by which measured runs are found, however often each was repeated."""
    return settings.model_copy(update={"repeats": 1})


@dataclass(frozen=True)
class Bench:
    """Machines by name; `here` is the one that runs are measured on, None if no profile describes it.

    `models`: the choice on each machine. `calibrated_on`: the runs that each machine's rates come from.
    """

    machines: dict[str, MachineProfile]
    models: dict[str, tuple[str, ...]]
    here: str | None
    output: Path
    start: State
    calibrated_on: dict[str, frozenset[RunSettings]]

    def device_of(self, machine: str) -> Literal["cuda", "emulated"]:
        return "emulated" if machine == EMULATED else "cuda"

    def profile(self, state: State) -> MachineProfile:
        return state.what_if.applied_to(self.machines[state.machine])

    def measured(self, machine: str) -> Mapping[RunSettings, Run]:
        """The latest run of each setting that the log has of this machine; for t4-colab, the hand-in's, quoted."""
        if machine == self.here:
            return _logged(self.output, lab.describe_machine(self.device_of(machine)))
        return _quoted() if machine == T4_COLAB.name else {}

    def was_calibrated_on(self, state: State) -> bool:
        """Whether the machine's rates come from this very run, so that its prediction proves nothing."""
        return once(state.settings) in self.calibrated_on.get(state.machine, ())

    def why_not_measurable(self, state: State) -> str:
        """Why this can't be measured here; empty if it can."""
        if state.what_if:
            return "A hypothetical machine can't be measured: press Real machine first."
        if state.machine == self.here:
            return ""
        if self.here is None:
            return "To measure here, run notebook 00 first: it makes this machine's profile."
        return f"Predicted only: this session measures on “{self.here}”."


def open_bench(
    device: Literal["cuda", "emulated"],
    output: Path,
    model: str = "",
    page_cache: Literal["natural", "cold"] = "natural",
    repeats: int = 3,
) -> Bench:
    """The machines with published profiles, and this one: the emulated GPU, or the GPU that notebook 00 measured.

    Raises Refused for a model that FlexGen can't run.
    """
    machines = dict(PROFILES)
    wanted = models.resolve(model).name if model and not models.local_folder(model) else model
    hand_in = homework.plan("q1", "cuda") | homework.plan("q3", "cuda")
    calibrated_on = {T4_COLAB.name: frozenset(once(hand_in[row]) for row in _T4_COLAB_CALIBRATED_ON)}
    here = None
    if device == "emulated":
        here, machines[EMULATED] = EMULATED, EMULATED_T4
    elif measured := _measured_profile(output):
        here = f"this machine ({measured.name})"
        machines[here] = measured
    known = tuple(name for name, shape in KNOWN_MODELS.items() if shape not in SYNTHETIC_MODELS)
    choices = dict.fromkeys(machines, _with(known, wanted) if device == "cuda" else known)
    if device == "emulated":
        choices[EMULATED] = _with((EMULATED_MODEL.name,), wanted)
    settings = RunSettings(
        model=wanted or homework.MODEL[device],
        split=OffloadSplit.parse("50 50 100 0 100 0"),
        device=device,
        workload=homework.WORKLOAD[device],
        page_cache=page_cache,
        repeats=repeats,
    )
    return Bench(machines, choices, here, output, State(here or T4_COLAB.name, settings), calibrated_on)


def _with(names: tuple[str, ...], another: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*names, another) if another else names))


def _measured_profile(output: Path) -> MachineProfile | None:
    """The profile of this CUDA machine that notebook 00 kept: calibrated, or else from its ceilings."""
    name = lab.describe_machine("cuda").name
    try:
        kept = profiles.kept_in(output)
    except Refused as damaged:
        warnings.warn(f"{damaged}; its ceilings are used instead if they are there", stacklevel=2)
        kept = None
    if kept is None and (output / profiles.CEILINGS_NAME).is_file():
        try:
            text = (output / profiles.CEILINGS_NAME).read_text(encoding="utf-8")
            kept = from_ceilings(MachineCeilings.model_validate_json(text))
        except (Refused, ValueError):  # ceilings of an older notebook, without a GPU's, or not text
            return None
    return kept if kept and kept.name == name else None


def _logged(output: Path, where: Machine) -> dict[RunSettings, Run]:
    """The runs that the lab itself would accept as known on this machine."""
    latest: dict[str, RunRecord] = {}
    for record in Log(output / results.LOG_NAME):
        if record.status == "done" and record.repeats and record.key == lab.run_key(record.settings, where):
            latest[record.key] = record
    return {once(record.settings): runs.from_record(record.key, record) for record in latest.values()}


def _quoted() -> dict[RunSettings, Run]:
    return {once(run.settings): run for run in readers.read_csv(REFERENCE)}
