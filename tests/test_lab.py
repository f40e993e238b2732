"""The lab: what is known is not run again, what cannot run is refused first, what fails is a row."""

from __future__ import annotations

import os
import threading
import warnings

import pytest

from factories import MACHINE, at_phase, done, mini, quiet, run_one, save_config, workers
from helpers import home, lab, paths, results
from helpers.engine import launcher
from helpers.errors import Refused
from helpers.models import EMULATED_MODEL
from helpers.results import Log
from helpers.settings import Workload
from helpers.weights import store


@pytest.fixture
def no_run(monkeypatch):
    """Whatever happens, no process of a run is started."""

    def started(*arguments, **options):
        raise AssertionError("a run was started")

    monkeypatch.setattr(launcher, "run", started)


def log_of(folder):
    return list(Log(folder / results.LOG_NAME))


# ---- what is known


def test_what_is_known_is_not_run_again(tmp_path, monkeypatch):
    settings = {"a": mini(), "b": mini("50 50 100 0 100 0")}
    first = lab.run(settings, tmp_path, say=quiet)
    monkeypatch.setattr(launcher, "run", None)
    again = lab.run({"x": settings["b"], "y": settings["a"]}, tmp_path, say=quiet)
    assert list(again.records) == ["x", "y"]
    assert (again.records["x"], again.records["y"]) == (first.records["b"], first.records["a"])
    assert len(log_of(tmp_path)) == 2


def test_fresh_runs_are_measured_again_and_the_last_one_counts(tmp_path, monkeypatch):
    first, second = run_one(mini(), tmp_path), run_one(mini(), tmp_path, fresh=True)
    assert first != second and log_of(tmp_path) == [first, second]
    monkeypatch.setattr(launcher, "run", None)
    assert run_one(mini(), tmp_path) == second


def test_equal_settings_are_run_once_under_both_names(tmp_path):
    sweep = lab.run({"a": mini(), "b": mini()}, tmp_path, say=quiet)
    assert sweep.records["a"] == sweep.records["b"] and len(log_of(tmp_path)) == 1


def test_a_result_of_another_machine_or_method_is_not_known(monkeypatch):
    here = lab.describe_machine("emulated")
    key = lab.run_key(mini(), here)
    assert key == lab.run_key(mini(), here)
    assert key != lab.run_key(mini("50 50 100 0 100 0"), here)
    given_anew = here.model_copy(update={"platform": "another kernel", "ram_gib": here.ram_gib + 0.001})
    assert key == lab.run_key(mini(), given_anew)
    assert key != lab.run_key(mini(), MACHINE)
    slower = lab.EMULATED_T4.model_copy(update={"disk_gb_s": 0.5 * lab.EMULATED_T4.disk_gb_s})
    with monkeypatch.context() as patched:
        patched.setattr(lab, "EMULATED_T4", slower)
        assert key != lab.run_key(mini(), here)
    monkeypatch.setattr(lab, "METHOD_VERSION", lab.METHOD_VERSION + 1)
    assert key != lab.run_key(mini(), here)


def test_another_model_in_the_same_folder_is_not_known(tmp_path):
    keys = []
    for hidden_size in (64, 128):
        save_config(tmp_path, hidden_size)
        keys.append(lab.run_key(mini(model=str(tmp_path)), lab.describe_machine("emulated")))
    assert keys[0] != keys[1]


def test_a_record_of_other_settings_is_not_known_whatever_its_key(tmp_path):
    asked, other = mini(), mini("50 50 100 0 100 0")
    record = run_one(other, tmp_path)
    (tmp_path / results.LOG_NAME).unlink()
    Log(tmp_path / results.LOG_NAME).append(record.model_copy(update={"key": lab.run_key(asked, record.machine)}))
    assert lab.without_figures({"asked": asked}, tmp_path) == ["asked"]
    assert run_one(asked, tmp_path).settings == asked


