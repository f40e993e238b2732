"""Figures: every plot is a picture, names its kind and units, and one without figures says so."""

from __future__ import annotations

import sys

import matplotlib
import pytest
from matplotlib.figure import Figure

from factories import T4, changed, disk_series, make_record
from helpers.report import plots
from helpers.results import Samples
from helpers.runs import from_record

PNG = b"\x89PNG\r\n\x1a\n"


def words(plot):
    return " ".join(text.get_text() for text in plot.figure.findobj(matplotlib.text.Text))


@pytest.mark.parametrize("name", ["q1_throughput", "q1_memory", "q1_parts", "q2", "q3", "q4_breakdown"])
def test_each_plot_of_the_reference_is_drawn_with_units_and_kind(name, tmp_path):
    plot = plots.every(T4)[name]
    content = plots.save(plot, tmp_path).read_bytes()
    assert plot.drawn and len(plot.alt) > 40
    assert content.startswith(PNG) and len(content) > 10_000
    assert "Quoted: t4-colab/figures.csv" in words(plot)
    for axes in plot.figure.axes:
        assert any(unit in axes.get_ylabel() for unit in ("token/s", "GiB", "(s)", "econds"))


def test_values_and_achieved_split_are_on_the_sweep():
    shown = words(plots.offload_sweep_throughput(T4))
    for text in ("65.8", "0.357", "50.1 % GPU", "49.9 % disk"):
        assert text in shown
    assert plots.offload_sweep_throughput(T4).figure.axes[0].get_yscale() == "log"


@pytest.mark.parametrize("name", ["q1_throughput", "q2"])
@pytest.mark.parametrize(
    "factor, wanted, unwanted", [(30.0, {"2", "5", "20"}, set()), (3000.0, {"10", "100"}, {"2", "20"})]
)
def test_a_log_axis_has_more_than_powers_of_ten_where_it_spans_few(name, factor, wanted, unwanted):
    speeds = {"q1_1": factor, "q1_2": factor / 2, "q1_3": 1.0, "q1_4": 1.0, "q1_5": 4.0, "q2_b1": 1.0, "q2_b16": factor}
    rows = changed(**{row: {"total_throughput_tok_s": speed} for row, speed in speeds.items()})
    (axes, *_) = plots.every(rows)[name].figure.axes
    low, high = axes.get_ylim()
    shown = {axes.yaxis.get_major_formatter()(tick) for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high}
    assert wanted <= shown and not unwanted & shown


def test_no_text_is_cut():
    for plot in plots.every(T4).values():
        plot.figure.draw_without_rendering()
        box = plot.figure.bbox
        # Tick labels beyond the axis' limits exist, but are not drawn.
        ticks = {label for axes in plot.figure.axes for label in axes.get_yticklabels(which="both")}
        for text in plot.figure.findobj(matplotlib.text.Text):
            if text.get_visible() and text.get_text() and text not in ticks:
                extent = text.get_window_extent()
                assert extent.x0 >= box.x0 - 1 and extent.x1 <= box.x1 + 1, (plot.name, text.get_text())
                assert extent.y0 >= box.y0 - 1 and extent.y1 <= box.y1 + 1, (plot.name, text.get_text())


def test_disk_samples_are_drawn_with_the_repeats_marked():
    record = make_record(samples=Samples(disk=disk_series()))
    cold = make_record(samples=Samples(disk=disk_series()), settings={"page_cache": "cold"})
    plot = plots.disk_io([from_record("a", record), from_record("b", cold)])
    assert plot.drawn and len(plot.figure.axes) == 4 and "MiB/s" in words(plot)
    assert "measured repeat" in words(plot) and plot.png().startswith(PNG)


@pytest.mark.parametrize(
    "rows", [(), T4[:1], T4[1:3], T4[-1:], changed(q1_1={"status": "failed", "reason": "$x$ oom"})]
)
def test_missing_and_failed_rows_draw_what_there_is(rows):
    for plot in plots.every(rows).values():
        assert plot.png().startswith(PNG)
        assert plot.drawn or "nothing to draw" in plot.alt


def test_runs_to_compare_share_their_scale():
    record, fast = (
        make_record(samples=Samples(disk=disk_series(read_kib_per_s=rates)), settings={"page_cache": cache})
        for rates, cache in (((1.0, 2.0, 3.0, 4.0), "natural"), ((9e5, 9e5, 9e5, 9e5), "cold"))
    )
    axes = plots.disk_io([from_record("a", record), from_record("b", fast)]).figure.axes
    assert axes[0].get_ylim() == axes[1].get_ylim() and axes[2].get_ylim() == axes[3].get_ylim()


def test_a_source_with_dollar_signs_is_not_a_formula():
    rows = [p.model_copy(update={"source": r"$\frac{$ and $"}) for p in T4]
    assert all(plot.png().startswith(PNG) for plot in plots.every(rows).values())


def test_nothing_is_left_in_pyplot():
    plots.every(T4)
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()
    assert isinstance(plots.batch_size(T4).figure, Figure)


def test_a_long_sweep_draws_the_first_splits_and_says_so():
    splits = [f"{gpu} {100 - gpu} 100 0 100 0" for gpu in range(0, 100, 3)]
    runs = [from_record(split, make_record(split)) for split in splits]
    shown = plots.offload_sweep_throughput(runs)
    assert f"the first {plots.MOST_SETTINGS} of {len(splits)}; the table has all" in shown.alt
    assert len(shown.figure.axes[0].patches) == plots.MOST_SETTINGS
