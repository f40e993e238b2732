"""The direct reader against FlexGen's own: figures only where it ran, and no row of the homework."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from factories import T4, make_record
from helpers import analysis
from helpers.analysis import matching, readers
from helpers.engine.direct_reader import DirectReader
from helpers.homework import QUESTIONS
from helpers.report import document, plots, tables
from helpers.results import Failure, Log
from helpers.runs import from_record

COLD = {"page_cache": "cold"}
DIRECT = {"page_cache": "cold", "disk_reader": "direct"}
NATURAL_S, STOCK_S, DIRECT_S = ((1.0,), (1.1,)), ((4.0,), (4.4,)), ((2.0,), (2.2,))


def record(settings, latencies, **fields):
    return make_record(settings=settings, latencies=latencies, **fields)


def three(direct_s=DIRECT_S, stock_s=STOCK_S, **fields):
    """The run with all weights on disk: as the page cache comes, cold, and cold with the direct reader."""
    runs = {
        "q1-5": record({}, NATURAL_S, **fields),
        "q4-disk-cold": record(COLD, stock_s, **fields),
        "q4-disk-direct": record(DIRECT, direct_s, **fields),
    }
    return tuple(from_record(name, one) for name, one in runs.items())


def words(rows):
    return analysis.disk_readers.analyze(rows).markdown


# ---- next to the homework, not in it


def test_the_direct_run_changes_nothing_of_the_homework():
    *homework, direct = three()
    assert matching.homework_rows([*homework, direct]).by_id == matching.homework_rows(homework).by_id
    with_it, without = tables.every([*homework, direct]), tables.every(homework)
    assert set(with_it) - set(without) == {"disk_readers"}
    for name, table in without.items():
        if name != "all_rows":
            assert with_it[name].markdown == table.markdown
    for question in QUESTIONS:
        answer = analysis.BY_QUESTION[question].analyze
        assert answer([*homework, direct]).markdown == answer(homework).markdown
    drawn = plots.every([*homework, direct])
    assert {name: plot.alt for name, plot in drawn.items()} == {
        name: plot.alt for name, plot in plots.every(homework).items()
    }


def test_every_run_lists_it_as_not_the_homeworks_under_its_name(tmp_path):
    log = Log(tmp_path / "results.jsonl")
    for latencies, settings in ((NATURAL_S, {}), (STOCK_S, COLD), (DIRECT_S, DIRECT)):
        log.append(record(settings, latencies))
    rows = readers.read(log.path)
    assert [point.run_id for point in rows] == ["q1-5", "q4-disk-cold", "q4-disk-direct"]
    assert tables.all_runs(rows).frame["in_homework"].tolist() == [True, True, False]
    document.write(rows, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "q4-disk-direct" in text


@pytest.mark.parametrize(
    "settings",
    [
        {"disk_reader": "direct"},  # page cache as it comes
        DIRECT | {"overlap": False},
        DIRECT | {"compress_weight": True},
        DIRECT | {"model": "opt-125m"},
    ],
)
def test_another_run_with_the_direct_reader_is_not_taken_for_it(settings):
    other = from_record("other", record(settings, DIRECT_S))
    assert "Can't tell" in words([*three()[:2], other])


def test_of_two_runs_the_last_done_one_counts():
    *homework, first = three()
    second = from_record("again", record(DIRECT, ((1.0,),)))
    failed = first.model_copy(update={"status": "failed", "reason": "oom", "total_throughput_tok_s": None})
    assert matching.homework_rows([first, second, failed, *homework]).done("q4-disk-direct") == second


# ---- what it says


@pytest.mark.parametrize(
    "direct_s, said",
    [
        (((2.0,), (2.2,)), "is faster than"),
        (((8.0,), (8.8,)), "is slower than"),
        (((4.2,), (4.3,)), "is as fast as"),
        (((3.8,), (5.0,)), "is as fast as"),
    ],
)
def test_the_words_follow_the_figures(direct_s, said):
    rows = three(direct_s)
    assert said in words(rows)


def test_single_runs_within_two_percent_count_as_equal():
    assert "is as fast as" in words(three(((3.95,),), ((4.0,),)))


def test_the_table_holds_both_readers_with_bytes_and_rate():
    """Oracle: the stand-in records read 1,000 and 2,000 bytes in their two repeats."""
    table = tables.disk_readers(three())
    assert table.frame["disk_reader"].tolist() == ["stock", "direct"]
    assert table.frame["throughput_ratio"].tolist()[1] == pytest.approx(2.0)
    assert table.frame["bytes_needed"].tolist() == [4000, 4000]
    assert table.frame["bytes_from_disk"].tolist() == [1500, 1500]
    assert table.frame["disk_bytes_per_s"].tolist() == pytest.approx([1500 / 4.2, 1500 / 2.1])
    assert "Measured on CUDA: Tesla T4" in table.provenance and "page cache cold" in table.provenance
    assert "2.00" in table.markdown


def test_page_cache_in_one_of_the_two_is_said():
    """A quarter and half of the bytes came from the disk."""
    assert "page cache served" in words(three())
    every_byte = three(bytes_expected_from_disk=1500)
    assert "page cache served" not in words(every_byte)


def test_the_emulations_pace_is_said():
    assert "says nothing about a disk" in words(three(kind="measured on the emulated GPU"))
    assert "emulation" not in words(three())


def test_a_file_system_without_o_direct_is_told_by_the_runs_note(tmp_path, monkeypatch):
    reader = DirectReader()
    (tmp_path / "weight").write_bytes(b"")
    monkeypatch.setattr("os.preadv", lambda *_: (_ for _ in ()).throw(OSError(22, "Invalid argument")))
    reader._flags(str(tmp_path / "weight"))
    *homework, direct = three()
    noted = direct.model_copy(update={"notes": ("something else", *reader.notes)})
    text = words([*homework, noted])
    assert "has no O\\_DIRECT" in text and "something else" not in text
    assert "no O_DIRECT" in tables.disk_readers([*homework, noted]).frame["notes"].tolist()[1]


# ---- what is not there


def test_without_the_run_nothing_is_made_of_it(tmp_path):
    written = document.write(T4, tmp_path)
    assert not any("disk_readers" in str(path) for path in written)
    assert "direct disk reader" not in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "No figures" in tables.disk_readers(T4).markdown


def test_with_the_run_the_report_and_the_tables_have_it(tmp_path):
    written = {str(path.relative_to(tmp_path)) for path in document.write(three(), tmp_path)}
    assert {"tables/disk_readers.csv", "tables/disk_readers.md"} <= written
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "direct disk reader" in text and "is faster than" in text


def test_a_failed_run_is_a_row_with_its_reason():
    failure = Failure(kind="disk_full", message="no room")
    *homework, _ = three()
    failed = from_record("x", record(DIRECT, (), status="failed", failure=failure))
    text = tables.disk_readers([*homework, failed]).markdown
    assert "failed: disk\\_full: no room" in text and "no room" in words([*homework, failed])
    stock_failed = from_record("x", record(COLD, (), status="failed", failure=failure))
    assert "Can't tell" in words([homework[0], stock_failed, three()[2]])


def test_without_the_stock_run_there_is_nothing_to_compare_with():
    natural, _, direct = three()
    assert "Can't tell" in words([natural, direct])
    assert tables.disk_readers([natural, direct]).frame["throughput_ratio"].isna().all()


positive = st.floats(1e-3, 1e3)


@hypothesis_settings(max_examples=60)
@given(st.lists(positive, min_size=1, max_size=3), st.lists(positive, min_size=1, max_size=3))
def test_any_two_runs_get_words_that_their_ranges_allow(direct_s, stock_s):
    rows = three(tuple((s,) for s in direct_s), tuple((s,) for s in stock_s))
    text, table = words(rows), tables.disk_readers(rows).markdown
    if "is faster" in text:
        assert max(direct_s) < min(stock_s)
    elif "is slower" in text:
        assert min(direct_s) > max(stock_s)
    else:
        assert "is as fast as" in text
    assert not re.search(r"\b(nan|None|inf)\b", text + table)
