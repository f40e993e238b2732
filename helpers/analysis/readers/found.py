"""The figures of one run as one file reports them, before files are put together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")


@dataclass(frozen=True)
class Where:
    """A place in a file, as a report quotes it."""

    file: str
    line: int | None = None
    cell: int | None = None

    def __str__(self) -> str:
        cell = f", cell {self.cell}" if self.cell is not None else ""
        return f"{self.file}{cell}{f', line {self.line}' if self.line is not None else ''}"


@dataclass
class Found:
    """One run: `values` are the options that the file states, `figures` are fields of `runs.Run`.

    `disk_log` names the run's iostat log if the file holds it, and `questions` what the reader has to ask about.
    """

    where: Where
    values: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    sources: list[Where] = field(default_factory=list)
    name: str = ""
    asks: str = ""
    only_checks: dict[str, Any] = field(default_factory=dict)  # options implied by the figures, not stated


def clean(text: str) -> str:
    """Terminal output without colours, quotation marks of mail programs and rewritten progress lines."""
    text = ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")
    return re.sub(r"^(?:> ?)+", "", text, flags=re.MULTILINE)


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1
