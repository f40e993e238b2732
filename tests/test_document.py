"""The report: every question of the hand-in answered, in one page that needs no network and no other file."""

from __future__ import annotations

import re
import shutil

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from factories import MACHINE, T4, disk_series, make_record, variant
from helpers import paths
from helpers.errors import Refused
from helpers.machine.ceilings import MachineCeilings
from helpers.report import comparison, document
from helpers.results import Log, Samples
from helpers.runs import from_record

H200 = paths.ROOT / "outputs" / "reference" / "h200"


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, document.analyze([comparison.REFERENCE], folder)


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
        "0.37",
        "4.67",
        "0.0054",
        "33.51",
        "6,700",
        "Class A",
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


def test_a_question_with_nothing_but_a_shared_run_says_how_to_run_it(tmp_path):
    log = Log(tmp_path / "results.jsonl")
    log.append(make_record())
    log.append(make_record(settings={"debug_mode": "breakdown"}))
    document.analyze([log.path], tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for question in ("q1", "q2", "q3"):
        assert "other questions share are in the figures" in text and f"`python -m helpers run {question}`" in text
    assert "`python -m helpers run q4`" not in text


def test_the_first_and_the_last_split_are_enough_for_question_1(tmp_path):
    document.write([T4[0], T4[4]], tmp_path)
    section = (tmp_path / "report.md").read_text(encoding="utf-8").split("## Q1")[1].split("## Q2")[0]
    assert "65.771" in section and "0.357" in section


def test_the_environment_opens_the_report(tmp_path):
    log = Log(tmp_path / "results.jsonl")
    log.append(make_record("50 50 100 0 100 0", notes=("a <b>note</b>",), samples=Samples(disk=disk_series())))
    document.analyze([log.path], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    block = text.split("## Q1")[0]
    for words in ("Tesla T4", "14.6 GiB", "12.7 GiB", "sda", "2.11", "2026-01-01", "measured on CUDA", "opt-mini"):
        assert words in block
    assert text.count("Tesla T4") == 2  # there, and in the folded list of machines
    assert "python ..." in text and "<b>" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_machine_notebooks_disk_rate_is_in_the_block(tmp_path):
    kept = MachineCeilings.model_validate_json((H200 / "machine.json").read_text(encoding="utf-8"))
    for machine, words in ((MACHINE, "1.60 GB/s sequential"), (kept.machine, "not measured")):
        (tmp_path / "machine.json").write_text(kept.model_copy(update={"machine": machine}).model_dump_json())
        document.write([from_record("x", make_record())], tmp_path)
        assert words in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_someone_elses_machine_is_described_next_to_their_figures(handed_in, tmp_path):
    assert "- GPU: NVIDIA Tesla T4, 14,912 MB" in (handed_in[0] / "report.md").read_text(encoding="utf-8")
    shutil.copy(comparison.REFERENCE, tmp_path / "mine.csv")
    (tmp_path / "mine.json").write_text('{"GPU": 7}')
    with pytest.raises(Refused, match=r"mine\.json"):
        document.analyze([tmp_path / "mine.csv"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_row_is_enough_and_other_questions_say_there_is_nothing(tmp_path):
    document.write([p for p in T4 if p.run_id == "q2-b1"], tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.count("No run of this question") == 3


def test_runs_with_other_options_have_rows_and_reasons(tmp_path):
    (tmp_path / "f.csv").write_text(
        "model,percent,gpu_batch_size,prompt_len,gen_len,total_throughput_tok_s,status,reason\n"
        "opt-6.7b,20 80 100 0 100 0,4,256,32,5.5,,\nopt-6.7b,30 70 100 0 100 0,4,256,32,,failed,oom <script>|\n"
    )
    document.analyze([tmp_path / "f.csv"], tmp_path)
    section = (tmp_path / "report.md").read_text(encoding="utf-8").split("## Q1")[1].split("## Q2")[0]
    assert "5.500" in section and "failed: oom" in section
    assert "<script" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_file_that_is_refused_writes_nothing(tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(Refused):
        document.analyze([tmp_path / "bad.csv"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_runs_are_called_by_their_settings_not_by_their_key(tmp_path):
    measured = [p.model_copy(update={"kind": "measured on CUDA"}) for p in T4]
    other = variant(measured[0], "0123456789ab", percent="20 80 100 0 100 0")
    document.write([*measured, other], tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "20 % GPU + 80 % CPU, batch 4" in text and "0123456789ab" not in text


def test_left_out_runs_are_named_with_a_reason(tmp_path):
    document.write([*T4, variant(T4[0], "longer", prompt_len=512)], tmp_path)
    top = (tmp_path / "report.md").read_text(encoding="utf-8").split("## Q1")[0]
    assert "longer" in top and "512" in top


TEXT = st.text(max_size=40) | st.sampled_from(
    ["![x](http://host/y.png)", "a\n# heading", "</details>", "<details>", "a | b", "`", "<img src=http://host>", "$x$"]
)


@settings(
    max_examples=15, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=TEXT, reason=TEXT, note=TEXT, version=TEXT, command=TEXT)
def test_text_from_records_is_only_text(tmp_path, name, reason, note, version, command):
    machine = MACHINE.model_copy(update={"name": name, "cpu": name, "platform": name})
    record = make_record(machine=machine, notes=(note,), versions={"torch": version, name: name}, command=command)
    run = from_record(name, record)
    failed = variant(run, name, percent="100 0 100 0 100 0", status="failed", reason=reason)
    document.write([run, failed], tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<(?:a|script|iframe|link)\b|<img src=\"(?!data:image/png;base64,)", page)
    assert page.count("<h2>") == 7 and page.count("<h1>") == 1 and page.count("<details>") == page.count("</details>")


def test_the_reference_is_not_compared_with_itself(handed_in):
    assert "Next to the Colab T4" not in (handed_in[0] / "report.md").read_text(encoding="utf-8")
