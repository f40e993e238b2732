"""The suite refuses mistakes before it starts; a notebook that fails is kept and named, and the others go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import papermill
import pytest

from helpers import paths, results, suite
from helpers.errors import Refused
from helpers.homework import QUESTIONS
from helpers.progress import Progress
from helpers.results import Log

PARAMETERS = 'output_dir = ""\nfresh = False'


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """Make notebooks from cells, in a folder that stands in for the project's."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(suite, "NOTEBOOK_FOLDER", folder)

    def make(**cells_by_name):
        for name, cells in cells_by_name.items():
            notebook = nbformat.v4.new_notebook()
            notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
            notebook.cells = [nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
            notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
            nbformat.write(notebook, folder / f"{name}.ipynb")
        monkeypatch.setattr(suite, "NOTEBOOKS", {name: f"{name}.ipynb" for name in cells_by_name})

    return make


@pytest.fixture
def nothing_runs(monkeypatch):
    def started(*arguments, **options):
        raise AssertionError("a notebook was run")

    monkeypatch.setattr(papermill, "execute_notebook", started)


# ---- refused first


@pytest.mark.parametrize(
    "names, parameters, named",
    [
        (["q1", "q5"], {}, "'q5'"),
        (["q1"], {"devise": "auto"}, "'devise'"),
        (["q1", "q2"], {"output_dir": "", "splits": {}}, "'splits'"),
    ],
)
def test_unknown_notebooks_and_parameters_are_refused_first(names, parameters, named, tmp_path, nothing_runs):
    """papermill would log a warning and run the defaults."""
    with pytest.raises(Refused) as refused:
        suite.run(names, parameters, tmp_path / "out")
    assert named in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_read_only_output_folder_is_refused_first(nothing_runs):
    with pytest.raises(Refused, match="/proc/nowhere"):
        suite.run(["q1"], {}, Path("/proc/nowhere"))


def test_a_report_without_runs_is_refused(tmp_path):
    with pytest.raises(Refused):
        suite.write_report(tmp_path)


# ---- a notebook fails


def test_a_failed_notebook_is_kept_and_the_next_one_runs(notebooks, tmp_path):
    notebooks(
        bad=["print('before')", "raise ValueError('first line\\nsecond line')", "print('after')"],
        killed=["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"],
        good=["print(output_dir)"],
    )
    bad, killed, good = suite.run(["bad", "killed", "good"], {"output_dir": "given"}, tmp_path / "out")
    assert "ValueError" in bad.error and "first line" in bad.error and "\n" not in bad.error
    outputs = [str(cell.get("outputs", "")) for cell in nbformat.read(bad.executed, as_version=4).cells]
    assert any("before" in text for text in outputs) and any("second line" in text for text in outputs)
    assert "Kernel" in killed.error and killed.executed.is_file()
    assert good.error == "" and "given" in good.executed.read_text()
    assert bad.executed.parent == tmp_path / "out" / "notebooks"


def test_a_notebook_runs_in_its_own_folder(notebooks, tmp_path, monkeypatch):
    notebooks(where=["import os\nprint('in', os.getcwd())"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (ran,) = suite.run(["where"], {}, Path("out"))
    assert ran.error == "" and f"in {suite.NOTEBOOK_FOLDER}" in ran.executed.read_text()
    assert ran.executed.resolve().parent == elsewhere / "out" / "notebooks"


def test_a_kernel_starts_quietly_and_leaves_no_files(notebooks, tmp_path, monkeypatch, capfd):
    """ipykernel 7 would warn about TCP, an older debugger about frozen modules."""
    notebooks(where=["import ipykernel\nprint(ipykernel.get_connection_info())"])
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "tempdir", scratch)
            (ran,) = suite.run(["where"], {}, tmp_path / "out", say=lambda text: None)
        assert ran.error == "" and "warning" not in capfd.readouterr().err.lower()
        assert scratch in ran.executed.read_text() and os.listdir(scratch) == []
    assert os.listdir(suite.NOTEBOOK_FOLDER) == ["where.ipynb"]


def test_a_notebook_runs_where_socket_names_are_too_long(notebooks, tmp_path, monkeypatch):
    notebooks(nothing=["print('ran')"])
    scratch = tmp_path / ("deep" * 25)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    (ran,) = suite.run(["nothing"], {}, tmp_path / "out")
    assert ran.error == "" and "ran" in ran.executed.read_text()


def test_progress_tells_the_run_and_fits_in_80_columns(notebooks, tmp_path):
    tell = f"import sys\nsys.path.insert(0, {str(paths.ROOT)!r})\nfrom helpers.progress import Progress, tell\n"
    tell += "tell(Progress(2, 5, 'measuring', 100.0, 'opt-1.3b, --percent 0 0 100 0 100 0, batch 4'))\n"
    notebooks(runs=[tell + "import time\ntime.sleep(2)"])
    said = []
    suite.run(["runs"], {}, tmp_path / "out", say=said.append)
    assert said[0] == "1/1 runs" and "run 2/5, about 2 min left" in said[1]
    line = suite.in_a_line("4/7 03_weight_compression", Progress(2, 5, "measuring", 100.0, "x" * 99), 61, 80)
    assert len(line) < 80 and "run 2/5, measuring, about 2 min left" in line


def test_fresh_sets_results_aside_and_deletes_nothing(notebooks, tmp_path):
    notebooks(nothing=["pass"])
    log = tmp_path / results.LOG_NAME
    log.write_text("what was measured\n")
    suite.run(["nothing"], {}, tmp_path, fresh=True)
    assert not log.exists() or log.read_text() == ""
    (aside,) = tmp_path.glob("results-until-*.jsonl")
    assert aside.read_text() == "what was measured\n"


def test_fresh_twice_in_a_second_keeps_both_logs(tmp_path, monkeypatch):
    log = tmp_path / results.LOG_NAME
    for text in ("first\n", "second\n", "third\n", ""):
        log.write_text(text)
        suite._set_results_aside(tmp_path)
    assert sorted(aside.read_text() for aside in tmp_path.glob("results-until-*.jsonl")) == [
        "first\n",
        "second\n",
        "third\n",
    ]


# ---- the whole


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [["q1", "q4"], pytest.param([], marks=pytest.mark.long)], ids=["two", "all"])
def test_the_homework_from_one_command(names, tmp_path):
    """Notebooks on the emulated GPU, from another folder, into a folder that doesn't exist yet."""
    out = tmp_path / "deeper" / "out"
    command = [sys.executable, "-m", "helpers", "run", *names, "--device", "emulated", "--repeats", "1"]
    command += ["--output", str(out)]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(paths.ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "encryption" not in ran.stderr and "frozen modules" not in ran.stderr  # ipykernel, at every start

    records = list(Log(out / results.LOG_NAME))
    assert {record.status for record in records} == {"done"}
    assert len({record.key for record in records}) == len(records)  # a run that two questions share is made once
    if not names:
        assert len(records) == 15
    assert [record.settings.page_cache for record in records].count("cold") == 1

    again = subprocess.run([*command, "--dry-run"], cwd=paths.ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and again.stderr.startswith("0 of "), again.stderr

    for name in names or suite.NOTEBOOKS:
        notebook = nbformat.read(out / "notebooks" / suite.NOTEBOOKS[name], as_version=4)
        assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)

    tables = {path.stem: path.read_text(encoding="utf-8") for path in (out / "tables").glob("*.md")}
    assert {"q1", "q1_ratios", "q4_disk", "q4_breakdown"} <= set(tables)
    if not names:
        assert {"q2", "q2_ratios", "q3", "faster"} <= set(tables)
    for question in names or QUESTIONS:
        for name, text in tables.items():
            if name.startswith(question):
                assert "emulated" in text.lower(), name
    figures = {path.stem for path in (out / "figures").glob("*.png")}
    assert {"q1_throughput", "q1_memory", "q1_parts", "q4_breakdown"} <= figures
    if not names:
        assert {"q2", "q3"} <= figures

    report = (out / "report.md").read_text(encoding="utf-8")
    for question in names or QUESTIONS:
        assert re.search(rf"^## {question.upper()}\b", report, re.MULTILINE), question
    assert "No run of this question" not in report and "missing" not in tables["q1"].lower()
    assert (out / "report.html").stat().st_size > 10_000
