"""Static tables and pictures: the start of the sliders, and the homework's five splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from helpers import options
from helpers.analysis.values import in_line, plain
from helpers.explorer.bench import Bench
from helpers.explorer.frontier import FrontierPicture
from helpers.explorer.map_picture import MapPicture
from helpers.explorer.moves import moved
from helpers.explorer.overlap import OverlapPicture
from helpers.explorer.roofline import RooflinePicture, roofline
from helpers.explorer.state import State
from helpers.explorer.view import View, view
from helpers.homework import QUESTIONS
from helpers.predict.time_model import predict
from helpers.report.plots import Plot
from helpers.report.tables import NOT_KNOWN, Table
from helpers.settings import OffloadSplit


def start(bench: Bench) -> tuple[Plot, ...]:
    """The four pictures of where the sliders start."""
    shown = view(bench.start, bench, bench.measured(bench.start.machine))
    return (
        MapPicture(alone=True).plot(shown, "explore_start"),
        FrontierPicture(alone=True).plot(shown, "explore_frontier"),
        OverlapPicture(alone=True).plot(shown, "explore_overlap"),
        RooflinePicture(alone=True).plot(shown, "explore_roofline"),
    )


def tour(bench: Bench) -> tuple[Table, tuple[Plot, ...]]:
    """Predicted next to measured for the five splits at the bench's start, and how each overlaps its work."""
    measured = bench.measured(bench.start.machine)
    views = {row.id: view(_moved(bench, _shares(row.percent)), bench, measured) for row in QUESTIONS["q1"]}
    pictures = tuple(OverlapPicture(alone=True).plot(one, f"explore_{name}") for name, one in views.items())
    caption = f"Predicted and measured: {bench.start.settings.model} on {in_line(bench.start.machine)}"
    return compared("explore", caption, tuple(views.values()), bench), pictures


def compared(name: str, caption: str, views: Sequence[View], bench: Bench) -> Table:
    """A row for each state: asked and achieved split, throughput predicted with its bounds and measured, and how far
    the two differ."""
    rows = [_figures(one, bench) for one in views]
    shown = [row_in_words(one, bench) for one in views]
    return Table(name, f"{caption}.", pd.DataFrame(rows), pd.DataFrame(shown).astype(str))


def _figures(one: View, bench: Bench) -> dict[str, object]:
    settings, predicted, run = one.settings, one.prediction, one.run
    work, measured = settings.workload, one.measured_tok_s
    low, high = predicted.total_throughput_tok_s_bounds
    least_gib, most_gib = predicted.peak_gpu_mem_gib_range
    return {
        "machine": one.state.where,
        "model": settings.model,
        "percent": str(settings.split),
        "gpu_batch_size": work.gpu_batch_size,
        "num_gpu_batches": work.num_gpu_batches,
        "prompt_len": work.prompt_len,
        "gen_len": work.gen_len,
        "compress_weight": settings.compress_weight,
        **{f"achieved_{tier}_percent": share.achieved_percent for tier, share in one.weights.items()},
        "fits": not one.why_not,
        "predicted_tok_s": predicted.total_throughput_tok_s,
        "predicted_tok_s_low": low,
        "predicted_tok_s_high": high,
        "bottleneck": predicted.bottleneck,
        "measured_tok_s": measured.value if measured else None,
        "measured_tok_s_min": measured.low if measured else None,
        "measured_tok_s_max": measured.high if measured else None,
        "predicted_peak_gpu_mem_gib": predicted.peak_gpu_mem_gib,
        "predicted_peak_gpu_mem_gib_low": least_gib,
        "predicted_peak_gpu_mem_gib_high": most_gib,
        "measured_peak_gpu_mem_gib": run.peak_gpu_mem_gib if run else None,
        "kind": run.kind if run else None,
        "source": run.source if run else None,
        "calibrated_on": run is not None and bench.was_calibrated_on(one.state),
    }


def row_in_words(one: View, bench: Bench) -> dict[str, str]:
    """A row of the table, short enough for one line."""
    settings, predicted, run = one.settings, one.prediction, one.run
    split, work = settings.split, settings.workload
    off = one.off_by + " (calibrated on it)" * (bool(run) and bench.was_calibrated_on(one.state))
    return {
        "--percent": str(split),
        "Achieved GPU/CPU/disk %": " / ".join(f"{share.achieved_percent:.1f}" for share in one.weights.values()),
        "Batch": f"{work.gpu_batch_size} x {work.num_gpu_batches}",
        "Tokens": f"{work.prompt_len} + {work.gen_len}",
        "Options": ", ".join(options.words(settings)) or "-",
        "Predicted (token/s)": plain(predicted.total_throughput_tok_s) + " does not fit" * bool(one.why_not),
        "Measured (token/s)": _measured(one),
        "Predicted is off by": off or NOT_KNOWN,
        "Peak GPU mem, predicted (GiB)": _within(predicted.peak_gpu_mem_gib, *predicted.peak_gpu_mem_gib_range),
        "Measured (GiB)": plain(run.peak_gpu_mem_gib) if run and run.peak_gpu_mem_gib else NOT_KNOWN,
        "Bottleneck": predicted.bottleneck,
        "Kind": f"predicted{one.aside}; {run.kind}" if run else f"predicted{one.aside}",
    }


def _measured(one: View) -> str:
    value = one.measured_tok_s
    if value is None:
        return NOT_KNOWN
    return plain(value.value) + (f" ({plain(value.low)} to {plain(value.high)})" if value.repeated else "")


def _within(value: float, low: float, high: float) -> str:
    """A figure, and its range where that says more."""
    ends = plain(low), plain(high)
    return plain(value) + (f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else "")


# ---- figures that the notebook's exercises ask for -------------------------------------------------------------------


def predicted_tok_s(bench: Bench, **controls: Any) -> float:
    """Predicted token/s where the sliders start, with some controls moved one after another."""
    state = _moved(bench, controls)
    return predict(state.settings, bench.profile(state)).total_throughput_tok_s


def turning_point(bench: Bench, **controls: Any) -> float:
    """The batch size at which the roofline's lowest roof becomes computing's, with some controls moved."""
    state = _moved(bench, controls)
    crossings = roofline(state.settings, bench.profile(state)).crossings
    return next(size for size, _, _, part in crossings if part == "compute")


def _moved(bench: Bench, controls: dict[str, Any]) -> State:
    state = bench.start
    for control, value in controls.items():
        state = moved(state, control, value, bench)
    return state


def _shares(percent: str) -> dict[str, int]:
    split = OffloadSplit.parse(percent)
    return {"weights_gpu": split.weights_gpu, "weights_cpu": split.weights_cpu}
