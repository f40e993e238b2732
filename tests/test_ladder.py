"""Notebook 06's ladder: what is measured or predicted, what bounds it, and whether tokens stay the same."""

from __future__ import annotations

import pytest

from factories import make_record
from helpers import forecast, homework, ladder
from helpers.errors import Refused
from helpers.machine import limits
from helpers.machine.profiles import T4_COLAB
from helpers.placement import place
from helpers.results import Sweep
from helpers.units import GIB

RUNS = homework.plan("faster", "cuda", repeats=1)


def free(monkeypatch, gib):
    allowance = limits.MemoryAllowance(*2 * (int(gib * GIB),), "RAM", "RAM")
    monkeypatch.setattr(limits, "memory_allowance", lambda: allowance)


def measured(tokens_by_rung, runs=RUNS):
    """A sweep of records with these tokens; a rung that isn't named has none."""
    records = {}
    for name, tokens in tokens_by_rung.items():
        record = make_record(kind="measured on CUDA")
        records[name] = record.model_copy(update={"settings": runs[name], "generated_tokens": tokens})
    return Sweep(records)


def test_as_much_goes_to_the_cpu_as_fits_and_the_rest_is_read_directly(monkeypatch):
    free(monkeypatch, 20)
    roomy = ladder.plan(RUNS, None)
    assert roomy["faster-cpu"].split.weights_cpu == 100 and roomy["faster-cpu"].disk_reader == "stock"
    free(monkeypatch, 9)
    large = homework.plan("faster", "cuda", model="opt-6.7b")
    tight = ladder.plan(large, None)["faster-cpu"]
    assert 0 < tight.split.weights_cpu < 100 and tight.disk_reader == "direct"
    assert place(tight.opt_model, 0, tight.split.weights_cpu, False).bytes_by_tier["cpu"] < 7 * GIB


def test_the_last_rung_is_what_search_finds_for_this_machine(monkeypatch):
    free(monkeypatch, 12)
    rungs = ladder.plan(RUNS, T4_COLAB)
    assert list(rungs)[-1] == "faster-search" and rungs["faster-search"].repeats == 1
    assert "faster-search" not in ladder.plan(RUNS, None)


def test_a_rung_that_takes_too_long_is_only_predicted(monkeypatch, tmp_path):
    seconds = {"faster-stock": 400.0, "faster-fit": 20.0}

    class Forecast:
        def __init__(self, seconds):
            self.seconds = seconds

    monkeypatch.setattr(forecast, "of", lambda runs, output: Forecast(seconds.get(*runs)))
    worth = ladder.worth_measuring(RUNS, tmp_path, 300)
    assert list(worth) == [name for name in RUNS if name != "faster-stock"]
    rungs = ladder.compared(RUNS, measured({"faster-fit": ((1, 2),)}), T4_COLAB)
    assert rungs[0].kind == "predicted" and rungs[0].throughput_tok_s == rungs[0].predicted.total_throughput_tok_s
    assert rungs[1].kind == "measured on CUDA"
    assert "Can't tell" in ladder.verdict(rungs)


def test_the_emulated_gpu_runs_what_its_pacing_can_show(tmp_path):
    runs = homework.plan("faster", "emulated")
    found = runs | {"faster-search": runs["faster-b16"]}
    worth = ladder.worth_measuring(found, tmp_path, 1e9)
    assert list(worth) == ["faster-stock", "faster-4bit", "faster-cpu", "faster-b16"]


@pytest.mark.parametrize("wrong", [0, -1, "300", None])
def test_a_wrong_limit_is_refused_by_name(wrong, tmp_path):
    with pytest.raises(Refused, match="longest_run_s"):
        ladder.worth_measuring(RUNS, tmp_path, wrong)


def test_tokens_are_compared_with_the_first_rungs():
    sweep = measured(
        {
            "faster-stock": ((7, 8), (7, 8)),
            "faster-fit": ((7, 8), (7, 8)),
            "faster-4bit": ((7, 9), (7, 9)),
            "faster-b16": ((7, 8),) * 16,
        }
    )
    rungs = {rung.id: rung for rung in ladder.compared(RUNS, sweep, None)}
    assert [rungs[f"faster-{name}"].same_tokens for name in ("stock", "fit", "4bit", "b16", "cpu")] == [
        True,
        True,
        False,
        True,
        None,
    ]


def test_reads_of_the_disk_bound_a_rung_by_what_was_measured():
    record = measured({"faster-stock": ((1,),)}).records["faster-stock"]
    repeats = tuple(r.model_copy(update={"disk_read_bytes": 10**11}) for r in record.repeats)
    sweep = Sweep({"faster-stock": record.model_copy(update={"repeats": repeats})})
    rung = ladder.compared(RUNS, sweep, T4_COLAB)[0]
    assert rung.bound[0] == "disk"
    assert rung.bound[1] == pytest.approx(64 / (100 / T4_COLAB.disk_gb_s))


def test_table_and_plot_say_which_rungs_are_predicted():
    sweep = measured({"faster-stock": ((1,),), "faster-fit": ((1,),)})
    rungs = ladder.compared(RUNS, sweep, T4_COLAB)
    table, plot = ladder.table(rungs), ladder.plot(rungs)
    assert list(table.frame["kind"])[:3] == ["measured on CUDA", "measured on CUDA", "predicted"]
    assert "(predicted)" in plot.alt and "(measured on CUDA)" in plot.alt
    assert plot.png()


def test_peers_are_not_compared_with_the_emulated_gpu(tmp_path):
    run = homework.plan("q1", "emulated")["q1-1"]
    assert "GPU only" in ladder.peers(run, tmp_path)
