"""Columns of tables: each is declared once and serves the CSV and the page. `tables` lists those of every table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pandas as pd

from helpers import paths
from helpers.analysis.values import Value, in_line, plain, times
from helpers.placement import Placement
from helpers.settings import OffloadSplit

NOT_KNOWN = "—"
NO_BREAK = "\u00a0"

Line = TypeVar("Line")  # of a table: whatever its columns read


def words(value: Any) -> str:
    """Any text, escaped for Markdown."""
    return in_line(str(value))


@dataclass(frozen=True)
class Column(Generic[Line]):
    """One column: `value` reads a figure from a line of the table, `text` writes that figure for people.

    Without a `key` a column is only on the page, without a `header` only in the CSV. None is "not known". The value of
    a `ranged` column is a `Value`: the CSV has KEY, KEY_min and KEY_max. `show` leaves a column off the page where no
    line has anything in it, or where all lines agree.
    """

    header: str
    key: str
    value: Callable[[Line], Any]
    text: Callable[[Any], str] = words
    ranged: bool = False
    show: Literal["always", "if any", "if different"] = "always"

    def raw(self, line: Line) -> dict[str, Any]:
        value = self.value(line)
        if not self.ranged:
            return {self.key: value}
        low, high = (value.low, value.high) if value is not None and value.repeated else (None, None)
        return {self.key: value and value.value, f"{self.key}_min": low, f"{self.key}_max": high}

    def cell(self, line: Line) -> str:
        value = self.value(line)
        return NOT_KNOWN if value is None else self.text(value)

    def is_shown(self, lines: Sequence[Line]) -> bool:
        if not self.header:
            return False
        values = [self.value(line) for line in lines]
        if self.show == "if any":
            return any(value not in (None, "") for value in values)
        return self.show == "always" or len(set(values)) > 1


def attributes(of: Callable[[Line], Any], *names: str) -> tuple[Column[Line], ...]:
    """Columns for the CSV alone: attributes under their own names."""
    return tuple(Column("", name, lambda line, name=name: getattr(of(line), name)) for name in names)  # type: ignore[misc]


@dataclass(frozen=True)
class Table:
    """A table twice: `frame` holds raw numbers (NaN is "not known"), `shown` the same as text.

    `provenance` tells where the figures are from; only the table's own file needs it.
    """

    name: str
    caption: str
    frame: pd.DataFrame
    shown: pd.DataFrame
    provenance: str = field(default="", kw_only=True)

    @property
    def markdown(self) -> str:
        if self.shown.empty:
            return f"{self.caption} No figures for this table.\n"
        lines = [list(map(str, self.shown.columns)), ["---"] * len(self.shown.columns), *self.shown.values.tolist()]
        return f"{self.caption}\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"

    def _repr_markdown_(self) -> str:
        return self.markdown


def build(
    name: str, caption: str, columns: Iterable[Column[Line]], lines: Iterable[Line], provenance: str = ""
) -> Table:
    """Fill a table's columns from its lines."""
    columns, lines = tuple(columns), tuple(lines)
    keyed = [column for column in columns if column.key]
    frame = pd.DataFrame([{key: value for c in keyed for key, value in c.raw(line).items()} for line in lines])
    on_page = [column for column in columns if column.is_shown(lines)]
    shown = pd.DataFrame([{column.header: column.cell(line) for column in on_page} for line in lines]).astype(str)
    return Table(name, caption, frame, shown, provenance=provenance)


def save(table: Table, folder: Path) -> list[Path]:
    """Write `NAME.csv` (raw numbers) and `NAME.md` (formatted); return their paths."""
    text = table.markdown + (f"\n{table.provenance}\n" if table.provenance else "")
    return [
        paths.write_atomically(folder / f"{table.name}.csv", table.frame.to_csv(index=False)),
        paths.write_atomically(folder / f"{table.name}.md", text),
    ]


# ---- figures for people ---------------------------------------------------------------------------------------------


def figure(value: Value | float, most_decimals: int = 3) -> str:
    """A figure to FlexGen's three decimals; with repeats the median and the range, to the digits their spread allows:
    132.2 (131.6–132.8)."""
    value = value if isinstance(value, Value) else Value.of(value)
    if not value.repeated:
        return f"{value.value:,.{most_decimals}f}" if value.value >= 10 ** (1 - most_decimals) else plain(value.value)
    half = (value.high - value.low) / 2
    leading = math.floor(math.log10(half))
    decimals = min(max(0, -leading + (half < 2 * 10.0**leading)), most_decimals + 3)
    if value.value >= 0.1:
        decimals = min(decimals, most_decimals)
    return f"{value.value:,.{decimals}f} ({value.low:,.{decimals}f}–{value.high:,.{decimals}f})"


def ratio(value: Value | float) -> str:
    return figure(value, 2) if isinstance(value, Value) and value.repeated else times(value)


def percent_option(split: OffloadSplit) -> str:
    """`--percent`'s six numbers, which never wrap."""
    return f"`{split}`".replace(" ", NO_BREAK)


def asked_and_achieved(split: OffloadSplit, placement: Placement) -> str:
    """The weight split, and the achieved one where it differs: 50 % GPU + 50 % CPU → 50.1 % GPU + 49.9 % CPU."""
    shares = ((split.weights_gpu, "GPU"), (split.weights_cpu, "CPU"), (split.weights_disk, "disk"))
    asked = " + ".join(f"{share} % {tier}" for share, tier in shares if share)
    achieved = str(placement)
    return asked if achieved.replace(".0 %", " %") == asked else f"{asked} → {achieved}"
