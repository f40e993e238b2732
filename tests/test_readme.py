"""README and docs are true: commands parse, links lead somewhere, messages and figures are the code's own."""

from __future__ import annotations

import re
import shlex

import pytest

from helpers import __main__ as command_line, paths
from helpers.analysis import readers
from helpers.machine.profiles import T4_COLAB
from helpers.predict.time_model import predict
from helpers.report.comparison import REFERENCE
from test_time_model import HAND_IN

DOCUMENTS = [paths.ROOT / "README.md", paths.ROOT / "CONTRIBUTING.md", *sorted((paths.ROOT / "docs").glob("*.md"))]
TEXT = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}
README, ALL = TEXT["README.md"], "\n".join(TEXT.values())
COMMANDS = re.findall(r"python -m helpers ([^`\n]*?)\s*(?:#.*)?$", README, re.MULTILINE)
MAKEFILE = (paths.ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [found for found in COMMANDS if found])
def test_every_command_is_one(command):
    options = command_line._parser().parse_args(shlex.split(command))
    assert callable(options.command)


def test_every_command_of_the_lab_is_there():
    named = {command.split()[0] for command in COMMANDS if command}
    assert named >= {"run", "measure", "place", "predict", "search", "analyze", "doctor"}


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"(?:`|^    )make (?:[A-Z]+=\S+ )*([a-z-]+)\b", ALL, re.MULTILINE)))
)
def test_every_make_target_is_one(target):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT[document.name])
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_every_picture_has_alternative_text():
    pictures = re.findall(r"!\[([^\]]*)\]\(", ALL)
    assert pictures and all(pictures)


def test_the_readme_stays_short():
    assert len(README.split()) <= 1000


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", TEXT["faults.md"]))))
def test_every_test_file_named_is_there(name):
    assert any((paths.ROOT / "tests").rglob(f"{name}.py"))


PROBLEMS = re.findall(r"^\| (`.*?) \|", TEXT["troubleshooting.md"], re.MULTILINE)


def test_ten_problems_are_found_by_their_messages():
    assert len(PROBLEMS) >= 10


@pytest.mark.parametrize("message", [message for row in PROBLEMS for message in re.findall(r"`([^`]+)`", row)])
def test_a_message_in_troubleshooting_is_the_codes_own(message):
    if message.startswith("fatal: "):
        return  # git's
    files = [*(paths.ROOT / "helpers").rglob("*.py"), *(paths.ROOT / "notebooks").glob("*.ipynb")]
    sources = [path.read_text(encoding="utf-8") for path in files] + [MAKEFILE]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # texts that go over several lines
    for part in re.sub(r"^\[\w+\] \w+: ", "", message).split("..."):
        assert part.strip(" :;") in code


def test_the_error_of_predicted_memory_is_as_stated():
    stated = float(re.search(r"Peak GPU memory is within\s+([\d.]+) %", TEXT["predictions.md"])[1])
    peaks = {run.run_id: run.peak_gpu_mem_gib for run in readers.read(REFERENCE) if run.peak_gpu_mem_gib}
    predicted = {name: predict(HAND_IN[name][0], T4_COLAB).peak_gpu_mem_gib for name in peaks}
    worst = max(abs(predicted[name] / peak - 1) for name, peak in peaks.items())
    assert stated - 0.1 <= 100 * worst <= stated
    assert len(peaks) == 9


def test_the_figures_of_two_machines_are_the_references_own():
    h200 = {run.run_id: run for run in readers.read(paths.ROOT / "outputs/reference/h200/results.jsonl")}
    t4 = {run.run_id: run for run in readers.read(REFERENCE)}
    section = TEXT["machines.md"]
    lines = re.findall(r"^\| \(\d\).*", section, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(rows) == 5
    for number, (_, achieved, *figures) in enumerate(rows, 1):
        row_id = f"q1-{number}"
        assert achieved.replace("100 %", "100.0 %") == str(h200[row_id].placement) == str(t4[row_id].placement)
        speeds = [t4[row_id].total_throughput_tok_s, h200[row_id].total_throughput_tok_s]
        peaks = [t4[row_id].peak_gpu_mem_gib, h200[row_id].peak_gpu_mem_gib]
        assert figures == [f"{speed:#.3g}".rstrip(".") for speed in speeds] + [f"{peak:.3f}" for peak in peaks]
    cold = next(run.total_throughput_tok_s for run in h200.values() if run.page_cache == "cold")
    assert f"all weights on disk give {cold:.2f} token/s" in section
