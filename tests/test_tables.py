"""Tables: the hand-in's own, with the split achieved, the kind of each figure, and a reason where there is none."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from factories import T4, changed, make_record, variant
from helpers.analysis import values
from helpers.analysis.values import Value
from helpers.models import resolve
from helpers.placement import place
from helpers.report import columns, comparison, tables
from helpers.runs import from_record


def test_every_table_of_the_hand_in_holds_its_figures():
    assert tables.offload_sweep(T4).frame["total_throughput_tok_s"].tolist() == [65.771, 28.908, 0.814, 0.705, 0.357]
    assert tables.batch_size(T4).frame["wall_time_s"].tolist() == [179.205, 179.329, 179.350]
    assert tables.weight_compression(T4).frame["peak_gpu_mem_gib"].tolist() == [2.807, 1.104, 0.588, 0.470]
    assert tables.disk_io(T4).frame["disk_rkb_s_peak"].tolist() == [252500]
    assert tables.breakdown(T4).shown["load / compute"].tolist() == ["0.0054", "33.51"]
    ratios = [text.split("=")[1].strip() for text in tables.offload_sweep_ratios(T4).shown["Ratio"]]
    assert ratios == ["2.28", "35.51", "1.15", "1.97"]


def test_every_row_has_the_asked_and_the_achieved_split():
    for table in (tables.offload_sweep(T4), tables.batch_size(T4), tables.weight_compression(T4), tables.breakdown(T4)):
        assert all("%" in text for text in table.shown["Weights: asked → achieved"])
    sweep = tables.offload_sweep(T4)
    assert sweep.shown["Weights: asked → achieved"][0] == "100 % GPU"
    assert sweep.shown["Weights: asked → achieved"][1] == "50 % GPU + 50 % CPU → 50.1 % GPU + 49.9 % CPU"
    assert sweep.frame["achieved_gpu_percent"][1] == place(resolve("opt-1.3b"), 50, 50, False).percent("gpu") != 50


def test_rows_of_several_kinds_name_theirs():
    assert "Kind" not in tables.offload_sweep(T4).shown
    mixed = tables.offload_sweep(changed(q1_2={"kind": "measured on CUDA"}))
    assert mixed.shown["Kind"].tolist() == ["quoted", "measured on CUDA", "quoted", "quoted", "quoted"]


def test_a_failed_row_keeps_its_place_with_its_reason():
    failed = {"status": "failed", "reason": "gpu_oom: no | memory", "total_throughput_tok_s": None}
    table = tables.offload_sweep(changed(q1_1=failed, q1_2=None))
    assert table.shown["Throughput (token/s)"][0] == "—"
    assert table.shown["Remark"].tolist() == [r"failed: gpu\_oom: no \| memory", "", "", ""]
    assert table.frame["status"].tolist() == ["failed", "done", "done", "done"]
    assert "failed" in tables.disk_io(changed(q1_5=failed)).markdown


def test_a_disturbed_run_is_marked_on_its_row():
    note = "the main thread's processor core ran at 50 % of the fastest seen on this machine"
    table = tables.offload_sweep(changed(q1_3={"notes": (note,)}))
    assert ["50 %" in text for text in table.shown["Remark"]] == [False, False, True, False, False]


def test_a_sixth_split_and_other_batches_have_rows():
    batches = [variant(T4[5], f"b{batch}", batch) for batch in (2, 8, 32)]
    runs = (*T4, variant(T4[1], "mine", percent="20 80 100 0 100 0"), *batches)
    assert "mine" in tables.offload_sweep(runs).frame["row"].tolist()
    assert tables.batch_size(runs).frame["gpu_batch_size"].tolist() == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    "value, shown",
    [
        (Value.of(65.771), "65.771"),
        (Value.of(0.0054), "0.00540"),
        (Value(132.19, 131.6, 132.8), "132.2 (131.6–132.8)"),
        (Value(16.0, 14.545, 17.778), "16.0 (14.5–17.8)"),
        (Value(101.0, 90.0, 120.0), "101 (90–120)"),
    ],
)
def test_figures_have_the_digits_that_their_spread_allows(value, shown):
    assert columns.figure(value) == shown


@pytest.mark.parametrize("gib, shown", [(2.807, "2.807 GiB"), (0.00892, "9.13 MiB"), (0.0, "0 MiB")])
def test_memory_has_a_unit_for_people(gib, shown):
    assert values.memory(gib) == shown


def test_repeats_show_their_range():
    table = tables.offload_sweep([from_record("x", make_record())])
    assert table.shown["Throughput (token/s)"].tolist() == ["16.0 (14.5–17.8)"]
    assert table.frame["total_throughput_tok_s_min"][0] == pytest.approx(14.545, abs=1e-3)
    assert "medians (range)" in table.provenance


def test_the_percent_option_never_wraps():
    assert " " not in tables.offload_sweep(T4).shown["`--percent`"][0]


@pytest.mark.parametrize("runs", [(), T4[:1], T4[4:5], T4[::2], T4, (from_record("x", make_record()),)])
def test_no_table_shows_what_is_not_a_figure(runs):
    for table in tables.every(runs).values():
        assert not re.search(r"\b(nan|None|NaN|NA|inf)\b|np\.|float64", table.markdown), table.name
        lines = table.markdown.strip().splitlines()[2:]
        assert len({line.count("|") - line.count(r"\|") for line in lines}) <= 1


def test_saved_csv_holds_raw_numbers(tmp_path):
    table = tables.offload_sweep(T4)
    raw, formatted = columns.save(table, tmp_path / "tables")
    assert pd.read_csv(raw)["total_throughput_tok_s"].tolist() == table.frame["total_throughput_tok_s"].tolist()
    assert formatted.read_text(encoding="utf-8").startswith(table.markdown)


def test_the_reference_compared_with_itself_is_one():
    assert set(comparison.comparison(T4).frame["throughput_ratio"]) == {1.0}
    ratios = comparison.comparison_ratios(T4).frame
    assert ratios["here"].tolist() == ratios["reference"].tolist() and len(ratios) == 11
    assert "comparison" not in tables.every(T4) and "comparison" in tables.every(T4[1:])


def test_other_work_next_to_the_reference_says_so():
    table = comparison.comparison([from_record("x", make_record())])
    assert "Not the same work" in table.caption and "opt-mini" in table.caption and len(table.frame) == 1
