"""Run settings: skip known results, take turns over repeats, show progress, record each result."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from helpers import home, models, options, paths, results
from helpers.engine import emulated_cost, launcher, worker
from helpers.engine.core_speed import FULL_SPEED
from helpers.engine.flexgen_release import RELEASE, other_flexgen
from helpers.errors import Refused
from helpers.machine import disks, gpus, limits, this_machine
from helpers.machine.emulation import EMULATED_T4
from helpers.placement import Placement, place
from helpers.predict import memory_check
from helpers.results import KIND_OF_DEVICE, METHOD_VERSION, Failure, Log, Machine, Repeat, RunRecord, Sweep
from helpers.settings import RunSettings
from helpers.weights import store

REPEAT_BUDGET_S = 60.0  # no further repeat once this much has been measured
EMULATED_REPEAT_BUDGET_S = 2.0  # paced runs give the same figures every time: repeat only quick ones
MOST_REPLACED = 2  # extra repeats allowed to replace ones in which the CPU was too slow
RUN_LIMIT_S = 1800.0

MOST_REPEATS = 5  # a known result with up to this many repeats also answers a request for fewer
_measuring = threading.Lock()

PACKAGES = ("flexgen", "torch", "numpy", "transformers", "papermill")


def choose_device(wanted: Literal["auto", "cuda", "emulated"]) -> Literal["cuda", "emulated"]:
    """The device to run on: CUDA where there is a GPU, else the emulated GPU. Raises Refused if CUDA is missing."""
    if wanted not in ("auto", "cuda", "emulated"):
        raise Refused(f"device {wanted!r}: choose auto, cuda or emulated")
    there = _torch_has_cuda() and gpus.cuda_available()
    if there and wanted != "emulated":
        os.environ.update(gpus.environment())  # keep CUDA from choosing a faulty GPU first
    if wanted == "cuda" and not there:
        raise Refused("device cuda: no NVIDIA GPU that this torch can use; take emulated, or auto")
    return "cuda" if there and wanted != "emulated" else "emulated"


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, without importing it."""
    try:
        text = (Path(str(importlib.metadata.distribution("torch").locate_file("torch"))) / "version.py").read_text()
    except (OSError, importlib.metadata.PackageNotFoundError):
        return False
    return re.search(r"^cuda\b[^=]*= *['\"]", text, re.MULTILINE) is not None


