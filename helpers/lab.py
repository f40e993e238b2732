"""Run these settings: skip what is known, show progress, record each result as it comes."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tqdm.auto import tqdm

from helpers import home, models, options, paths, results
from helpers.engine import launcher, worker
from helpers.engine.core_speed import FULL_SPEED
from helpers.errors import Refused
from helpers.machine import disks, gpus, limits, this_machine
from helpers.machine.emulation import EMULATED_T4
from helpers.placement import Placement, place
from helpers.predict import memory_check
from helpers.results import KIND_OF_DEVICE, METHOD_VERSION, Failure, Log, Machine, Repeat, RunRecord, Sweep
from helpers.settings import RunSettings
from helpers.weights import store

REPEAT_BUDGET_S = 60.0  # no further repeat once this much has been measured
RUN_LIMIT_S = 1800.0

PACKAGES = ("flexgen", "torch", "numpy", "transformers", "papermill")


def choose_device(wanted: Literal["auto", "cuda", "emulated"]) -> Literal["cuda", "emulated"]:
    """The device to run on: CUDA where there is a GPU, else the emulated GPU. Raises Refused if CUDA is not there."""
    if wanted not in ("auto", "cuda", "emulated"):
        raise Refused(f"device {wanted!r}: choose auto, cuda or emulated")
    there = _torch_has_cuda() and gpus.cuda_available()
    if there and wanted != "emulated":
        os.environ.update(gpus.environment())  # a GPU in trouble must not be CUDA's first
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
    repeat_budget_s: float = REPEAT_BUDGET_S,
    limit_s: float = RUN_LIMIT_S,
    say: Callable[[str], None] = tqdm.write,
    on_phase: Callable[[str], None] | None = None,
) -> Sweep:
    """Run each of the named settings that has no result yet, one process a run, and record what comes of it.

    A result is known if the log has a finished one for the same settings, machine and method; `fresh` asks for
    new ones. A run that fails is a record that says why, and the others go on. An interrupt ends the run at hand,
    which is a record too, and is raised. Raises Refused, before anything runs, if the log or the offload folder
    cannot be written. `on_phase` is told what goes on, in the place of the progress bar.
    """
    if not isinstance(fresh, bool):
        raise Refused(f"fresh {fresh!r}: neither True nor False")
    log = Log(paths.folder(output_dir, "output folder") / results.LOG_NAME)
    root = home.home() / "offload" if offload_root is None else paths.folder(offload_root, "offload folder")
    named = {settings.key: settings} if isinstance(settings, RunSettings) else settings
    wanted = list(named.values())
    here = {device: describe_machine(device) for device in {s.device for s in wanted}}
    keys = [run_key(s, here[s.device]) for s in wanted]
    known = {} if fresh else _known(log, dict(zip(keys, wanted)))

    todo = {key: s for key, s in zip(keys, wanted) if key not in known}
    home.remove_leftovers(root)
    if todo:
        paths.check_writable(log.path)
        paths.try_out(root, "offload folder")
        launcher.warm_server()
    prepare = functools.partial(_prepare, {}, say)
    bar = tqdm(total=len(todo), desc="runs", unit="run", disable=not todo or on_phase is not None, dynamic_ncols=True)
    tell = on_phase or bar.set_postfix_str
    with bar:
        for key, one in todo.items():
            tell(describe(one))
            record = _run_one(
                key,
                one,
                here[one.device],
                root,
                limit_s,
                repeat_budget_s,
                prepare,
                on_phase=lambda phase, one=one: tell(f"{describe(one)}: {phase}"),
            )
            try:
                log.append(record)
            except OSError as error:
                what = "this run's result could not be recorded, those before it are kept; make room and run it again"
                raise OSError(error.errno, f"{error.strerror}: {what}", str(log.path)) from error
            known[key] = record
            bar.update()
            if record.failure:
                say(f"{describe(one)}: {record.failure.kind}: {record.failure.message}")
                if record.failure.kind == "interrupted":
                    raise KeyboardInterrupt
    return Sweep({name: known[key] for name, key in zip(named, keys)})


def without_figures(named: Mapping[str, RunSettings], output_dir: Path | str) -> list[str]:
    """The names of those settings that have no finished result in the output folder, by this machine and method."""
    keys = {name: run_key(one, describe_machine(one.device)) for name, one in named.items()}
    known = _known(Log(Path(output_dir) / results.LOG_NAME), {key: named[name] for name, key in keys.items()})
    return [name for name, key in keys.items() if key not in known]


def _known(log: Log, wanted: Mapping[str, RunSettings]) -> dict[str, RunRecord]:
    """The finished results of these runs, by their keys: of these settings, whatever key stands in the log."""
    return {
        key: record
        for key, record in log.latest(wanted).items()
        if record.status == "done" and record.settings == wanted[key]
    }


def run_key(settings: RunSettings, where: Machine) -> str:
    """What makes two results the same result: the settings, the kind of machine and the method.

    A runtime that is given anew (Colab after a disconnect) is the same machine: its kernel and the last MiB of its
    memory are not asked.
    """
    kind = (where.name, where.profile, where.cpu, where.cpu_count, round(where.ram_gib))
    model = settings.opt_model if models.local_folder(settings.model) else ""  # a folder may get another model
    emulated = EMULATED_T4 if where.profile else ""  # its rates may change, and its name stay
    text = f"{settings.model_dump_json()}{model} {kind} {emulated} {METHOD_VERSION}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(settings: RunSettings) -> str:
    """A run in a few words, for a progress bar."""
    batch = f"batch {settings.workload.effective_batch}"
    return ", ".join((settings.opt_model.name, f"--percent {settings.split}", batch, *options.words(settings)))


def describe_machine(device: Literal["cuda", "emulated"]) -> Machine:
    """This machine as a record names it."""
    return this_machine.describe(device, EMULATED_T4.name if device == "emulated" else None)


def _prepare(made: dict[str, store.Weights], say: Callable[[str], None], name: str) -> store.Weights:
    """The weights of a model: prepared once for all runs (the hub may be asked), again if a file has broken since."""
    model = models.resolve(name)
    if name not in made or store.broken_files(made[name].path / f"{model.name}-np", model):
        made[name] = store.prepare(name, say)
    return made[name]


def _run_one(
    key: str,
    settings: RunSettings,
    where: Machine,
    root: Path,
    limit_s: float,
    repeat_budget_s: float,
    prepare: Callable[[str], store.Weights],
    on_phase: Callable[[str], None],
) -> RunRecord:
    began_s = time.monotonic()
    made, failure, notes = None, None, []
    try:
        notes = _check(settings, where, root)
        on_phase("weights on disk")
        made = prepare(settings.model)
        outcome = launcher.run(
            settings, made, root, limit_s=limit_s, repeat_budget_s=repeat_budget_s, on_phase=on_phase
        )
    except Refused as error:
        outcome, failure = launcher.Outcome.now(), Failure(kind="refused", message=str(error))
    except Exception as error:  # of whatever kind: this run has failed, the others go on
        outcome, failure = launcher.Outcome.now(), worker.failure_of(error)
    failure = failure or outcome.failure
    placed = _placement(settings)
    return RunRecord(
        key=key,
        kind=KIND_OF_DEVICE[settings.device],
        status="failed" if failure else "done",
        settings=settings,
        command=settings.flexgen_command,
        machine=where,
        versions=versions(),
        started_at=outcome.started_at,
        duration_s=time.monotonic() - began_s,
        phases_s=outcome.phases_s,
        model_shape=settings.opt_model if models.local_folder(settings.model) else None,
        weights=made.source if made else "",
        prompt=made.prompt if made else "",
        repeats=tuple(outcome.repeats),
        generated_tokens=tuple(map(tuple, outcome.result.get("generated_tokens", ()))),
        bytes_by_tier=outcome.result.get("bytes_by_tier", {}),
        bytes_expected_from_disk=placed.disk_bytes_per_pass * settings.workload.gen_len,
        peak_gpu_reserved_gib=outcome.result.get("peak_gpu_reserved_gib"),
        samples=outcome.samples,
        failure=failure,
        notes=(
            *notes,
            *_few_repeats(settings, outcome, repeat_budget_s),
            *_slow_cores(settings, outcome.repeats),
            *outcome.result.get("notes", ()),
        ),
    )


def _few_repeats(settings: RunSettings, outcome: launcher.Outcome, budget_s: float) -> list[str]:
    """A note where the time for repeats was over before all were measured."""
    if outcome.failure or not 0 < len(outcome.repeats) < settings.repeats:
        return []
    return [f"{len(outcome.repeats)} of {settings.repeats} repeats: {budget_s:.0f} s had been measured by then"]


def _slow_cores(settings: RunSettings, repeats: Sequence[Repeat]) -> list[str]:
    """A note where a core was shared: what launches kernels is slower then, and moves from run to run."""
    speeds = [repeat.core_speed for repeat in repeats if repeat.core_speed]
    if settings.device != "cuda" or not speeds or min(speeds) >= FULL_SPEED:
        return []
    each = ", ".join(f"{100 * speed:.0f}" for speed in speeds)
    by_repeat = ", repeat by repeat" if len(speeds) > 1 else ""
    return [
        f"the processor core ran at {each} % of the fastest seen here{by_repeat}: others use it too, and launching "
        "kernels takes longer"
    ]


def _check(settings: RunSettings, where: Machine, root: Path) -> list[str]:
    """Notes on what will be tight. Raises Refused for what would fail late, and can be known now."""
    memory_check.check_gpu(settings, where, gpus.compute_capability())
    notes = []
    if settings.device == "cuda":  # the emulated GPU pins nothing
        notes += memory_check.check_host(settings, limits.memory_allowance())
    disk = disks.disk_of(root)
    split = settings.split
    activations_disk = 100 - split.activations_gpu - split.activations_cpu
    on_disk = _placement(settings).bytes_by_tier["disk"] or split.cache_disk or activations_disk
    if disk.is_memory and on_disk:
        raise Refused(f"offload folder {root}: {disk.filesystem} is memory, not a disk; choose another folder")
    if disk.is_network and on_disk:
        notes.append(f"offload folder {root}: {disk.filesystem}, a network or FUSE file system, no disk's figures")
    if split.cache_disk or activations_disk:
        notes.append(
            "what the run had to read from the disk is counted of its weights alone, not of the KV cache and "
            "activations there"
        )
    return notes


def _placement(settings: RunSettings) -> Placement:
    split = settings.split
    return place(settings.opt_model, split.weights_gpu, split.weights_cpu, settings.compress_weight)


def versions() -> dict[str, str]:
    """What a figure depends on, beside the machine: Python and packages, by name."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
