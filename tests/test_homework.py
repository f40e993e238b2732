"""The homework: eleven runs and a cold one, in the order of the tables, each with FlexGen's command line."""

from __future__ import annotations

import pytest

from helpers import homework
from helpers.errors import Refused
from helpers.homework import QUESTIONS

DEVICES = ("cuda", "emulated")


def whole(device, **options):
    """All runs, by row id; a row of two questions once."""
    return {name: run for question in QUESTIONS for name, run in homework.plan(question, device, **options).items()}


def command(settings):
    arguments = settings.flexgen_arguments()
    return " ".join(arguments[arguments.index("--percent") :])


@pytest.mark.parametrize("device", DEVICES)
def test_the_homework_is_eleven_runs_and_a_cold_one(device):
    runs = whole(device)
    assert len({run.key for run in runs.values()}) == len(runs) == 12
    cold = {name for name, run in runs.items() if run.page_cache == "cold"}
    assert cold == {"q4-disk-cold"}


def test_the_command_lines_are_the_hand_ins():
    base = "--percent {1} 100 0 100 0 --gpu-batch-size {0} --num-gpu-batches 1 --prompt-len 128 --gen-len 16"
    assert {name: command(run) for name, run in whole("cuda").items()} == {
        "q1-1": base.format(4, "100 0"),
        "q1-2": base.format(4, "50 50"),
        "q1-3": base.format(4, "50 0"),
        "q1-4": base.format(4, "0 50"),
        "q1-5": base.format(4, "0 0"),
        "q2-b1": base.format(1, "0 0"),
        "q2-b16": base.format(16, "0 0"),
        "q3-gpu-4bit": base.format(4, "100 0") + " --compress-weight",
        "q3-disk-4bit": base.format(4, "0 0") + " --compress-weight",
        "q4-disk-cold": base.format(4, "0 0"),
        "q4-breakdown-gpu": base.format(4, "100 0") + " --debug-mode breakdown",
        "q4-breakdown-disk": base.format(4, "0 0") + " --debug-mode breakdown",
    }
    assert all("--model facebook/opt-1.3b " in " ".join(run.flexgen_arguments()) for run in whole("cuda").values())


def test_the_rows_stand_in_the_order_of_the_tables():
    assert [list(homework.plan(question, "cuda")) for question in QUESTIONS] == [
        ["q1-1", "q1-2", "q1-3", "q1-4", "q1-5"],
        ["q2-b1", "q1-5", "q2-b16"],
        ["q1-1", "q3-gpu-4bit", "q1-5", "q3-disk-4bit"],
        ["q1-5", "q4-disk-cold", "q4-breakdown-gpu", "q4-breakdown-disk"],
    ]


def test_a_row_of_two_questions_is_the_same_run():
    assert homework.plan("q1", "cuda")["q1-5"] == homework.plan("q2", "cuda")["q1-5"]


def test_only_the_cold_row_is_cold_unless_all_are():
    runs = whole("cuda", page_cache="cold")
    assert {run.page_cache for run in runs.values()} == {"cold"}
    assert runs["q1-5"] == runs["q4-disk-cold"]


def test_another_model_is_taken_for_every_row():
    assert {run.model for run in whole("emulated", model="facebook/OPT-125M").values()} == {"opt-125m"}


@pytest.mark.parametrize("question", ["q5", "", "Q1", "machine"])
def test_a_question_there_is_none_of_is_refused_with_the_choices(question):
    with pytest.raises(Refused, match="q1, q2, q3, q4"):
        homework.plan(question, "cuda")


def test_other_values_are_more_rows_and_the_homeworks_keep_their_names():
    sweep = homework.offload_sweep({"(1)": "100 0 100 0 100 0", "(6)": "20 80 100 0 100 0"})
    assert sweep[0] == QUESTIONS["q1"][0] and sweep[1].label == "20 % GPU + 80 % CPU"
    assert [row.id for row in homework.batch_size([1, 2, 4, 16])] == ["q2-b1", "q2-b2", "q1-5", "q2-b16"]
    assert homework.weight_compression({"α": homework.GPU, "β": homework.DISK}) == QUESTIONS["q3"]
    assert homework.disk_io({"GPU": homework.GPU, "disk": homework.DISK}) == QUESTIONS["q4"]
    runs = homework.plan(sweep, "emulated", prompt_len=64, gen_len=9)
    assert {(run.workload.prompt_len, run.workload.gen_len) for run in runs.values()} == {(64, 9)}


@pytest.mark.parametrize(
    "make, value, named",
    [
        (homework.offload_sweep, {"(6)": "60 60 100 0 100 0"}, "(6)"),
        (homework.offload_sweep, {"a": homework.GPU, "b": homework.GPU}, "twice"),
        (homework.offload_sweep, {"(6)": 60}, "(6)"),
        (homework.offload_sweep, ["60"], "splits"),
        (homework.batch_size, [1, "four"], "'four'"),
        (homework.batch_size, "1, 4", "batches"),
        (homework.batch_size, 4, "batches 4"),
        (homework.weight_compression, {}, "scenarios"),
        (lambda gen_len: homework.plan("q1", "emulated", gen_len=gen_len), "9", "gen_len='9'"),
        (lambda page_cache: homework.plan("q1", "emulated", page_cache=page_cache), "hot", "page_cache='hot'"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_names_it(make, value, named):
    with pytest.raises(Refused) as refused:
        make(value)
    assert named in str(refused.value) and "\n" not in str(refused.value)
