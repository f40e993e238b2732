"""The plots of the report, one function each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from matplotlib.axes import Axes

from helpers import analysis
from helpers.analysis.link_rates import LinkRates
from helpers.analysis.matching import QuestionRow, homework_rows
from helpers.analysis.values import Interval, Value, latency, listed, pass_time, plain, seconds, throughput
from helpers.report.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    Plot,
    bars,
    canvas,
    legend,
    log_ticks,
    nothing,
    plain_numbers,
    row_labels,
    said,
    save,
    scale,
)
from helpers.results import DiskSeries
from helpers.runs import Run
from helpers.units import GIB, KIB, MIB

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "SKY", "VERMILION", "Plot", "every", "save"]

MOST_SETTINGS = 24  # of a bar chart
RULE_KIB = 32  # the homework's limit between small and large requests


def every(runs: Sequence[Run]) -> dict[str, Plot]:
    """All plots by name, in the order of the report."""
    plots = [
        offload_sweep_throughput(runs),
        offload_sweep_memory(runs),
        offload_sweep_parts(runs),
        batch_size(runs),
        weight_compression(runs),
        disk_io(runs),
        breakdown(runs),
    ]
    return {plot.name: plot for plot in plots}


# ---- question 1 -----------------------------------------------------------------------------------------------------


def offload_sweep_throughput(runs: Iterable[Run]) -> Plot:
    """Throughput by split, log scale."""
    title, rows = _drawn("Throughput by offload split", homework_rows(runs).question("q1"))
    values = [throughput(row.run) for row in rows]
    return _by_split("q1_throughput", title, "Total throughput (token/s, log scale)", rows, values, log=True)


def offload_sweep_memory(runs: Iterable[Run]) -> Plot:
    """Peak GPU memory by split."""
    title, rows = _drawn("Peak GPU memory by offload split", homework_rows(runs).question("q1"))
    peaks, unit = _peaks([row.run for row in rows])
    return _by_split("q1_memory", title, f"Peak GPU memory allocated ({unit})", rows, peaks, log=False)


def _drawn(title: str, rows: Sequence[QuestionRow]) -> tuple[str, Sequence[QuestionRow]]:
    """The rows that a bar chart can show legibly, and a title that says how many it leaves to the table."""
    if len(rows) <= MOST_SETTINGS:
        return title, rows
    return f"{title} (the first {MOST_SETTINGS} of {len(rows):,}; the table has all)", rows[:MOST_SETTINGS]


def _peaks(runs: Iterable[Run | None]) -> tuple[list[Value | None], str]:
    """Peak GPU memory of runs, and the unit that suits the largest."""
    peaks = [run.peak_gpu_mem_gib if run else None for run in runs]
    factor, unit = (1.0, "GiB") if max((peak for peak in peaks if peak), default=1.0) >= 0.1 else (GIB / MIB, "MiB")
    return [None if peak is None else Value.of(factor * peak) for peak in peaks], unit


def _by_split(
    name: str, title: str, unit: str, rows: Sequence[QuestionRow], values: Sequence[Value | None], log: bool
) -> Plot:
    if not any(values):
        return nothing(name, title)
    figure, (axes,) = canvas(title, [row.run for row in rows], bars=len(rows))
    bars(axes, values, BLUE)
    scale(axes, values, log)
    row_labels(axes, rows)
    axes.set_ylabel(unit)
    alt = f"{title}: " + said((f"{row.label} {row.name}", value) for row, value in zip(rows, values))
    return Plot(name, alt, figure)


def offload_sweep_parts(runs: Iterable[Run]) -> Plot:
    """Seconds of a pass that computing, PCIe and the disk tier take at most, next to the measured pass."""
    runs = tuple(runs)
    rates, name = analysis.offload_sweep.analyze(runs).rates, "q1_parts"
    title, rows = _drawn(
        "Parts of a pass, each alone", [row for row in homework_rows(runs).question("q1") if row.id in rates.parts]
    )
    passes = [time.value for row in rows if (time := pass_time(row.run))]
    if not passes:
        return nothing(name, title)
    figure, (axes,) = canvas(title, [row.run for row in rows], bars=len(rows))
    groups: list[tuple[str, str, list[Value | None]]] = [("whole pass", GREY, [Value.of(time) for time in passes])]
    for label, part, colour in (("disk tier", "Disk", GREEN), ("PCIe", "PCIe", ORANGE), ("computing", "compute", BLUE)):
        found = [rates.parts[row.id].by_name[part] for row in rows]
        groups.insert(0, (label, colour, [_at_most(times, limit) for times, limit in zip(found, passes)]))
    width = 0.2
    for i, (label, colour, values) in enumerate(groups):
        bars(axes, values, colour, (i - 1.5) * width, width, label, text=partial(plain, digits=2))
    scale(axes, [value for _, _, values in groups for value in values], log=True)
    row_labels(axes, rows, [_page_cache(row, rates) for row in rows])
    axes.set_ylabel("Seconds per pass, parts at most (log scale)")
    legend(axes)
    spoken = (
        f"{row.label} " + listed(f"{label} {seconds(v.value)}" for label, _, values in groups if (v := values[i]))
        for i, row in enumerate(rows)
    )
    return Plot(name, f"{title}, at most: {'; '.join(spoken)}.", figure)


def _at_most(seconds_of_part: Interval, whole_s: float) -> Value | None:
    """A bar as high as the part can be, with a line down to the least; None for a part that the run doesn't have."""
    high = min(seconds_of_part.high, whole_s)
    return Value(high, min(seconds_of_part.low, high), high) if high else None


