"""Shared drawing code: the figure with its title and provenance, bars and their labels, axes, and the saved PNG."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from helpers import paths
from helpers.analysis.matching import QuestionRow
from helpers.analysis.values import Value, listed, plain
from helpers.report.environment import provenance
from helpers.runs import Run

# Okabe and Ito's palette, told apart with any colour vision: jfly.uni-koeln.de/color
BLUE, ORANGE, GREEN, VERMILION, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#767676"
WIDTH_IN = 9.0
DPI = 110


@dataclass(frozen=True)
class Plot:
    """A figure, and its content in words; `drawn` is False where there was nothing to draw."""

    name: str
    alt: str
    figure: Figure
    drawn: bool = True

    def png(self) -> bytes:
        return self._png

    @cached_property
    def _png(self) -> bytes:  # a report needs it twice, and drawing is what takes long
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a machine's name may have letters that the font lacks
            self.figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def save(plot: Plot, folder: Path) -> Path:
    """Write the plot as `NAME.png` into a folder; return its path."""
    return paths.write_atomically(folder / f"{plot.name}.png", plot.png())


def nothing(name: str, title: str, why: str = "none of its runs has figures") -> Plot:
    figure = Figure(figsize=(WIDTH_IN, 1.2), layout="constrained")
    figure.text(0.5, 0.5, f"{title}: nothing to draw, {why}.", ha="center", va="center", color=GREY)
    return Plot(name, f"{title}: nothing to draw, {why}.", figure, drawn=False)


def canvas(
    title: str, runs: Sequence[Run], columns: int = 1, lines: int = 1, bars: int = 0
) -> tuple[Figure, list[Axes]]:
    """A figure with its title and, under it, where its figures are from; and its axes, line by line.

    Axes of one line share their scale, so that they can be compared, if there are several lines.
    """
    width = max(WIDTH_IN, 1.5 * bars)
    figure = Figure(figsize=(width, 2.6 + 1.8 * lines), layout="constrained")
    shared = lines > 1
    grid = figure.subplots(
        lines, columns, squeeze=False, sharex="col" if shared else False, sharey="row" if shared else False
    )
    figure.suptitle(title, fontweight="bold")
    source = textwrap.fill(provenance(runs).replace("\\", ""), round(115 * width / WIDTH_IN))
    figure.supxlabel(source, fontsize="small", color=GREY, parse_math=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, list(grid.flat)


def bars(
    axes: Axes,
    values: Sequence[Value | None],
    colour: str,
    shift: float = 0,
    width: float = 0.6,
    label: str | None = None,
    text: Callable[[float], str] = plain,
) -> None:
    """Bars with their values on top and the range of repeats; a missing value leaves its place empty."""
    known = [(i + shift, value) for i, value in enumerate(values) if value is not None]
    if not known:  # or the legend would show an unused colour
        return
    heights = [value.value for _, value in known]
    errors = [[v.value - v.low for _, v in known], [v.high - v.value for _, v in known]]
    style = {"capsize": 4 if any(v.repeated for _, v in known) else 0, "linewidth": 1}
    drawn = axes.bar([x for x, _ in known], heights, width, yerr=errors, error_kw=style, color=colour, label=label)
    size = "x-small" if width < 0.3 else "medium"
    axes.bar_label(drawn, [text(height) for height in heights], padding=3, fontsize=size)


def scale(axes: Axes, values: Iterable[Value | None], log: bool) -> None:
    """Room above the highest bar for its value and, on a log scale, some bar under the lowest."""
    known = [value for value in values if value is not None]
    low, high = min(value.value for value in known), max(value.high for value in known)
    if not log:
        axes.set_ylim(0, 1.2 * high or 1)
        return
    axes.set_yscale("log")
    axes.set_ylim(low / 4, high * 4)
    log_ticks(axes, low, high)
    plain_numbers(axes)


def log_ticks(axes: Axes, low: float, high: float) -> None:
    """More ticks than powers of ten where the values span few of them."""
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def plain_numbers(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: plain(x, 1) if x < 1 else f"{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def row_labels(axes: Axes, rows: Sequence[QuestionRow], remarks: Sequence[str] = ()) -> None:
    """Label each bar's run: the split asked for, the one achieved, any failure, and a remark."""
    labels = [_row_label(row) for row in rows]
    labels = [f"{label}\n{remark}".strip() for label, remark in zip(labels, remarks or [""] * len(rows))]
    axes.set_xticks(np.arange(len(rows)), labels)
    axes.set_xlim(-0.6, len(rows) - 0.4)


def _row_label(row: QuestionRow) -> str:
    number = f"{row.label} " if row.label.startswith("(") else ""
    asked, achieved = row.run.split.in_words, str(row.run.placement)
    lines = number + asked.replace(" + ", "\n+ ")
    if achieved.replace(".0 %", " %") != asked:
        lines += "\n[" + achieved.replace(" + ", "\n+ ") + "]"
    return lines + ("\nfailed" if not row.done else "\ndisturbed" if row.disturbance else "")


def said(pairs: Iterable[tuple[str, Value | None]]) -> str:
    """Names with their values, for a picture's alternative text."""
    return listed(f"{name} {plain(value.value) if value else 'no figure'}" for name, value in pairs) + "."