def run(
    settings: RunSettings | Mapping[str, RunSettings],
    output_dir: Path | str = paths.DEFAULT_OUTPUT,
    *,
    fresh: bool = False,
    offload_root: Path | str | None = None,
    limit_s: float = RUN_LIMIT_S,
    allow_long: bool = False,
    say: Callable[[str], None] = tqdm.write,
    on_phase: Callable[[str], None] | None = None,
) -> Sweep:
    """Run and record each of the named settings that has no result yet.

    A result is known if the log has a finished one for the same settings, machine and method; `fresh` ignores it.
    Each repeat is a process of its own, and repeats take turns over the settings, so that a disturbance affects all
    alike. A failed run is recorded with its reason, and the others go on. An interrupt ends the run in progress; what
    was measured so far is recorded, and the interrupt is raised. `on_phase` gets the progress as text, instead of
    the progress bar. `allow_long` allows emulated runs that take long or write much.

    Raises Refused, before anything runs, if the log or the offload folder cannot be written.
    """
    if not isinstance(fresh, bool):
        raise Refused(f"fresh {fresh!r}: neither True nor False")
    log = Log(paths.folder(output_dir, "output folder") / results.LOG_NAME)
    root = home.home() / "offload" if offload_root is None else paths.folder(offload_root, "offload folder")
    named = {settings.key: settings} if isinstance(settings, RunSettings) else settings
    here = {device: describe_machine(device) for device in {s.device for s in named.values()}}
    keys = {name: run_key(s, here[s.device]) for name, s in named.items()}
    wanted = {keys[name]: s for name, s in named.items()}
    known = {} if fresh else _known(log, wanted, here)
    todo = [_Run(key, s, here[s.device]) for key, s in wanted.items() if key not in known]
    home.remove_leftovers(root)
    if todo:
        paths.try_out(root, "offload folder")
        _check_sources([one.settings for one in todo], root)
        paths.check_writable(log.path)  # last, since it makes the log

    made: dict[str, store.Weights] = {}
    bar = tqdm(
        total=sum(one.settings.repeats for one in todo),
        desc="repeats",
        unit="repeat",
        disable=not todo or on_phase is not None,
        dynamic_ncols=True,
    )
    tell = on_phase or bar.set_postfix_str

    def finish(one: _Run) -> None:
        known[one.key] = one.record()
        try:
            log.append(known[one.key])
        except OSError as error:
            what = "this result could not be recorded; earlier ones are kept: make room and run it again"
            raise OSError(error.errno, f"{error.strerror}: {what}", str(log.path)) from error
        if failure := one.failure:
            say(f"{describe(one.settings)}: {failure.kind}: {failure.message}")

    def tell_phase(words: str, phase: str) -> None:
        tell(f"{words}: {phase}")

    with _alone() if todo else contextlib.nullcontext(), bar:
        waiting = todo
        while waiting:
            for one in waiting:
                words = describe(one.settings)
                if not on_phase:
                    words = f"run {todo.index(one) + 1} of {len(todo)}: {words}"
                tell(words)
                one.measure(made, root, limit_s, allow_long, say, functools.partial(tell_phase, words))
                bar.update()
                if one.was_interrupted:
                    for begun in [r for r in waiting if r is one or (r.key not in known and r.outcome.repeats)]:
                        begun.interrupt()
                        finish(begun)
                    raise KeyboardInterrupt
                if not one.wants_another:
                    finish(one)
            waiting = [one for one in waiting if one.wants_another]
    return Sweep({name: known[key] for name, key in keys.items()})


@dataclass
class _Run:
    """A run in progress, with its repeats so far."""

    key: str
    settings: RunSettings
    machine: Machine
    outcome: launcher.Outcome = field(default_factory=launcher.Outcome.now)
    weights: store.Weights | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def failure(self) -> Failure | None:
        return self.outcome.failure

    @property
    def was_interrupted(self) -> bool:
        return self.failure is not None and self.failure.kind == "interrupted"

    @property
    def wants_another(self) -> bool:
        """Whether to repeat again: too few repeats, or too few in which the CPU kept pace."""
        repeats = self.outcome.repeats
        if self.failure or not repeats:
            return not self.failure
        measured_s = sum(repeat.total_latency_s for repeat in repeats)
        on_pace = sum(not repeat.passes_behind for repeat in repeats)
        most = self.settings.repeats + MOST_REPLACED * (self.settings.device == "emulated")
        return on_pace < self.settings.repeats and len(repeats) < most and measured_s < self._budget_s

    @property
    def _budget_s(self) -> float:
        return EMULATED_REPEAT_BUDGET_S if self.settings.device == "emulated" else REPEAT_BUDGET_S

    def measure(
        self,
        made: dict[str, store.Weights],
        root: Path,
        limit_s: float,
        allow_long: bool,
        say: Callable[[str], None],
        on_phase: Callable[[str], None],
    ) -> None:
        """Measure one repeat. Any error becomes this run's failure."""
        measured = len(self.outcome.repeats)
        try:
            if not self.outcome.repeats:
                self.notes = _check(self.settings, self.machine, root, allow_long)
            on_phase("weights on disk")
            self.weights = _prepare(made, say, self.settings.model)
            launcher.run(self.settings, self.weights, root, self.outcome, limit_s=limit_s, on_phase=on_phase)
        except Refused as error:
            self.outcome.failure = Failure(kind="refused", message=str(error))
        except Exception as error:  # whatever the error, the other runs go on
            self.outcome.failure = worker.failure_of(error)
        if len(self.outcome.repeats) == measured and not self.failure:
            self.outcome.failure = Failure(kind="error", message="ended without a result")

    def interrupt(self) -> None:
        """Keep the repeats finished before an interrupt, if any, as the run's result."""
        if repeats := len(self.outcome.repeats):
            self.outcome.failure = None
            self.notes.append(f"interrupted after {repeats} of {self.settings.repeats} repeats")

    def record(self) -> RunRecord:
        settings, outcome = self.settings, self.outcome
        return RunRecord(
            key=self.key,
            kind=KIND_OF_DEVICE[settings.device],
            status="failed" if outcome.failure else "done",
            settings=settings,
            command=settings.flexgen_command,
            machine=self.machine,
            versions=versions(),
            started_at=outcome.started_at,
            duration_s=outcome.duration_s,
            phases_s=outcome.phases_s,
            model_shape=settings.opt_model if models.local_folder(settings.model) else None,
            weights=self.weights.source if self.weights else "",
            prompt=self.weights.prompt if self.weights else "",
            repeats=tuple(outcome.repeats),
            generated_tokens=tuple(map(tuple, outcome.result.get("generated_tokens", ()))),
            bytes_by_tier=outcome.result.get("bytes_by_tier", {}),
            bytes_expected_from_disk=_placement(settings).disk_bytes_per_pass * settings.workload.gen_len,
            peak_gpu_reserved_gib=outcome.result.get("peak_gpu_reserved_gib"),
            samples=outcome.samples,
            failure=outcome.failure,
            notes=(
                *self.notes,
                *self._budget_notes(),
                *_slow_core_notes(outcome.repeats),
                *_pace_notes(outcome.repeats),
                *outcome.result.get("notes", ()),
            ),
        )

    def _budget_notes(self) -> list[str]:
        measured = len(self.outcome.repeats)
        if self.failure or self.settings.device == "emulated" or any("interrupted" in note for note in self.notes):
            return []  # further repeats of a paced run would give the same figures
        if not 0 < measured < self.settings.repeats:
            return []
        return [f"{measured} of {self.settings.repeats} repeats: they had taken {self._budget_s:.0f} s by then"]


