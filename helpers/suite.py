"""Every notebook through papermill, and the report of what they measured."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import papermill
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm
from traitlets.config import Config

from helpers import paths, results
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
}
NOTEBOOK_FOLDER = paths.ROOT / "notebooks"
# A kernel that ends in the middle of a cell logs that nobody takes the answer; what a cell says or raises is no log.
QUIET = "--IPKernelApp.log_level=CRITICAL"
LONGEST_SOCKET_NAME = 100  # bytes; Linux takes 107, macOS 103


@dataclass(frozen=True)
class NotebookRun:
    """A notebook that was run: the executed copy, how long it took, and its error in one line, if any."""

    name: str
    executed: Path
    duration_s: float
    error: str = ""

    def __str__(self) -> str:
        came_of_it = "FAIL" if self.error else "ok"
        return f"{came_of_it:4} {self.executed.name}  {self.duration_s:.0f} s  {self.error}".rstrip()


def run(
    names: Sequence[str],
    parameters: Mapping[str, Any],
    output_dir: Path,
    fresh: bool = False,
    say: Callable[[str], None] = tqdm.write,
) -> list[NotebookRun]:
    """Run the named notebooks, one after another; one that fails is kept and does not stop the others.

    `say` is told of each before it starts, and what came of it right after.

    `fresh` sets the results so far aside (nothing is deleted) and measures anew. Raises Refused, before anything
    starts, for a notebook there is none of, a parameter that one of them does not have, or an output folder that
    cannot be written.
    """
    paths.folder(output_dir, "output folder")
    for name in names:
        if name not in NOTEBOOKS:
            raise Refused(f"notebook {name!r}: choose from {', '.join(NOTEBOOKS)}")
        _check_parameters(NOTEBOOK_FOLDER / NOTEBOOKS[name], parameters)
    paths.check_writable(output_dir / results.LOG_NAME)
    # Else the debugger in a kernel, which nobody uses here, warns of Python's frozen modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    if fresh:
        _set_results_aside(output_dir)
    folder = output_dir / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for number, name in enumerate(names, 1):
        say(f"{number} of {len(names)}: {NOTEBOOKS[name]}")
        runs.append(_run_one(name, parameters, folder))
        say(str(runs[-1]))
    return runs


def write_report(output_dir: Path) -> list[Path]:
    """The report of everything in the output folder's log. Raises Refused if there is nothing in it."""
    return document.write(readers.read(output_dir / results.LOG_NAME), output_dir)


def _check_parameters(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """papermill runs the defaults, with a warning, for a parameter that a notebook does not have."""
    known = papermill.inspect_notebook(str(notebook))
    for name in parameters:
        if name not in known:
            raise Refused(f"parameter {name!r}: {notebook.name} has none of that name; it has {', '.join(known)}")


def _run_one(name: str, parameters: Mapping[str, Any], folder: Path) -> NotebookRun:
    executed = folder / NOTEBOOKS[name]
    began_s = time.monotonic()
    error = ""
    try:
        with tempfile.TemporaryDirectory() as sockets:
            papermill.execute_notebook(
                str(NOTEBOOK_FOLDER / NOTEBOOKS[name]),
                str(executed),
                parameters=dict(parameters),
                kernel_name="python3",
                cwd=str(NOTEBOOK_FOLDER),
                progress_bar=True,
                config=_connection(sockets),
                extra_arguments=[QUIET],
            )
    # The exception is to be believed, not the saved notebook: after a killed kernel it calls every cell completed.
    except PapermillExecutionError as failure:
        error = f"cell {failure.cell_index}: {failure.ename}: {failure.evalue}"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    except KeyboardInterrupt:
        # What the kernel makes of it is nobody's to fetch any more: asyncio would print that, after the last word here.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    return NotebookRun(name, executed, time.monotonic() - began_s, error.partition("\n")[0])


def _connection(sockets: str) -> Config:
    """How a kernel is talked to: by sockets in a folder that only this user can enter.

    By TCP, Jupyter's own way, only where the folder's name is too long for them: others on the machine could listen.
    """
    socket = os.path.join(os.path.abspath(sockets), "kernel")
    if len(os.fsencode(f"{socket}-5")) > LONGEST_SOCKET_NAME:  # a kernel has five
        return Config()
    return Config(KernelManager={"transport": "ipc", "ip": socket})


def _set_results_aside(output_dir: Path) -> None:
    log = output_dir / results.LOG_NAME
    if log.exists() and log.stat().st_size:
        when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = log.with_name(f"results-until-{when}.jsonl")
        while aside.exists():  # of the same second
            aside = aside.with_stem(f"{aside.stem}-again")
        log.rename(aside)
