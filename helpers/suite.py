"""Run every notebook through papermill and report the results."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import papermill
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from helpers import forecast, paths, progress, results
from helpers.analysis import readers
from helpers.errors import Refused
from helpers.report import document

NOTEBOOKS = {
    "machine": "00_machine.ipynb",
    "q1": "01_offload_sweep.ipynb",
    "q2": "02_batch_size.ipynb",
    "q3": "03_weight_compression.ipynb",
    "q4": "04_disk_io.ipynb",
    "explore": "05_explore_splits.ipynb",
    "faster": "06_make_it_faster.ipynb",
}
NOTEBOOK_FOLDER = paths.ROOT / "notebooks"
# A kernel that ends during a cell logs an unread reply. Cells' own output and errors don't go through this log.
QUIET = "--IPKernelApp.log_level=CRITICAL"
LONGEST_SOCKET_NAME = 100  # bytes; Linux takes 107, macOS 103
PROGRESS_EVERY_S = 0.5


@dataclass(frozen=True)
class NotebookRun:
    """An executed notebook: where its copy is, how long it took, and its error in one line, if any."""

    name: str
    executed: Path
    duration_s: float
    error: str = ""

    def __str__(self) -> str:
        outcome = "FAIL" if self.error else "ok"
        return f"{outcome:4} {self.executed.name}  {self.duration_s:.0f} s  {self.error}".rstrip()


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def run(
    names: Sequence[str],
    parameters: Mapping[str, Any],
    output_dir: Path,
    fresh: bool = False,
    say: Callable[[str], None] = _print,
) -> list[NotebookRun]:
    """Run the named notebooks, one after another; a notebook that fails is kept and the others go on.

    `say` gets each notebook's progress and outcome, a line at a time; a terminal's stderr also shows the progress in a
    line that changes in place. `fresh` sets earlier results aside (nothing is deleted) and measures again. Raises
    Refused, before anything starts, for an unknown notebook, a parameter that one of them lacks, or an output folder
    that cannot be written.
    """
    paths.folder(output_dir, "output folder")
    for name in names:
        if name not in NOTEBOOKS:
            raise Refused(f"notebook {name!r}: choose from {', '.join(NOTEBOOKS)}")
        _check_parameters(NOTEBOOK_FOLDER / NOTEBOOKS[name], parameters)
    paths.check_writable(output_dir / results.LOG_NAME)
    # Keeps each kernel's unused debugger from warning about Python's frozen modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    if fresh:
        _set_results_aside(output_dir)
    folder = output_dir / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for number, name in enumerate(names, 1):
        with _progress_shown(f"{number}/{len(names)} {Path(NOTEBOOKS[name]).stem}", say):
            ran = _run_one(name, parameters, folder)
        say(str(ran))
        runs.append(ran)
    return runs


def write_report(output_dir: Path) -> list[Path]:
    """Write the report of everything in the output folder's log. Raises Refused if the log is empty."""
    return document.write(readers.read(output_dir / results.LOG_NAME), output_dir)


def _check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Refuse a parameter that the notebook lacks: papermill would only warn, and run the defaults."""
    known = papermill.inspect_notebook(str(notebook))
    for name in parameters:
        if name not in known:
            raise Refused(f"parameter {name!r}: {notebook.name} has none of that name; it has {', '.join(known)}")


def _run_one(name: str, parameters: Mapping[str, Any], folder: Path) -> NotebookRun:
    """Execute into a temporary file, then replace the earlier copy in one step."""
    executed = folder / NOTEBOOKS[name]
    began_s = time.monotonic()
    error = ""
    with tempfile.TemporaryDirectory() as scratch:
        running = Path(scratch) / executed.name
        try:
            papermill.execute_notebook(
                str(NOTEBOOK_FOLDER / NOTEBOOKS[name]),
                str(running),
                parameters=dict(parameters),
                kernel_name="python3",
                cwd=str(NOTEBOOK_FOLDER),
                progress_bar=False,
                config=_connection(scratch),
                extra_arguments=[QUIET],
            )
        # Believe the exception, not the saved notebook, which calls every cell completed after a killed kernel.
        except PapermillExecutionError as failure:
            error = f"cell {failure.cell_index}: {failure.ename}: {failure.evalue}"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        except KeyboardInterrupt:
            # asyncio would report the kernel's unread replies after this program's last line.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            raise
        finally:
            if running.exists():
                paths.write_atomically(executed, running.read_bytes())
    return NotebookRun(name, executed, time.monotonic() - began_s, error.partition("\n")[0])


def _connection(folder: str) -> Config:
    """Connect to a kernel by sockets in a folder that only this user can enter.

    TCP, Jupyter's default, is open to other users of the machine: a fallback for folders whose path is too long.
    """
    socket = os.path.join(os.path.abspath(folder), "kernel")
    if len(os.fsencode(f"{socket}-5")) > LONGEST_SOCKET_NAME:  # a kernel has five
        return Config()
    return Config(KernelManager={"transport": "ipc", "ip": socket})


def _set_results_aside(output_dir: Path) -> None:
    log = output_dir / results.LOG_NAME
    if log.exists() and log.stat().st_size:
        when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = log.with_name(f"results-until-{when}.jsonl")
        while aside.exists():  # from the same second
            aside = aside.with_stem(f"{aside.stem}-again")
        log.rename(aside)


# ---- progress -------------------------------------------------------------------------------------------------------


@contextmanager
def _progress_shown(notebook: str, say: Callable[[str], None]) -> Iterator[None]:
    """Show a notebook's progress until the block ends: in place on a terminal, else one line per run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "progress.json"
        os.environ[progress.FILE] = str(file)
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(notebook, file, ended, say), daemon=True)
        watch.start()
        try:
            yield
        finally:
            del os.environ[progress.FILE]
            ended.set()
            watch.join()


def _watch(notebook: str, file: Path, ended: threading.Event, say: Callable[[str], None]) -> None:
    in_place = sys.stderr.isatty()
    began_s, shown = time.monotonic(), 0
    if not in_place:
        say(notebook)
    while not ended.wait(PROGRESS_EVERY_S):
        now = progress.read(file)
        if in_place:
            line = in_a_line(notebook, now, time.monotonic() - began_s, shutil.get_terminal_size().columns)
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif now and now.run > shown:
            shown = now.run
            say(in_a_line(notebook, now._replace(phase=""), time.monotonic() - began_s))
    if in_place:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def in_a_line(notebook: str, now: progress.Progress | None, elapsed_s: float, columns: int = 120) -> str:
    """The progress in one line, changing parts first: a narrow terminal cuts the end off."""
    words = [notebook]
    if now:
        words += [f"run {now.run}/{now.runs}", now.phase]
        words += [f"{forecast.in_words(now.left_s)} left"] if now.left_s is not None else []
    line = f"{', '.join(filter(None, words))}, {elapsed_s:.0f} s so far" + (f": {now.settings}" if now else "")
    return line[: columns - 1]