def _slow_core_notes(repeats: Sequence[Repeat]) -> list[str]:
    speeds = [repeat.core_speed for repeat in repeats if repeat.core_speed]
    if not speeds or min(speeds) >= FULL_SPEED:
        return []
    each = ", ".join(f"{100 * speed:.0f}" for speed in speeds)
    return [
        f"the CPU core slowed down to {each} % of its speed{' (each repeat)' if len(speeds) > 1 else ''}: others used "
        "it too, so launching kernels took longer"
    ]


def _pace_notes(repeats: Sequence[Repeat]) -> list[str]:
    """A note if every repeat of an emulated run fell behind in some pass."""
    if not repeats or any(not repeat.passes_behind for repeat in repeats):
        return []
    behind, passes = sum(r.passes_behind for r in repeats), sum(len(r.pass_latencies_s) for r in repeats)
    return [f"this CPU was slower than the emulated GPU in {behind} of {passes} passes, so its figures are too slow"]


def _prepare(made: dict[str, store.Weights], say: Callable[[str], None], name: str) -> store.Weights:
    """The model's weights, prepared once for all runs, or again if a file has been damaged since."""
    model = models.resolve(name)
    if name not in made or store.broken_files(made[name].path / f"{model.name}-np", model):
        made[name] = store.prepare(name, say)
    return made[name]


def without_figures(named: Mapping[str, RunSettings], output_dir: Path | str) -> list[str]:
    """The names of the settings without a finished result in the output folder, from this machine and method."""
    here = {device: describe_machine(device) for device in {one.device for one in named.values()}}
    keys = {name: run_key(one, here[one.device]) for name, one in named.items()}
    known = _known(Log(Path(output_dir) / results.LOG_NAME), {key: named[name] for name, key in keys.items()}, here)
    return [name for name, key in keys.items() if key not in known]


