"""Start a run in its own process, sample and limit it, end all its processes, and explain failures."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers import home, paths
from helpers.engine import out_of_memory, worker
from helpers.machine import disks, limits, torch_check
from helpers.machine.emulation import EMULATED_T4
from helpers.results import Failure, Repeat, Samples
from helpers.sampling import Sampler
from helpers.settings import RunSettings

if TYPE_CHECKING:
    from helpers.weights.store import Weights

LOG_TAIL_LINES = 30
PARENT_CHECK_S = 1.0
MOST_PAUSED = 2  # how often a repeat that stood still is measured again
# Exit codes of a run that SIGKILL ended: its own, and multiprocessing's where the fork server has died.
KILLED = {-signal.SIGKILL: "it was", 255: "it ended with the process that runs are forked from, which was"}
LONGEST_SOCKET_FOLDER = 70  # bytes; a socket's path has 107 at most, and multiprocessing adds 31


@dataclass
class Outcome:
    """The outcome of a run; after a failure, `repeats` still holds what was measured before it."""

    started_at: str
    origin_s: float  # of time.monotonic(): zero on the run's clock
    repeats: list[Repeat] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    samples: Samples = Samples()
    phases_s: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0

    @classmethod
    def now(cls) -> Outcome:
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic())


def warm_server() -> None:
    """Start the server that runs are forked from: it imports torch and FlexGen once, and never touches CUDA.

    Ctrl-C reaches every process in the foreground. The server and its runs ignore it; this process ends them.
    """
    _server_context()
    from multiprocessing import forkserver, resource_tracker

    before, unblocked = os.environ.get("PYTHONPATH"), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        resource_tracker.ensure_running()  # the server would start it, and unblock the signals again
        # The server imports helpers by name, from any folder.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(paths.ROOT), before)))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by a process that is started now
        _keep_sockets_at_home()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@functools.cache
def _keep_sockets_at_home() -> None:
    """Have multiprocessing put its sockets in a run folder, which the next run removes if this process is killed."""
    exit_stack = contextlib.ExitStack()
    util.Finalize(None, exit_stack.close, exitpriority=-200)  # after multiprocessing has removed its own
    folder = exit_stack.enter_context(home.run_folder(home.home()))
    before = tempfile.tempdir
    if len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER:
        tempfile.tempdir = str(folder)
    util.get_temp_dir()  # makes one, and keeps it
    tempfile.tempdir = before


def _server_context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.engine.preload"])
    return context


def run(
    settings: RunSettings,
    weights: Weights,
    offload_root: Path,
    outcome: Outcome,
    *,
    limit_s: float,
    on_phase: Callable[[str], None] = lambda name: None,
) -> None:
    """Measure one more repeat and add everything it gave to the outcome, a failure or an interrupt too.

    A repeat that stood still (stopped, frozen, or the machine asleep) is noted and measured again.
    """
    measured = len(outcome.repeats)
    for attempt in range(1 + MOST_PAUSED):
        stood_still_s = _run_once(settings, weights, offload_root, outcome, limit_s, on_phase)
        if not stood_still_s or outcome.failure or len(outcome.repeats) == measured:
            return
        words = f"repeat {measured + 1} stood still for {stood_still_s:.1f} s (stopped, frozen, or the machine asleep)"
        if attempt < MOST_PAUSED:
            outcome.repeats.pop()
            words = words.replace("stood still for", "was interrupted for") + " and was measured again"
        outcome.samples = outcome.samples.model_copy(update={"notes": (*outcome.samples.notes, words)})


def _run_once(
    settings: RunSettings,
    weights: Weights,
    offload_root: Path,
    outcome: Outcome,
    limit_s: float,
    on_phase: Callable[[str], None],
) -> float:
    """Measure one repeat; returns for how many seconds its measured window stood still."""
    measured = len(outcome.repeats)
    began_s = time.monotonic()
    with home.run_folder(offload_root) as folder:
        sampler = Sampler(folder, gpu=settings.device == "cuda")
        if not outcome.repeats:
            sampler.baseline()
        sampler.start(outcome.origin_s)
        try:
            _measure_once(settings, weights, folder, sampler, outcome, limit_s, on_phase)
        except KeyboardInterrupt:
            outcome.failure = Failure(kind="interrupted", message="interrupted; ended")
        except Exception as error:
            outcome.failure = worker.failure_of(error)
        finally:
            outcome.samples = _joined(outcome.samples, sampler.stop())
            outcome.duration_s += time.monotonic() - began_s
    if len(outcome.repeats) == measured:
        return 0.0
    window = outcome.repeats[-1]
    return sampler.paused_s(outcome.origin_s + window.started_s, outcome.origin_s + window.ended_s)


def _joined(earlier: Samples, later: Samples) -> Samples:
    """The samples of a run's repeats as one, on the same clock."""
    series = {}
    for name in ("disk", "gpu", "host"):
        first, second = getattr(earlier, name), getattr(later, name)
        if first and second:
            columns = {
                column: values + getattr(second, column) for column, values in first if isinstance(values, tuple)
            }
            first = first.model_copy(update=columns)
        series[name] = first or second
    return Samples(**series, notes=tuple(dict.fromkeys(earlier.notes + later.notes)))


