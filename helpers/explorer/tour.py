"""The homework's five splits, one after another: where nothing moves, this is what the sliders would show."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from helpers.analysis.values import in_line, plain
from helpers.explorer.bench import Bench, MeasuredRun
from helpers.explorer.picture import plot
from helpers.explorer.state import State, moved
from helpers.explorer.view import View, off_by, view
from helpers.homework import QUESTIONS
from helpers.report.plots import Plot
from helpers.report.tables import NOT_KNOWN, Table
from helpers.settings import OffloadSplit


def tour(bench: Bench) -> tuple[Table, tuple[Plot, ...]]:
    """Predicted beside measured for the five splits at the bench's start, and a picture of each."""
    measured = bench.measured(bench.start.machine)
    views = {row.id: view(_at(bench, row.percent), bench, measured) for row in QUESTIONS["q1"]}
    pictures = tuple(plot(one, f"explore_{name}") for name, one in views.items())
    settings = bench.start.settings
    caption = f"Predicted and measured: {settings.model} on {in_line(bench.start.machine)}"
    return compared("explore", caption, tuple(views.values()), bench), pictures


def start(bench: Bench) -> Plot:
    """The picture of where the sliders start."""
    return plot(view(bench.start, bench, bench.measured(bench.start.machine)), "explore_start")


def compared(name: str, caption: str, views: Sequence[View], bench: Bench) -> Table:
    """A row a state: asked and achieved split, throughput predicted with its bounds, measured, and how far off."""
    raw, shown = [], []
    for one in views:
        settings, predicted, run = one.state.settings, one.prediction, one.measured
        split, work = settings.split, settings.workload
        low, high = predicted.total_throughput_tok_s_bounds
        least_gib, most_gib = predicted.peak_gpu_mem_gib_range
        achieved = {tier: share.achieved_percent for tier, share in one.weights.items()}
        measured_peak = run.peak_gpu_mem_gib if run else None
        fitted = run is not None and bench.was_calibrated_on(one.state.machine, run.settings)
        raw.append(
            {
                "machine": one.state.machine,
                "model": settings.model,
                "percent": str(split),
                "gpu_batch_size": work.gpu_batch_size,
                "num_gpu_batches": work.num_gpu_batches,
                "prompt_len": work.prompt_len,
                "gen_len": work.gen_len,
                "compress_weight": settings.compress_weight,
                **{f"achieved_{tier}_percent": share for tier, share in achieved.items()},
                "fits": not one.why_not,
                "predicted_tok_s": predicted.total_throughput_tok_s,
                "predicted_tok_s_low": low,
                "predicted_tok_s_high": high,
                "bottleneck": predicted.bottleneck,
                "measured_tok_s": run.throughput_tok_s.value if run else None,
                "measured_tok_s_min": run.throughput_tok_s.low if run else None,
                "measured_tok_s_max": run.throughput_tok_s.high if run else None,
                "predicted_peak_gpu_mem_gib": predicted.peak_gpu_mem_gib,
                "predicted_peak_gpu_mem_gib_low": least_gib,
                "predicted_peak_gpu_mem_gib_high": most_gib,
                "measured_peak_gpu_mem_gib": measured_peak,
                "kind": run.kind if run else None,
                "source": run.source if run else None,
                "calibrated_on": fitted,
            }
        )
        shown.append(
            {
                "Run": _run(one),
                "Asked": _shares(split.weights_gpu, split.weights_cpu, split.weights_disk),
                "Achieved": _shares(*(round(share, 1) for share in achieved.values())),
                "Predicted (token/s)": f"{plain(predicted.total_throughput_tok_s)} ({plain(low)} to {plain(high)})"
                + (" does not fit" if one.why_not else ""),
                "Measured (token/s)": _measured(run),
                "Predicted is": NOT_KNOWN if run is None else f"{off_by(one)}{', calibrated on it' * fitted}",
                "Peak GPU mem, predicted (GiB)": _within(predicted.peak_gpu_mem_gib, least_gib, most_gib),
                "Peak, measured (GiB)": NOT_KNOWN if measured_peak is None else plain(measured_peak),
                "Held back by": predicted.bottleneck,
                "Kind": f"predicted; {run.kind}" if run else "predicted",
            }
        )
    return Table(name, f"{caption}.", pd.DataFrame(raw), pd.DataFrame(shown).astype(str))


def _run(one: View) -> str:
    settings, work = one.state.settings, one.state.settings.workload
    words = [
        f"--percent {settings.split}",
        f"batch {work.gpu_batch_size} x {work.num_gpu_batches}",
        f"{work.prompt_len} + {work.gen_len} tokens",
    ]
    words += ["4-bit weights"] * settings.compress_weight + ["4-bit cache"] * settings.compress_cache
    return ", ".join(words)


def _shares(*shares: float) -> str:
    return " + ".join(f"{share:g} % {tier}" for share, tier in zip(shares, ("GPU", "CPU", "disk")) if share)


def _within(value: float, low: float, high: float) -> str:
    """A figure, and its range where that says more."""
    ends = plain(low), plain(high)
    return plain(value) + (f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else "")


def _measured(run: MeasuredRun | None) -> str:
    if run is None:
        return NOT_KNOWN
    value = run.throughput_tok_s
    return plain(value.value) + (f" ({plain(value.low)} to {plain(value.high)})" if value.repeated else "")


def _at(bench: Bench, percent: str) -> State:
    split = OffloadSplit.parse(percent)
    state = moved(bench.start, "weights_gpu", split.weights_gpu, bench)
    return moved(state, "weights_cpu", split.weights_cpu, bench)
