"""A notebook's page shows what all its tables share once; each saved file repeats it in full."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from factories import make_record
from helpers import homework, lab, notebook
from helpers.notebook import Page
from helpers.report import tables
from helpers.results import Sweep
from helpers.runs import from_record


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page, and the Markdown that it has shown so far."""
    shown = []
    monkeypatch.setattr(notebook, "display", lambda what, **_: shown.append(getattr(what, "data", what)))
    monkeypatch.setattr(lab, "run", lambda runs, *_, **__: Sweep({}))
    return Page("emulated", tmp_path), shown


def emulated():
    settings = ({}, {"page_cache": "cold"}, {"debug_mode": "breakdown"})
    records = [make_record(settings=one, kind="measured on the emulated GPU") for one in settings]
    return [from_record(str(i), record) for i, record in enumerate(records)]


def with_figures(rows):
    return [table for table in tables.every(rows).values() if len(table.frame) and table.name != "all_rows"]


def test_a_table_file_tells_where_its_figures_are_from(page):
    where, shown = page
    for table in with_figures(emulated()):
        where.show(table)
        file = (where.output / "tables" / f"{table.name}.md").read_text("utf-8")
        assert file.startswith(shown[-1]) and "prompt" not in shown[-1]
        assert "Measured on the emulated GPU: Tesla T4; opt-mini, 32 + 8 tokens" in file


@pytest.mark.parametrize("question", homework.QUESTIONS)
def test_what_all_tables_share_is_shown_once_first(page, question):
    where, shown = page
    where.run(homework.QUESTIONS[question])
    text = shown[0]
    assert text.startswith("Plan: ") and text.count("measured on the emulated GPU: emulated slow-motion T4") == 1
    assert "opt-mini, prompt 16, generated 4" in text and "page cache natural" in text
    assert "medians of up to 3 repeats" in text
    assert ("and cold" in text) == (question == "q4") and ("batch 4" in text) == (question != "q2")


def test_single_runs_are_no_medians(page):
    where, shown = page
    replace(where, parameters={"repeats": 1}).run(homework.QUESTIONS["q1"])
    assert "medians" not in shown[0]


def test_a_table_without_runs_says_so_on_the_page_too(page):
    where, shown = page
    where.show(tables.offload_sweep(()))
    assert "No figures" in shown[0]


def test_a_warning_is_a_sentence(page, tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        notebook.start("emulated", str(tmp_path))
        warnings.warn("line 2: not a record", stacklevel=1)
    assert capsys.readouterr().err == "warning: line 2: not a record\n"


@pytest.mark.parametrize(
    "cell, named",
    [
        ("notebook.start('emulated', prompt_len=5000)", "5000"),
        ("notebook.start('tpu')", "'tpu'"),
        ("notebook.start('emulated', model='opt-9b')", "opt-9b"),
        ("notebook.start('emulated', repeats=0)", "repeats"),
        ("notebook.start('emulated', gen_len='many')", "gen_len"),
        ("notebook.start('emulated', page_cache='warm')", "page_cache"),
        ("homework.offload_sweep({'(6)': '60 60 100 0 100 0'})", "(6)"),
        ("homework.batch_size([1, 0])", "batches"),
        ("homework.weight_compression('100 0')", "scenarios"),
    ],
)
def test_a_wrong_knob_gives_one_line_that_names_it(cell, named, capsys):
    shell = InteractiveShell.instance()
    shell.run_cell(f"from helpers import homework, notebook\n{cell}")
    said = capsys.readouterr().out.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("Refused: ") and named in said[0]
