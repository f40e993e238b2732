"""The plots: each says what its figures are, and what split was achieved; all are saved by one helper."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from helpers import analysis, paths
from helpers.analysis.batch_size import BATCHES
from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.offload_sweep import number
from helpers.analysis.values import Value, latency, listed, pass_time, plain, seconds, throughput
from helpers.homework import QUESTIONS, Row
from helpers.placement import TIERS
from helpers.report.tables import provenance
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
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def save(plot: Plot, folder: Path) -> str:
    """Write the plot as `NAME.png` into a folder and return its alt text."""
    paths.write_atomically(folder / f"{plot.name}.png", plot.png())
    return plot.alt


def every(points: Sequence[Run]) -> dict[str, Plot]:
    """All plots by name, in the order of the report."""
    plots = [
        offload_sweep_throughput(points),
        offload_sweep_memory(points),
        offload_sweep_parts(points),
        batch_size(points),
        weight_compression(points),
        disk_io(points),
        breakdown(points),
    ]
    return {plot.name: plot for plot in plots}


# ---- question 1 -----------------------------------------------------------------------------------------------------


def offload_sweep_throughput(points: Iterable[Run]) -> Plot:
    """Throughput by split, log scale."""
    rows = homework_rows(points)
    return _bars_by_split(
        "q1_throughput",
        "Throughput by offload split",
        "Total throughput (token/s, log scale)",
        rows,
        throughput,
        log=True,
    )


def offload_sweep_memory(points: Iterable[Run]) -> Plot:
    """Peak GPU memory by split."""

    def peak(point: Run | None) -> Value | None:
        return Value.of(point.peak_gpu_mem_gib) if point and point.peak_gpu_mem_gib is not None else None

    return _bars_by_split(
        "q1_memory", "Peak GPU memory by offload split", "Peak GPU memory allocated (GiB)", homework_rows(points), peak
    )


def _bars_by_split(name: str, title: str, unit: str, rows: Rows, figure_of, log: bool = False) -> Plot:
    wanted = QUESTIONS["q1"]
    values = [figure_of(rows.done(row.id)) for row in wanted]
    if not any(values):
        return _nothing(name, title, rows)
    figure, axes = _canvas(title, rows, wanted)
    _bars(axes, values, BLUE, log=log)
    axes.set_xticks(range(len(wanted)), [_split_label(row, rows) for row in wanted])
    axes.set_ylabel(unit)
    alt = f"{title}: " + _said((f"{number(row.id)} {row.label}", value) for row, value in zip(wanted, values))
    return Plot(name, alt + f" {provenance(rows, wanted)}", figure)


def offload_sweep_parts(points: Iterable[Run]) -> Plot:
    """Seconds that computing, PCIe and the disk tier would each take of a pass, beside the pass measured."""
    points = tuple(points)
    rows, title, name, wanted = homework_rows(points), "Parts of a pass, each alone", "q1_parts", QUESTIONS["q1"]
    terms = analysis.offload_sweep.analyze(points).terms
    if not terms:
        return _nothing(name, title, rows)
    figure, axes = _canvas(title, rows, wanted)
    parts = (
        ("computing", "compute", BLUE),
        ("PCIe (host to device), at most", "host_to_device", ORANGE),
        ("disk tier, at most", "disk", GREEN),
    )
    width = 0.2
    for i, (label, part, colour) in enumerate(parts):
        heights = [getattr(terms[row.id], part) if row.id in terms else None for row in wanted]
        _bars(
            axes,
            [Value.of(h) if h else None for h in heights],
            colour,
            shift=(i - 1.5) * width,
            width=width,
            label=label,
            log=True,
            missing=False,
            text=_two_digits,
        )
    measured = [pass_time(rows.done(row.id)) for row in wanted]
    _bars(
        axes,
        measured,
        GREY,
        shift=1.5 * width,
        width=width,
        label="whole pass",
        log=True,
        missing=False,
        text=_two_digits,
    )
    axes.set_xticks(range(len(wanted)), [_split_label(row, rows) for row in wanted])
    axes.set_ylabel("Seconds per forward pass (log scale)")
    _legend(axes)
    alt = (
        f"{title}, seconds: "
        + " ".join(
            f"{number(row_id)} "
            + listed(
                f"{label} {seconds(value)}"
                for label, value in zip(("computing", "PCIe", "disk tier"), found.by_name.values())
                if value
            )
            + ";"
            for row_id, found in terms.items()
        )
        + f" {provenance(rows, wanted)}"
    )
    return Plot(name, alt, figure)


# ---- question 2 -----------------------------------------------------------------------------------------------------


def batch_size(points: Iterable[Run]) -> Plot:
    """Throughput and wall time against the batch, with the ideal line."""
    rows, title, name, wanted = homework_rows(points), "Batch size with all weights on disk", "q2", QUESTIONS["q2"]
    known = [p for row_id in BATCHES if (p := rows.done(row_id)) and throughput(p)]
    if not known:
        return _nothing(name, title, rows)
    figure, (left, right) = _canvas(title, rows, wanted, columns=2)
    batches = [p.workload.gpu_batch_size for p in known]
    speeds, times = [throughput(p) for p in known], [latency(p) for p in known]
    first = speeds[0].value / batches[0]
    if len(known) > 1:
        left.plot(
            batches,
            [first * b for b in batches],
            color=GREY,
            linestyle="--",
            linewidth=2,
            zorder=3,
            label="ideal: in proportion to the batch",
        )
    _line(left, batches, speeds, BLUE, "throughput", aside=True)
    left.set_yscale("log")
    left.set_ylabel("Total throughput (token/s, log scale)")
    _legend(left)
    _line(right, batches, times, VERMILION, "wall time")
    right.set_ylim(0, 1.25 * max(t.high for t in times))
    right.set_ylabel("Wall time of a generation (s)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.set_xlim(batches[0] / 1.5, batches[-1] * 3)
        axes.set_xlabel("Batch (sequences)")
        _plain_numbers(axes)
    low, high = left.get_ylim()
    left.set_ylim(*((low / 1.8, high * 1.3) if len(known) > 1 else (low / 4, high * 4)))  # else no tick is within
    _log_ticks(left, low, high)
    alt = (
        f"{title}. Throughput in token/s: "
        + _said(zip((f"batch {b}" for b in batches), speeds))
        + " Wall time in s: "
        + _said(zip((f"batch {b}" for b in batches), times))
        + f" {provenance(rows, wanted)}"
    )
    return Plot(name, alt, figure)


def _line(axes: Axes, x: list, values: list[Value], colour: str, label: str, aside: bool = False) -> None:
    """Points with the range of repeats and their values, above or (`aside`) below and right of a rising line."""
    heights = [v.value for v in values]
    errors = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
    axes.errorbar(x, heights, yerr=errors, color=colour, marker="o", capsize=4, label=label)
    for place, height in zip(x, heights):
        axes.annotate(
            f"{height:.4g}",
            (place, height),
            xytext=(9, -13) if aside else (0, 8),
            textcoords="offset points",
            ha="left" if aside else "center",
        )


# ---- question 3 -----------------------------------------------------------------------------------------------------


def weight_compression(points: Iterable[Run]) -> Plot:
    """Throughput and peak memory without and with 4-bit weights."""
    rows, title, name, wanted = homework_rows(points), "4-bit weights, before and after", "q3", QUESTIONS["q3"]
    pairs = (("100 % GPU", "q1-1", "q3-gpu-4bit"), ("100 % disk", "q1-5", "q3-disk-4bit"))
    speeds = [[throughput(rows.done(pair[side])) for pair in pairs] for side in (1, 2)]
    if not any(v for side in speeds for v in side):
        return _nothing(name, title, rows)
    peaks = [
        [
            Value.of(p.peak_gpu_mem_gib) if (p := rows.done(pair[side])) and p.peak_gpu_mem_gib is not None else None
            for pair in pairs
        ]
        for side in (1, 2)
    ]
    figure, (left, right) = _canvas(title, rows, wanted, columns=2)
    for axes, (before, after), unit, log in (
        (left, speeds, "Total throughput (token/s, log scale)", True),
        (right, peaks, "Peak GPU memory allocated (GiB)", False),
    ):
        _bars(axes, before, BLUE, shift=-0.2, width=0.38, label="fp16 weights", log=log)
        _bars(axes, after, ORANGE, shift=0.2, width=0.38, label="4-bit weights", log=log)
        axes.set_xticks(
            range(2),
            [f"{label}\n(achieved the same)" if _achieved_as_asked(rows, *ids) else label for label, *ids in pairs],
        )
        axes.set_ylabel(unit)
        _legend(axes)
    alt = (
        f"{title}. Throughput in token/s: "
        + _said(
            (f"{pair[0]} {kind}", value)
            for kind, side in (("fp16", 0), ("4-bit", 1))
            for pair, value in zip(pairs, speeds[side])
        )
        + f" {provenance(rows, wanted)}"
    )
    return Plot(name, alt, figure)


def _achieved_as_asked(rows: Rows, *ids: str) -> bool:
    points = [p for row_id in ids if (p := rows.by_id.get(row_id))]
    return bool(points) and all(max(p.placement.percent(tier) for tier in TIERS) == 100 for p in points)


# ---- question 4 -----------------------------------------------------------------------------------------------------


def disk_io(points: Iterable[Run]) -> Plot:
    """What the disk read, interval by interval, with the measured repeats marked."""
    rows, title, name = homework_rows(points), "Reads of the disk, all weights on disk", "q4_disk"
    runs = [
        (label, p)
        for row_id, label in (("q1-5", "page cache as it was"), ("q4-disk-cold", "page cache dropped"))
        if (p := rows.done(row_id)) and p.disk and p.disk.time_s
    ]
    if len(runs) == 2 and runs[0][1] is runs[1][1]:
        runs = runs[1:]
    wanted = [row for row in QUESTIONS["q4"] if row.debug_mode is None]
    if not runs:
        return _nothing(name, title, rows, "no disk samples are in these figures")
    figure, grid = _canvas(title, rows, wanted, columns=len(runs), lines=2, squeeze=False)
    said = []
    for column, (label, point) in enumerate(runs):
        rate_axes, size_axes = grid[0][column], grid[1][column]
        time = point.disk.time_s
        rates = [kib / 1024 for kib in point.disk.read_kib_per_s]
        rate_axes.step((time[0] - point.disk.interval_s, *time), (rates[0], *rates), where="pre", color=BLUE)
        idle = point.disk.idle_read_kib_per_s
        if idle is not None:
            rate_axes.axhline(idle / 1024, color=GREY, linestyle=":", label="before the run")
        middles = [end - point.disk.interval_s / 2 for end in time]
        sizes = [(t, kib) for t, kib in zip(middles, point.disk.request_kib) if kib is not None]
        size_axes.plot([t for t, _ in sizes], [kib for _, kib in sizes], color=GREEN, marker=".", linestyle="none")
        size_axes.axhline(32, color=VERMILION, linestyle="--", label="32 KiB, the rule's limit")
        for axes in (rate_axes, size_axes):
            for i, (start, end) in enumerate(point.windows_s):
                axes.axvspan(
                    start, end, color=SKY, alpha=0.25, linewidth=0, label="measured repeat" if i == 0 else None
                )
            axes.set_ylim(bottom=0)
            axes.margins(x=0.02)
        rate_axes.set_title(
            f"{label} ({point.disk.device}, {point.disk.source})", fontsize="medium", pad=24, parse_math=False
        )
        rate_axes.set_ylabel("Read rate (MiB/s)")
        size_axes.set_ylabel("Mean request (KiB)")
        size_axes.set_xlabel("Time since the run's start (s)")
        top = size_axes.get_ylim()[1]
        size_axes.set_ylim(0, max(top, 40))
        _legend(rate_axes)
        _legend(size_axes)
        peak = "not known" if point.disk_rkb_s_peak is None else f"{plain(point.disk_rkb_s_peak / 1024)} MiB/s"
        said.append(f"{label}: peak while measured {peak}, of {plain(max(time))} s in all")
    return Plot(name, f"{title}; {'; '.join(said)}. {provenance(rows, wanted)}", figure)


def breakdown(points: Iterable[Run]) -> Plot:
    """load_weight beside compute_layer_decoding, log scale."""
    rows, title, name = homework_rows(points), "Breakdown: loading a layer and computing it", "q4_breakdown"
    wanted = [row for row in QUESTIONS["q4"] if row.debug_mode]
    found = analysis.disk_io.analyze(tuple(rows.by_id.values()))
    runs = (("(1) 100 % GPU", found.gpu), ("(5) 100 % disk", found.disk))
    if not any(run for _, run in runs):
        return _nothing(name, title, rows)
    figure, axes = _canvas(title, rows, wanted)
    load = [Value.of(run.load_weight_s) if run and run.load_weight_s else None for _, run in runs]
    compute = [Value.of(run.compute_s) if run and run.compute_s else None for _, run in runs]
    _bars(axes, load, GREEN, shift=-0.2, width=0.38, label="load_weight (per layer)", log=True, text=seconds)
    _bars(
        axes, compute, BLUE, shift=0.2, width=0.38, label="compute_layer_decoding (per batch)", log=True, text=seconds
    )
    medians = [
        (i + shift - 0.12, median)
        for i, (_, run) in enumerate(runs)
        if run
        for shift, median in ((-0.2, run.load_weight_s_median), (0.2, run.compute_s_median))
        if median
    ]
    if medians:  # a few slow calls raise a mean
        axes.plot(
            *zip(*medians),
            linestyle="none",
            marker="D",
            markersize=7,
            markerfacecolor="white",
            markeredgecolor="black",
            label="median",
        )
        axes.set_ylim(bottom=min(axes.get_ylim()[0], 0.5 * min(median for _, median in medians)))
    axes.set_xticks(range(2), [label for label, _ in runs])
    axes.set_ylabel("Mean seconds (log scale)")
    _legend(axes)
    alt = (
        f"{title}, mean seconds. load_weight: "
        + _said(zip((r[0] for r in runs), load))
        + (
            " compute_layer_decoding: "
            + _said(zip((r[0] for r in runs), compute))
            + (" Medians: " + ", ".join(f"{plain(median)}" for _, median in medians) + "." if medians else "")
            + f" {provenance(rows, wanted)}"
        )
    )
    return Plot(name, alt, figure)


# ---- drawing --------------------------------------------------------------------------------------------------------


def _canvas(title: str, rows: Rows, wanted: Iterable[Row], columns: int = 1, lines: int = 1, squeeze: bool = True):
    """A figure with its title and, under it, what its figures are; and its axes."""
    figure = Figure(figsize=(WIDTH_IN, 2.6 + 1.8 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=squeeze, sharex="col" if lines > 1 else False)
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel(_wrapped(provenance(rows, wanted)), fontsize="small", color=GREY, parse_math=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, grid


def _wrapped(text: str, width: int = 115) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def _bars(
    axes: Axes,
    values: Sequence[Value | None],
    colour: str,
    shift: float = 0,
    width: float = 0.6,
    label: str | None = None,
    log: bool = False,
    missing: bool = True,
    text: Callable[[float], str] = plain,
) -> None:
    """Bars with their values on top and the range of repeats; a missing one is written in its place."""
    known = [(i + shift, v) for i, v in enumerate(values) if v is not None]
    heights = [v.value for _, v in known]
    if known:  # of no bars the legend would show another colour
        axes.bar([x for x, _ in known], heights, width, color=colour, label=label)
    spread = [(x, v) for x, v in known if v.repeated]
    if spread:
        axes.errorbar(
            [x for x, _ in spread],
            [v.value for _, v in spread],
            yerr=[[v.value - v.low for _, v in spread], [v.high - v.value for _, v in spread]],
            fmt="none",
            ecolor="black",
            capsize=4,
            linewidth=1,
        )
    if log and heights:
        axes.set_yscale("log")
    size = "x-small" if width < 0.3 else "medium"
    for x, v in known:
        axes.annotate(text(v.value), (x, v.high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=size)
    if missing:
        for i, v in enumerate(values):
            if v is None:
                axes.annotate(
                    "no figure",
                    (i + shift, 0.02),
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    color=GREY,
                    fontsize="small",
                    rotation=90 if width < 0.5 else 0,
                )
    axes.set_xlim(-0.6, len(values) - 0.4)
    _headroom(axes, log)


def _two_digits(value: float) -> str:
    return plain(value, 2)


def _headroom(axes: Axes, log: bool) -> None:
    """Room above the highest bar for its value, and on a log scale some bar under the lowest."""
    tops = [bar.get_height() for bar in axes.patches]
    if not tops:
        return
    if log:
        axes.set_ylim(min(tops) / 4, max(tops) * 4)
        _log_ticks(axes, min(tops), max(tops))
        _plain_numbers(axes)
    else:
        axes.set_ylim(0, max(tops) * 1.2 or 1)


def _log_ticks(axes: Axes, low: float, high: float) -> None:
    """More than powers of ten where the values span few of them."""
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _plain_numbers(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: plain(x, 1) if x < 1 else f"{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)


def _split_label(row: Row, rows: Rows) -> str:
    """The split that was asked for, and under it the one achieved."""
    point = rows.by_id.get(row.id)
    asked = f"{number(row.id)} " + row.label.replace(" + ", "\n+ ")
    if point is None:
        return f"{asked}\nmissing"
    state = "\nfailed" if point.status == "failed" else ""
    return f"{asked}\n[{str(point.placement).replace(' + ', chr(10) + '+ ')}]{state}"


def _said(pairs: Iterable[tuple[str, Value | None]]) -> str:
    return listed(f"{name} {plain(value.value) if value else 'no figure'}" for name, value in pairs) + "."


def _nothing(name: str, title: str, rows: Rows, why: str = "none of its runs has figures") -> Plot:
    figure = Figure(figsize=(WIDTH_IN, 1.2), layout="constrained")
    figure.text(0.5, 0.5, f"{title}: nothing to draw, {why}.", ha="center", va="center", color=GREY)
    return Plot(name, f"{title}: nothing to draw, {why}.", figure, drawn=False)