def _page_cache(row: QuestionRow, rates: LinkRates) -> str:
    mine, slowest = rates.parts[row.id].disk_rate, rates.disk
    if mine is None or slowest is None or rates.disk_row is None or mine.low <= slowest.high:
        return ""
    return f"reads faster than\n{rates.disk_row.label}'s: page cache"


def _value(value: float | None) -> Value | None:
    return Value.of(value) if value else None


# ---- question 2 -----------------------------------------------------------------------------------------------------


def batch_size(runs: Iterable[Run]) -> Plot:
    """Throughput and wall time against the batch, with the ideal line."""
    title, name = "Batch size with all weights on disk", "q2"
    rows = homework_rows(runs).question("q2")
    known = [(r.run.workload.gpu_batch_size, s, t) for r in rows if (s := throughput(r.run)) and (t := latency(r.run))]
    if not known:
        return nothing(name, title)
    batches, speeds, times = (list(column) for column in zip(*known))
    figure, (left, right) = canvas(title, [row.run for row in rows], columns=2)
    if len(known) > 1:
        ideal = [speeds[0].value * batch / batches[0] for batch in batches]
        left.plot(batches, ideal, color=GREY, linestyle="--", linewidth=2, zorder=3, label="ideal: proportional")
    _line(left, batches, speeds, BLUE, "throughput", offset=(9, -13))
    low, high = min(v.low for v in speeds), max(v.high for v in speeds)
    left.set_yscale("log")
    left.set_ylim(low / 3, high * 3)
    log_ticks(left, low, high)
    left.set_ylabel("Total throughput (token/s, log scale)")
    legend(left)
    _line(right, batches, times, VERMILION, "wall time", offset=(0, 8))
    right.set_ylim(0, 1.25 * max(t.high for t in times))
    right.set_ylabel("Wall time of a generation (s)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(b) for b in batches])
        axes.set_xlim(batches[0] / 1.5, batches[-1] * 3)
        axes.set_xlabel("Batch (sequences)")
        plain_numbers(axes)
    alt = (
        f"{title}. Throughput in token/s: "
        + said(zip((f"batch {b}" for b in batches), speeds))
        + " Wall time in s: "
        + said(zip((f"batch {b}" for b in batches), times))
    )
    return Plot(name, alt, figure)


def _line(
    axes: Axes, x: Sequence[int], values: Sequence[Value], colour: str, label: str, offset: tuple[int, int]
) -> None:
    """Points with the range of repeats, and their values next to them."""
    errors = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
    axes.errorbar(x, [v.value for v in values], yerr=errors, color=colour, marker="o", capsize=4, label=label)
    for place, value in zip(x, values):
        axes.annotate(
            plain(value.value),
            (place, value.value),
            xytext=offset,
            textcoords="offset points",
            ha="left" if offset[0] else "center",
        )


# ---- question 3 -----------------------------------------------------------------------------------------------------


def weight_compression(runs: Iterable[Run]) -> Plot:
    """Throughput and peak memory without and with 4-bit weights."""
    rows, name = homework_rows(runs).question("q3"), "q3"
    title, splits = _drawn("4-bit weights, before and after", list({row.run.split: row for row in rows}.values()))
    runs_of = {(row.run.split, row.run.compress_weight): row.run for row in rows}
    before = [runs_of.get((row.run.split, False)) for row in splits]
    after = [runs_of.get((row.run.split, True)) for row in splits]
    speeds = [throughput(run) for run in (*before, *after)]
    if not any(speeds):
        return nothing(name, title)
    peaks, unit = _peaks((*before, *after))
    figure, both = canvas(title, [row.run for row in rows], columns=2, bars=2 * len(splits))
    for axes, values, label, log in (
        (both[0], speeds, "Total throughput (token/s, log scale)", True),
        (both[1], peaks, f"Peak GPU memory allocated ({unit})", False),
    ):
        bars(axes, values[: len(splits)], BLUE, -0.2, 0.38, "fp16 weights")
        bars(axes, values[len(splits) :], ORANGE, 0.2, 0.38, "4-bit weights")
        if any(values):
            scale(axes, values, log)
        row_labels(axes, splits)
        axes.set_ylabel(label)
        legend(axes)
    labels = [f"{row.run.split.in_words} {kind}" for kind in ("fp16", "4-bit") for row in splits]
    return Plot(name, f"{title}. Throughput in token/s: {said(zip(labels, speeds))}", figure)


# ---- question 4 -----------------------------------------------------------------------------------------------------


def disk_io(runs: Iterable[Run]) -> Plot:
    """Reads of the disk, interval by interval, with the measured repeats marked."""
    title, name = "Reads of the disk, all weights on disk", "q4_disk"
    rows = [row for row in homework_rows(runs).question("q4") if row.run.debug_mode is None]
    sampled = [(row.run, row.run.disk) for row in rows if row.run.disk and row.run.disk.time_s]
    if not sampled:
        return nothing(name, title, "these figures hold no disk samples")
    count = len(sampled)
    figure, grid = canvas(title, [run for run, _ in sampled], columns=count, lines=2)
    spoken = []
    for i, (run, disk) in enumerate(sampled):
        cache = "page cache dropped" if run.page_cache == "cold" else "page cache as it was"
        _draw_reads(grid[i], grid[count + i], run, disk)
        grid[i].set_title(f"{cache} ({disk.device}, {disk.source})", fontsize="medium", pad=24, parse_math=False)
        if i == 0:
            grid[i].set_ylabel("Read rate (MiB/s)")
            grid[count].set_ylabel("Mean request (KiB)")
        peak = "unknown" if run.disk_rkb_s_peak is None else f"{plain(run.disk_rkb_s_peak * KIB / MIB)} MiB/s"
        spoken.append(f"{cache}: peak {peak} while measured")
    rates = [rate * KIB / MIB for _, disk in sampled for rate in disk.read_kib_per_s]
    sizes = [size for _, disk in sampled for size in disk.request_kib if size is not None]
    grid[0].set_ylim(0, 1.1 * max(rates, default=0) or 1)
    grid[count].set_ylim(0, max(1.1 * max(sizes, default=0), 1.25 * RULE_KIB))
    return Plot(name, f"{title}; {'; '.join(spoken)}.", figure)


def _draw_reads(rate_axes: Axes, size_axes: Axes, run: Run, disk: DiskSeries) -> None:
    rates = [kib * KIB / MIB for kib in disk.read_kib_per_s]
    starts = (disk.time_s[0] - disk.interval_s, *disk.time_s)
    rate_axes.step(starts, (rates[0], *rates), where="pre", color=BLUE)
    if disk.idle_read_kib_per_s is not None:
        rate_axes.axhline(disk.idle_read_kib_per_s * KIB / MIB, color=GREY, linestyle=":", label="before the run")
    sizes = [(end - disk.interval_s / 2, kib) for end, kib in zip(disk.time_s, disk.request_kib) if kib is not None]
    size_axes.plot([t for t, _ in sizes], [kib for _, kib in sizes], color=GREEN, marker=".", linestyle="none")
    size_axes.axhline(RULE_KIB, color=VERMILION, linestyle="--", label=f"{RULE_KIB} KiB, the rule's limit")
    size_axes.set_xlabel("Time since the run's start (s)")
    for axes in (rate_axes, size_axes):
        for i, (start, end) in enumerate(run.windows_s):
            label = "measured repeat" if i == 0 else None
            axes.axvspan(start, end, color=SKY, alpha=0.25, linewidth=0, label=label)
        axes.margins(x=0.02)
        legend(axes)


def breakdown(runs: Iterable[Run]) -> Plot:
    """load_weight next to compute_layer_decoding, log scale."""
    title, name = "Breakdown: loading a layer and computing it", "q4_breakdown"
    rows = [row for row in homework_rows(runs).question("q4") if row.run.debug_mode]
    load = [_value(row.run.load_weight_s) for row in rows]
    compute = [_value(row.run.compute_layer_decoding_s) for row in rows]
    if not any((*load, *compute)):
        return nothing(name, title)
    figure, (axes,) = canvas(title, [row.run for row in rows], bars=len(rows))
    bars(axes, load, GREEN, -0.2, 0.38, "load_weight (per layer)", text=seconds)
    bars(axes, compute, BLUE, 0.2, 0.38, "compute_layer_decoding (per batch)", text=seconds)
    medians = [
        (i + shift, median)
        for i, row in enumerate(rows)
        for shift, median in ((-0.2, row.run.load_weight_s_median), (0.2, row.run.compute_layer_decoding_s_median))
        if median
    ]
    if medians:  # a few slow calls raise a mean
        places, heights = zip(*medians)
        axes.scatter(places, heights, 49, "white", marker="D", edgecolor="black", zorder=3, label="median")
    scale(axes, (*load, *compute, *(Value.of(median) for _, median in medians)), log=True)
    row_labels(axes, rows)
    axes.set_ylabel("Mean seconds (log scale)")
    legend(axes)
    alt = (
        f"{title}, mean seconds. load_weight: "
        + said((row.label, value) for row, value in zip(rows, load))
        + " compute_layer_decoding: "
        + said((row.label, value) for row, value in zip(rows, compute))
    )
    return Plot(name, alt, figure)
