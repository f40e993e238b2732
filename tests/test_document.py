"""The report: every question of the hand-in answered, in one page that needs no network and no other file."""

from __future__ import annotations

import re

import pytest

from factories import T4, make_record
from helpers.errors import Refused
from helpers.report import document, tables
from helpers.results import Log
from helpers.settings import OffloadSplit


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, document.analyze(tables.REFERENCE, folder)


def test_all_that_was_promised_is_written(handed_in):
    folder, written = handed_in
    assert all(path.is_file() and path.stat().st_size for path in written)
    names = {str(path.relative_to(folder)) for path in written}
    assert {"report.md", "report.html", "tables/q1.csv", "tables/q1.md", "figures/q1_throughput.png"} <= names
    assert {path for path in folder.rglob("*") if path.is_file()} == set(written)


def test_every_table_and_question_is_answered_in_order(handed_in):
    text = (handed_in[0] / "report.md").read_text(encoding="utf-8")
    in_order = [
        "## Q1",
        "**(a) No.",
        "**(b) Disk",
        "## Q2",
        "**Ratios:",
        "**Unlimited batch?",
        "## Q3",
        "**(a) Compression",
        "**(b) Weights",
        "## Q4",
        "Part 1",
        "Part 2 (a)",
        "Part 2 (b)",
    ]
    places = [text.index(words) for words in in_order]
    assert places == sorted(places)
    for figure in (
        "2.28",
        "35.51",
        "1.15",
        "1.97",
        "4.01",
        "4.00",
        "0.37x",
        "4.67x",
        "0.0054",
        "33.51",
        "6,700×",
        "class A",
    ):
        assert figure in text
    assert "quoted" in text and not re.search(r"\b(nan|None|np\.float64)\b", text)


def test_the_page_opens_offline(handed_in):
    page = (handed_in[0] / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|@import|url\(|<script", page)
    images = re.findall(r"<img [^>]*>", page)
    assert len(images) == 6 and all(re.search(r'alt="[^"]{20,}"', image) for image in images)
    assert page.count("<table>") == 9  # the reference is not put beside itself


def test_plots_named_in_the_markdown_are_there(handed_in):
    folder, _ = handed_in
    for name in re.findall(r"\]\((figures/[^)]*)\)", (folder / "report.md").read_text(encoding="utf-8")):
        assert (folder / name).is_file()


def test_a_question_of_which_only_a_shared_run_is_there_is_a_sentence(tmp_path):
    shared = make_record()
    own = make_record(settings={"debug_mode": "breakdown"})
    log = Log(tmp_path / "results.jsonl")
    log.append(shared)
    log.append(own)
    document.analyze(log.path, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for question in ("q1", "q2", "q3"):
        assert f"other questions share are in the figures (100 % disk): `python -m helpers run {question}`" in text
    assert "(a) Within a class" not in text and "Part 2" in text


def test_a_log_gives_machine_versions_and_commands(tmp_path):
    log = Log(tmp_path / "results.jsonl")
    log.append(make_record("50 50 100 0 100 0", notes=("a <b>note</b>",)))
    document.analyze(log.path, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    for words in ("Tesla T4", "14.6 GiB", "torch 2.11", "python ...", "measured on CUDA", "Missing"):
        assert words in text
    assert "<b>" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_what_a_person_says_of_the_machine_is_put_in(tmp_path):
    document.write(T4, tmp_path, machine_text="A laptop under a desk.")
    assert "A laptop under a desk." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_one_row_is_enough_and_other_questions_say_there_is_nothing(tmp_path):
    document.write([p for p in T4 if p.run_id == "q2-b1"], tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.count("No run of this question") == 3


def test_runs_that_are_not_the_homeworks_are_listed(tmp_path):
    (tmp_path / "f.csv").write_text(
        "model,percent,gpu_batch_size,prompt_len,gen_len,total_throughput_tok_s,status,reason\n"
        "opt-6.7b,20 80 100 0 100 0,4,256,32,5.5,,\nopt-6.7b,30 70 100 0 100 0,4,256,32,,failed,oom <script>|\n"
    )
    document.analyze(tmp_path / "f.csv", tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "none of the homework's runs" in text and "5.500" in text and "failed: oom" in text
    assert "<script" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_file_that_is_refused_writes_nothing(tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(Refused):
        document.analyze(tmp_path / "bad.csv", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_runs_stand_apart_and_are_called_by_what_they_are(tmp_path):
    measured = [p.model_copy(update={"kind": "measured on CUDA"}) for p in T4]
    split = OffloadSplit.parse("20 80 100 0 100 0")
    other = measured[0].model_copy(
        update={"run_id": "0123456789ab", "settings": measured[0].settings.replace(split=split)}
    )
    document.write([*measured, other], tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "20 % GPU + 80 % CPU, batch 4" in text.split("### Not the homework's")[1]
    assert "0123456789ab" not in text and "Beside the Colab T4" in text


def test_the_reference_is_not_put_beside_itself(handed_in):
    assert "Beside the Colab T4" not in (handed_in[0] / "report.md").read_text(encoding="utf-8")
