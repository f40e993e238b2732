"""This lab's own log of results, one JSON record per line."""

from __future__ import annotations

from pathlib import Path

from helpers.analysis.matching import run_id
from helpers.errors import Refused
from helpers.results import Log
from helpers.runs import Run, from_record


def read(path: Path) -> tuple[Run, ...]:
    """One run per settings and machine: its last finished record, else its last failure.

    Raises Refused if the log holds no readable record.
    """
    latest = Log(path).latest()
    if not latest:
        raise Refused(f"{path}: no readable record")
    return tuple(from_record(run_id(record.settings), record) for record in latest.values())
