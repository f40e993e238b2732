"""The notebooks in git: no outputs, one shape, little code in a cell, the same shared parameters."""

from __future__ import annotations

import ast

import nbformat
import pytest

from helpers import homework, paths, suite

PATHS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
NOTEBOOKS = {path.name: nbformat.read(path, as_version=4) for path in PATHS}
MOST_LINES = 25

every_notebook = pytest.mark.parametrize("name", NOTEBOOKS)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameters(notebook):
    """The parameters cell, as values by name."""
    (cell,) = [cell for cell in code(notebook) if cell.metadata.get("tags", []).count("parameters") == 1]
    return {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cell.source).body}


def test_the_suite_runs_them_all():
    assert sorted(suite.NOTEBOOKS.values()) == [path.name for path in PATHS]


@every_notebook
def test_it_is_a_valid_notebook_without_output(name):
    notebook = NOTEBOOKS[name]
    nbformat.validate(notebook)
    for cell in code(notebook):
        assert cell.outputs == [] and cell.execution_count is None
    assert notebook.metadata.kernelspec.name == "python3"


@every_notebook
def test_its_head_has_a_question_and_the_time_it_takes(name):
    head = NOTEBOOKS[name].cells[0]
    assert head.cell_type == "markdown" and head.source.startswith("# ")
    assert "?" in head.source and "**Takes**" in head.source


@every_notebook
def test_it_begins_with_the_same_cell_as_the_others(name):
    first = code(NOTEBOOKS[name])[0].source
    assert first.startswith("# @title Set-up") and first == code(NOTEBOOKS[PATHS[0].name])[0].source


@every_notebook
def test_a_cell_is_short_plain_python(name):
    cells = NOTEBOOKS[name].cells
    for cell in cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= MOST_LINES
            ast.parse(cell.source)  # no magics, no shell: neither fails where it stands


@every_notebook
def test_an_exercise_or_guess_left_open_is_no_error(name):
    """`...` stands for an answer; the checks take it."""
    open_answers = [cell.source for cell in code(NOTEBOOKS[name]) if " = ..." in cell.source]
    assert open_answers


@every_notebook
def test_it_has_one_parameters_cell_with_the_shared_parameters(name):
    shared = {"device": "auto", "model": "", "page_cache": "natural", "repeats": 3, "output_dir": "", "fresh": False}
    assert parameters(NOTEBOOKS[name]).items() >= shared.items()


@pytest.mark.parametrize(
    "name, question, knob",
    [
        ("01_offload_sweep", "q1", "splits"),
        ("02_batch_size", "q2", "batches"),
        ("03_weight_compression", "q3", "scenarios"),
        ("04_disk_io", "q4", "scenarios"),
    ],
)
def test_the_default_knobs_are_the_homework(name, question, knob):
    rows = getattr(homework, name.partition("_")[2])(parameters(NOTEBOOKS[f"{name}.ipynb"])[knob])
    assert rows == homework.QUESTIONS[question]


@every_notebook
def test_each_parameter_is_explained_above_its_cell(name):
    cells = NOTEBOOKS[name].cells
    place = next(i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    assert cells[place - 1].cell_type == "markdown"
    for parameter in parameters(NOTEBOOKS[name]):
        assert f"`{parameter}`" in cells[place - 1].source