def test_what_a_killed_run_left_goes_when_all_is_known_too(tmp_path):
    run_one(mini(), tmp_path, offload_root=tmp_path / "offload")
    left = tmp_path / "offload" / f"run-999999999-1-{home.whereabouts()}-x"
    left.mkdir(parents=True)
    run_one(mini(), tmp_path, offload_root=tmp_path / "offload")
    assert not left.exists() and len(log_of(tmp_path)) == 1


def test_a_line_cut_off_by_a_crash_costs_that_run_only(tmp_path):
    settings = {"a": mini(), "b": mini("50 50 100 0 100 0")}
    first = lab.run(settings, tmp_path, say=quiet)
    log = tmp_path / results.LOG_NAME
    os.truncate(log, log.stat().st_size - 100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = lab.run(settings, tmp_path, say=quiet)
        assert again.records["a"] == first.records["a"] and done(again.records["b"])
        assert [record.key for record in log_of(tmp_path)] == [again.records[name].key for name in ("a", "b")]


# ---- what a record says


def test_a_record_says_what_it_is(tmp_path):
    record = done(run_one(mini("50 50 100 0 100 0"), tmp_path))
    assert record.kind == "measured on the emulated GPU" and record.machine.name.startswith("emulated")
    assert record.command == record.settings.flexgen_command
    assert {"python", "flexgen", "torch", "numpy"} <= set(record.versions)
    assert record.weights.startswith("synthetic") and record.prompt
    assert record.phases_s["measured"] > 0 and record.duration_s > sum(record.repeats[0].pass_latencies_s)
    assert log_of(tmp_path) == [record]


def test_a_breakdown_has_flexgens_timers_and_no_tokens(tmp_path):
    record = done(run_one(mini(debug_mode="breakdown", workload=Workload(prompt_len=16, gen_len=8)), tmp_path))
    timers = record.repeats[0].timers_s
    assert set(timers) == {"load_weight"} | {
        f"{what}_{stage}"
        for what in ("load_cache", "store_cache", "compute_layer")
        for stage in ("prefill", "decoding")
    }
    assert len(timers["compute_layer_decoding"]) == 20  # FlexGen stops after 20 layer-steps
    assert record.projected and record.generated_tokens == ()
    assert len(record.repeats[0].pass_latencies_s) == 8


def test_a_run_needs_no_network(tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers there
    done(run_one(mini(), tmp_path))


# ---- refused first


@pytest.mark.parametrize("output", ["/proc/nowhere", "a file/below it", "a file"])
def test_an_unwritable_output_folder_is_refused_first(output, tmp_path, no_run):
    (tmp_path / "a file").write_text("")
    with pytest.raises(Refused) as refused:
        lab.run(mini(), tmp_path / output, say=quiet)
    assert output in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("percent", ["0 0 100 0 100 0", "100 0 50 40 100 0", "100 0 100 0 0 0"])
def test_memory_is_not_taken_for_a_disk(percent, tmp_path, no_run, folder_in_memory):
    with pytest.raises(Refused, match=f"{folder_in_memory}.*tmpfs"):
        run_one(mini(percent), tmp_path, offload_root=folder_in_memory)
    assert log_of(tmp_path) == []


def test_a_result_with_more_repeats_answers_for_fewer(tmp_path):
    three = run_one(mini().model_copy(update={"repeats": 3}), tmp_path)
    assert run_one(mini().model_copy(update={"repeats": 1}), tmp_path) == three
    assert run_one(mini().model_copy(update={"repeats": 4}), tmp_path) != three


def test_two_threads_do_not_measure_at_once(tmp_path, monkeypatch):
    refused = []

    def from_another_thread():
        try:
            lab.run(mini("50 50 100 0 100 0"), tmp_path / "other", say=quiet)
        except Refused as error:
            refused.append(error)

    def start_another():
        thread = threading.Thread(target=from_another_thread)
        thread.start()
        thread.join()

    at_phase(monkeypatch, "measured", start_another)
    done(run_one(mini(), tmp_path))
    assert len(refused) == 1 and "another thread" in str(refused[0])


def test_what_needs_no_disk_runs_wherever(tmp_path, folder_in_memory):
    done(run_one(mini("50 50 100 0 100 0"), tmp_path, offload_root=folder_in_memory))
    assert os.listdir(folder_in_memory) == []


GIB = 2**30
WEIGHTS_GIB = EMULATED_MODEL.weight_bytes / GIB


@pytest.mark.parametrize(
    "percent, options, gpu_mem_gib, fits",
    [
        ("100 0 100 0 100 0", {}, WEIGHTS_GIB * 0.9, False),
        ("100 0 100 0 100 0", {}, WEIGHTS_GIB * 5, True),
        ("0 100 100 0 100 0", {}, WEIGHTS_GIB * 0.9, True),
        ("0 100 100 0 100 0", {"workload": Workload(gpu_batch_size=512, prompt_len=100, gen_len=4)}, 0.3, False),
        ("0 100 0 100 100 0", {"workload": Workload(gpu_batch_size=512, prompt_len=100, gen_len=4)}, 0.3, True),
    ],
)
def test_a_gpu_too_small_for_weights_and_cache_is_refused_first(
    percent, options, gpu_mem_gib, fits, tmp_path, monkeypatch
):
    small = MACHINE.model_copy(update={"name": "a small GPU", "gpu_mem_gib": gpu_mem_gib})
    monkeypatch.setattr(lab, "describe_machine", lambda device: small)
    started = []

    def start(*arguments, **more):
        started.append(arguments)
        return launcher.Outcome.now()

    monkeypatch.setattr(launcher, "run", start)
    record = run_one(mini(percent, **options), tmp_path)
    assert bool(started) == fits
    if not fits:
        assert record.failure.kind == "refused"
        assert "a small GPU" in record.failure.message and "smaller batch" in record.failure.message


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(lab.gpus, "cuda_available", lambda: False)
    with pytest.raises(Refused, match="cuda"):
        lab.choose_device("cuda")
    assert lab.choose_device("auto") == lab.choose_device("emulated") == "emulated"
    with pytest.raises(Refused, match="'tpu'"):
        lab.choose_device("tpu")


# ---- a failure is a row


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    at_phase(monkeypatch, "weights", lambda: [process.kill() for process in workers()], occurrence=2)
    said = []
    settings = {"a": mini(), "b": mini("50 50 100 0 100 0"), "c": mini("0 100 100 0 100 0")}
    sweep = lab.run(settings, tmp_path, say=said.append)
    assert [record.status for record in sweep.records.values()] == ["done", "failed", "done"]
    assert list(sweep.failed) == ["b"] and any("killed" in text for text in said)
    assert lab.without_figures(settings, tmp_path) == ["b"]
    again = lab.run(settings, tmp_path, say=quiet)  # goes on: only what has no figures is run
    assert not again.failed and len(log_of(tmp_path)) == 4
    assert lab.without_figures(settings, tmp_path) == []


@pytest.mark.parametrize(
    "error, kind",
    [
        (Refused("model x: why"), "refused"),
        (OSError(28, "No space left on device"), "disk_full"),
        (MemoryError(), "host_oom"),
        (RuntimeError("first line\nsecond line"), "error"),
        (KeyError("name"), "error"),
    ],
)
def test_whatever_goes_wrong_before_a_run_is_its_record(error, kind, tmp_path, monkeypatch, no_run):
    def prepare(*arguments):
        raise error

    monkeypatch.setattr(store, "prepare", prepare)
    record = run_one(mini(), tmp_path)
    assert record.status == "failed" and record.failure.kind == kind
    assert record.failure.message and "\n" not in record.failure.message
    assert log_of(tmp_path) == [record]


def test_an_error_between_two_repeats_keeps_the_first(tmp_path, monkeypatch):
    measure, calls = launcher._measure_once, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        measure(*arguments)

    monkeypatch.setattr(launcher, "_measure_once", once)
    record = run_one(mini(repeats=3), tmp_path)
    assert record.failure.kind == "disk_full" and len(record.repeats) == 1


def test_from_any_folder_the_default_output_is_the_projects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.DEFAULT_OUTPUT == paths.ROOT / "outputs" and (paths.ROOT / "helpers" / "lab.py").is_file()
    done(run_one(mini(), tmp_path / "out"))