def _known(log: Log, wanted: Mapping[str, RunSettings], here: Mapping[Any, Machine]) -> dict[str, RunRecord]:
    """The finished results of these runs by key. Records of other settings don't count, whatever their key; those with
    more repeats than asked for do."""
    alike: dict[str, tuple[str, RunSettings]] = {}
    for key, one in wanted.items():
        for repeats in range(one.repeats, max(one.repeats, MOST_REPEATS) + 1):
            same = one.model_copy(update={"repeats": repeats})
            alike[run_key(same, here[one.device])] = (key, same)
    found: dict[str, RunRecord] = {}
    latest = log.latest(alike)
    for other, (key, same) in alike.items():
        record = latest.get(other)
        if key not in found and record and record.status == "done" and record.settings == same:
            found[key] = record
    return found


def run_key(settings: RunSettings, where: Machine) -> str:
    """The identity of a result: the settings, the kind of machine and the method.

    A new runtime (Colab after a disconnect) counts as the same machine, so its kernel and exact RAM are left out.
    """
    kind = (where.name, where.profile, where.cpu, where.cpu_count, round(where.ram_gib or 0))
    folder = models.local_folder(settings.model)
    model = f"{settings.opt_model}{store.identity(folder)}" if folder else ""  # a folder's weights may change
    emulated = EMULATED_T4 if where.profile else ""  # the profile's rates may change under the same name
    text = f"{settings.model_dump_json()}{model} {kind} {emulated} {METHOD_VERSION}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(settings: RunSettings) -> str:
    """A run in a few words, for a progress bar."""
    batch = f"batch {settings.workload.effective_batch}"
    return ", ".join((settings.opt_model.name, f"--percent {settings.split}", batch, *options.words(settings)))


def describe_machine(device: Literal["cuda", "emulated"]) -> Machine:
    """This machine, as stored in records."""
    return this_machine.describe(device, EMULATED_T4.name if device == "emulated" else None)


def _check(settings: RunSettings, where: Machine, root: Path, allow_long: bool = False) -> list[str]:
    """Notes on tight resources. Raises Refused for problems that would otherwise surface late."""
    memory_check.check_gpu(settings, where, gpus.compute_capability())
    notes = []
    if settings.device == "cuda":
        notes += memory_check.check_host(settings, limits.memory_allowance())
    else:
        kept = store.kept(settings.model) is not None
        emulated_cost.check(settings, kept, limits.memory_allowance(), allow_long)
    if other := other_flexgen():
        notes.append(f"FlexGen is not the release {RELEASE}: {other}")
    disk = disks.disk_of(root)
    split = settings.split
    activations_disk = 100 - split.activations_gpu - split.activations_cpu
    if disk.is_network and _uses_disk(settings):
        notes.append(f"offload folder {root}: {disk.filesystem} is a network or FUSE file system, not a disk")
    if split.cache_disk or activations_disk:
        notes.append("bytes expected from the disk count the weights there, not the KV cache and activations")
    return notes


def _uses_disk(settings: RunSettings) -> bool:
    split = settings.split
    on_disk = split.cache_disk or 100 - split.activations_gpu - split.activations_cpu
    return bool(on_disk or _placement(settings).bytes_by_tier["disk"])


def _check_sources(wanted: list[RunSettings], root: Path) -> None:
    """Raises Refused for an offload folder in memory and for damaged weights in a model folder: both would fail run
    after run."""
    disk = disks.disk_of(root)
    if disk.is_memory and any(map(_uses_disk, wanted)):
        raise Refused(f"offload folder {root}: {disk.filesystem} is memory, not a disk; choose another folder")
    for name in {settings.model for settings in wanted}:
        store.check_folder(name)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Raises Refused while another thread of this process is measuring."""
    if not _measuring.acquire(blocking=False):
        raise Refused("this process is measuring already, in another thread: wait for it to end")
    try:
        yield
    finally:
        _measuring.release()


def _placement(settings: RunSettings) -> Placement:
    split = settings.split
    return place(settings.opt_model, split.weights_gpu, split.weights_cpu, settings.compress_weight)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if other := other_flexgen():
        found["flexgen"] = f"not {RELEASE}: {other}"
    return found
