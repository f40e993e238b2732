"""The README says what is so: its commands parse, its links lead somewhere, its messages and figures are the code's."""

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

README = (paths.ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"python -m helpers ([^`\n]*?)\s*(?:#.*)?$", README, re.MULTILINE)
MAKEFILE = (paths.ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [found for found in COMMANDS if found])
def test_every_command_is_one(command):
    options = command_line._parser().parse_args(shlex.split(command))
    assert callable(options.command)


def test_every_command_of_the_laboratory_is_there():
    named = {command.split()[0] for command in COMMANDS if command}
    assert named >= {"run", "measure", "place", "predict", "search", "analyze", "doctor"}


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake (?:[A-Z]+=\S+ )*([a-z-]+)\b(?! of)", README))))
def test_every_make_target_is_one(target):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_every_link_leads_to_a_file(path):
    assert (paths.ROOT / path).exists()


def test_every_picture_has_alternative_text():
    pictures = re.findall(r"!\[([^\]]*)\]\(", README)
    assert pictures and all(pictures)


def troubleshooting():
    section = README.split("## Troubleshooting")[1].split("\n## ")[0]
    return [
        message
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
    ]


def test_ten_problems_are_told_by_their_messages():
    section = README.split("## Troubleshooting")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| `", section, re.MULTILINE)) >= 10


@pytest.mark.parametrize("message", troubleshooting())
def test_a_message_of_the_troubleshooting_is_the_codes_own(message):
    if message.startswith("fatal: "):
        return  # git's
    sources = [path.read_text(encoding="utf-8") for path in (paths.ROOT / "helpers").rglob("*.py")] + [MAKEFILE]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # texts that go over several lines
    for part in re.sub(r"^\[\w+\] \w+: ", "", message).split("..."):
        assert part.strip(" :") in code


def test_the_error_of_the_predicted_memory_is_as_said():
    said = float(re.search(r"Peak GPU memory is within\s+([\d.]+) %", README)[1])
    peaks = {point.run_id: point.peak_gpu_mem_gib for point in readers.read(REFERENCE) if point.peak_gpu_mem_gib}
    predicted = {name: predict(HAND_IN[name][0], T4_COLAB).peak_gpu_mem_gib for name in peaks}
    worst = max(abs(predicted[name] / peak - 1) for name, peak in peaks.items())
    assert said - 0.1 <= 100 * worst <= said
    assert len(peaks) == 9


def test_the_figures_of_two_machines_are_the_references_own():
    h200 = {point.run_id: point for point in readers.read(paths.ROOT / "outputs/reference/h200/results.jsonl")}
    t4 = {point.run_id: point for point in readers.read(REFERENCE)}
    section = README.split("## The same homework on two machines")[1].split("\n## ")[0]
    lines = re.findall(r"^\| \(\d\).*", section, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(rows) == 5
    for number, (_, achieved, *figures) in enumerate(rows, 1):
        row_id = f"q1-{number}"
        assert achieved.replace("100 %", "100.0 %") == str(h200[row_id].placement) == str(t4[row_id].placement)
        speeds = [t4[row_id].total_throughput_tok_s, h200[row_id].total_throughput_tok_s]
        peaks = [t4[row_id].peak_gpu_mem_gib, h200[row_id].peak_gpu_mem_gib]
        assert figures == [f"{speed:#.3g}".rstrip(".") for speed in speeds] + [f"{peak:.3f}" for peak in peaks]
    cold = next(point.total_throughput_tok_s for point in h200.values() if point.page_cache == "cold")
    assert f"all weights on disk give {cold:.2f} token/s" in section
