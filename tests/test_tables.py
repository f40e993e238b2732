"""Tables: the hand-in's own, with the split achieved, the kind of each figure, and a reason where there is none."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from factories import T4, changed, make_record
from helpers.models import resolve
from helpers.placement import place
from helpers.report import tables
from helpers.runs import from_record


def test_every_table_of_the_hand_in_holds_its_figures():
    assert tables.offload_sweep(T4).frame["total_throughput_tok_s"].tolist() == [65.771, 28.908, 0.814, 0.705, 0.357]
    assert tables.batch_size(T4).frame["wall_time_s"].tolist() == [179.205, 179.329, 179.350]
    assert tables.weight_compression(T4).frame["peak_gpu_mem_gib"].tolist() == [2.807, 1.104, 0.588, 0.470]
    assert tables.disk_io(T4).frame["disk_rkb_s_peak"].tolist() == [252500]
    assert tables.breakdown(T4).shown["load / compute"].tolist() == ["0.0054", "33.51"]
    ratios = [text.split("= ")[1] for text in tables.offload_sweep_ratios(T4).shown["Ratio"]]
    assert ratios == ["2.28", "35.51", "1.15", "1.97"]


def test_asked_and_achieved_split_stand_on_every_row():
    for table in (tables.offload_sweep(T4), tables.batch_size(T4), tables.weight_compression(T4), tables.breakdown(T4)):
        assert all(table.shown["Asked"]) and all("%" in text for text in table.shown["Achieved"])
    achieved = tables.offload_sweep(T4).frame["achieved_gpu_percent"][1]
    assert achieved == place(resolve("opt-1.3b"), 50, 50, False).percent("gpu") != 50


def test_one_kind_stands_in_the_caption_and_several_on_the_rows():
    assert (
        "Kind" not in tables.offload_sweep(T4).shown
        and "Quoted: t4-colab/figures.csv" in tables.offload_sweep(T4).caption
    )
    mixed = changed(q1_2={"kind": "measured on CUDA"})
    assert tables.offload_sweep(mixed).shown["Kind"].tolist() == [
        "quoted",
        "measured on CUDA",
        "quoted",
        "quoted",
        "quoted",
    ]


def test_a_failed_row_keeps_its_place_with_its_reason():
    failed = {"status": "failed", "reason": "gpu_oom: no | memory", "total_throughput_tok_s": None}
    table = tables.offload_sweep(changed(q1_1=failed, q1_2=None))
    assert table.shown["Throughput (token/s)"].tolist()[:2] == ["—", "—"]
    assert table.shown["Status"].tolist()[:3] == [r"failed: gpu\_oom: no \| memory", "missing", "done"]
    assert table.frame["status"].tolist()[:3] == ["failed", "missing", "done"]
    assert "failed" in tables.disk_io(changed(q1_5=failed)).markdown


def test_repeats_show_their_range():
    point = from_record("x", make_record())
    text = tables.offload_sweep([point]).shown["Throughput (token/s)"][4]
    assert text == "16.000 (14.545 to 17.778)"
    assert "Medians of the repeats, with their range" in tables.offload_sweep([point]).caption


@pytest.mark.parametrize("rows", [(), T4[:1], T4[4:5], T4[::2], T4, (from_record("x", make_record()),)])
def test_no_table_shows_what_is_not_a_figure(rows):
    for table in tables.every(rows).values():
        assert not re.search(r"\b(nan|None|NaN|NA|inf)\b|np\.|float64", table.markdown), table.name
        lines = table.markdown.strip().splitlines()[2:]
        assert len({line.count("|") - line.count(r"\|") for line in lines}) == 1


def test_saved_csv_holds_raw_numbers(tmp_path):
    raw, formatted = tables.save(tables.offload_sweep(T4), tmp_path / "tables")
    again = pd.read_csv(raw)
    assert again["total_throughput_tok_s"].tolist() == tables.offload_sweep(T4).frame["total_throughput_tok_s"].tolist()
    assert formatted.read_text(encoding="utf-8") == tables.offload_sweep(T4).markdown


def test_the_reference_beside_itself_is_one():
    assert set(tables.comparison(T4).frame["throughput_ratio"]) == {1.0}
    ratios = tables.comparison_ratios(T4).frame
    assert ratios["here"].tolist() == ratios["reference"].tolist() and len(ratios) == 11


def test_other_work_beside_the_reference_says_so():
    table = tables.comparison([from_record("x", make_record())])
    assert "Not the same work" in table.caption and "opt-mini" in table.caption and len(table.frame) == 1


def test_the_reference_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(tables.comparison(T4).frame) == 9