def _measure_once(
    settings: RunSettings,
    weights: Weights,
    folder: Path,
    sampler: Sampler,
    outcome: Outcome,
    limit_s: float,
    on_phase: Callable[[str], None],
) -> None:
    """Measure one generation in its own process, and add it to the outcome."""
    offload_dir = folder / "offload"
    offload_dir.mkdir()
    outcome.result = {}
    began_s = time.monotonic()
    warm_server()
    job = worker.Job(
        settings_json=settings.model_dump_json(),
        environment=dict(os.environ),
        model=settings.opt_model,
        weights_path=weights.path,
        prompt_ids=weights.prompt_ids,
        offload_dir=offload_dir,
        log_path=folder / "log",
        disk_device=disks.disk_of(offload_dir).device,
        emulation=EMULATED_T4 if settings.device == "emulated" else None,
        origin_s=outcome.origin_s,
    )
    mapped_bytes = None
    memory_before, oom_kills_before = limits.memory_allowance(), limits.oom_kills()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = _server_context().Process(target=worker.main, args=(job, theirs), daemon=True)
    try:
        with _quiet_main_module():
            process.start()
        theirs.close()
        sampler.follow(process.pid)
        mapped_bytes = _listen(ours, began_s - outcome.origin_s, began_s + limit_s, outcome, on_phase)
    except (EOFError, ConnectionError):  # the server died while it imported torch and FlexGen
        outcome.failure = _server_death(settings, memory_before, oom_kills_before)
    finally:
        done_s = time.monotonic()
        _end(process)
        outcome.phases_s["end"] = outcome.phases_s.get("end", 0.0) + time.monotonic() - done_s
        ours.close()  # a worker that was interrupted while it started finds the pipe closed, and ends
        theirs.close()
    if not outcome.result and outcome.failure is None:
        if process.exitcode in KILLED:
            whom = KILLED[process.exitcode]
            outcome.failure = out_of_memory.killed(whom, settings, memory_before, oom_kills_before)
        else:
            outcome.failure = _death(process.exitcode, offload_dir)
    if outcome.failure:
        outcome.failure = out_of_memory.explained(outcome.failure, settings, memory_before, mapped_bytes)
        outcome.failure = outcome.failure.model_copy(update={"log_tail": _tail(folder / "log")})
    shutil.rmtree(offload_dir, ignore_errors=True)


def _listen(
    pipe: Connection, since_s: float, deadline_s: float, outcome: Outcome, on_phase: Callable[[str], None]
) -> int | None:
    """Take the worker's messages until it has finished, failed, died or run out of time. Returns the address space that
    it had mapped when it failed."""
    phase = "start"
    parent = os.getppid()
    while True:
        if time.monotonic() >= deadline_s:
            outcome.failure = Failure(kind="timeout", message=f"still in phase '{phase}' at its time limit; ended")
            return None
        if "JPY_PARENT_PID" in os.environ and os.getppid() != parent:
            raise KeyboardInterrupt  # a notebook's kernel outlived the program that ran the notebook
        if not pipe.poll(PARENT_CHECK_S):
            continue
        try:
            what, *content = pipe.recv()
        except (EOFError, OSError):
            return None  # it died; see its exit code
        if what == "phase":
            name, moment_s = content
            outcome.phases_s[phase] = outcome.phases_s.get(phase, 0.0) + moment_s - since_s
            phase, since_s = name, moment_s
            on_phase(name)
        elif what == "repeat":
            outcome.repeats.append(Repeat.model_validate(_as_tuples(content[0])))
        elif what == "done":
            outcome.result = content[0]
            return None
        elif what == "failed":
            outcome.failure = Failure(kind=content[0]["kind"], message=content[0]["message"])
            return content[1]


def _as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in value.items()}
    return value


def _end(process: Any) -> None:
    """End the run's whole process group and wait for it, which frees the GPU and its memory."""
    if process.pid is None:
        return
    process.join(timeout=1)  # it exits by itself after its last message
    try:
        group = os.getpgid(process.pid)
    except ProcessLookupError:
        group = None
    # A worker that has not reached setsid() yet is still in the server's group, which is also ours.
    if group is not None and group == process.pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    elif process.is_alive():
        process.kill()
    process.join()


def _server_death(settings: RunSettings, before: limits.MemoryAllowance, kills_before: int | None) -> Failure:
    """Why the fork server died before it could fork this run."""
    kills = limits.oom_kills()
    if kills_before is None or kills is None or kills <= kills_before:
        cause = torch_check.run().import_error
        if cause and "SIGKILL" not in cause:
            return Failure(kind="error", message=cause)
    whom = "the process that runs are forked from, while it imported torch and FlexGen, was"
    return out_of_memory.killed(whom, settings, before, kills_before)


def _death(exit_code: int | None, offload_dir: Path) -> Failure:
    """Why a worker ended without a message, from its exit code and the disk's state."""
    if exit_code == -signal.SIGBUS and disks.free_bytes(offload_dir) < 2**20:
        return Failure(
            kind="disk_full", message=f"the disk behind the offload folder ({offload_dir}) is full; free some space"
        )
    if exit_code is not None and exit_code < 0:
        return Failure(kind="killed", message=f"ended by signal {signal.Signals(-exit_code).name}")
    return Failure(kind="error", message=f"ended with exit code {exit_code} and without a result")


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])


@contextlib.contextmanager
def _quiet_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script in the worker, which doesn't need it."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if getattr(main, name, None) is not None}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
