"""A notebook's progress: its kernel writes it to a file, and the suite that started the kernel shows it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from helpers import paths

FILE = "OFFLOAD_LAB_PROGRESS"  # environment variable: the file's path, set by the suite


class Progress(NamedTuple):
    """The current run's number, how many there are, the current phase, and the seconds left for all runs (forecast)."""

    run: int
    runs: int
    phase: str
    left_s: float | None
    settings: str


def tell(progress: Progress) -> None:
    """Write the progress where the suite looks for it; without a suite, do nothing."""
    if path := os.environ.get(FILE):
        with suppress(OSError):  # a full disk must not fail a run just for its progress
            paths.write_atomically(Path(path), json.dumps(progress))


def read(path: Path) -> Progress | None:
    try:
        return Progress(*json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
