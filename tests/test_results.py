"""Records and their log: what was measured is kept as it was, whatever became of the line after it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings

import pytest
from hypothesis import given, strategies as st

from factories import disk_series, make_record, save_config
from helpers import models, paths
from helpers.analysis.readers import results_log
from helpers.errors import Refused
from helpers.results import SCHEMA_VERSION, Failure, Log, MemorySeries, Repeat, RunRecord, Samples, Sweep

FINITE = st.floats(0.001, 1e6)


def full_record():
    """A record with something in every field."""
    return make_record(
        status="failed",
        failure=Failure(kind="killed", message="why", log_tail="line\nline ü"),
        samples=Samples(
            disk=disk_series(),
            gpu=MemorySeries(what="nvml", time_s=(0.0, 0.5), used_gib=(1.0, 2.0)),
            host=MemorySeries(what="psutil", time_s=(), used_gib=()),
            notes=("a note",),
        ),
        phases_s={"start": 0.5},
        weights="synthetic",
        prompt="fixed",
        generated_tokens=((1, 2), (3, 4)),
        bytes_by_tier={"gpu": 1, "cpu": 2, "disk": 3},
        peak_gpu_reserved_gib=0.25,
        notes=("another",),
    )


def read(log):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(log)


# ---- the log


def test_what_is_appended_is_read_back_as_it_was(tmp_path):
    log = Log(tmp_path / "deeper" / "log.jsonl")
    records = [make_record(), full_record(), make_record("100 0 100 0 100 0")]
    for record in records:
        log.append(record)
    assert read(log) == records
    assert len(log.path.read_text(encoding="utf-8").splitlines()) == 3


def test_there_is_nothing_in_a_log_that_is_not_there(tmp_path):
    assert read(Log(tmp_path / "log.jsonl")) == []


@given(st.integers(1, 200))
def test_a_last_line_cut_off_anywhere_costs_nothing_else(tmp_path_factory, bytes_left):
    log = Log(tmp_path_factory.mktemp("log") / "log.jsonl")
    first, second, third = make_record(), make_record(latencies=((2.0,),)), make_record(latencies=((3.0,),))
    log.append(first)
    whole = log.path.stat().st_size
    log.append(second)
    with open(log.path, "r+b") as file:
        file.truncate(whole + bytes_left)
    with pytest.warns(UserWarning, match="line 2.*cut off while it was written"):
        assert list(log) == [first]
    log.append(third)
    with pytest.warns(UserWarning, match="line 2"):
        assert list(log) == [first, third]


@pytest.mark.parametrize("line", ["{}", "[]", "not json", '{"key": "x"}', "\udcff"])
def test_a_line_that_is_no_record_is_skipped_by_number(tmp_path, line):
    log = Log(tmp_path / "log.jsonl")
    log.append(make_record())
    with open(log.path, "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(line + "\n")
    log.append(make_record())
    with pytest.warns(UserWarning, match=r"log\.jsonl, line 2: not a record, skipped"):
        assert len(list(log)) == 2


@pytest.mark.parametrize(
    "count, more", [(2, r"\); so is line 3$"), (3, r"\); so are lines 3, 4$"), (13, r"10, 11, 12 and 2 others$")]
)
def test_many_such_lines_are_one_warning(tmp_path, count, more):
    log = Log(tmp_path / "log.jsonl")
    log.append(make_record(key="a"))
    with open(log.path, "a", encoding="utf-8") as file:
        file.write("{}\n" * count)
    for read in (lambda: list(log), log.latest):
        with pytest.warns(UserWarning, match=rf"line 2: not a record, skipped \(.*{more}") as warned:
            assert len(read()) == 1
        assert len(warned) == 1


def test_the_record_of_a_model_in_a_folder_outlives_the_folder(tmp_path):
    folder, out = tmp_path / "my-model", tmp_path / "out"
    save_config(folder)
    record = make_record(settings={"model": str(folder)}, model_shape=models.resolve(str(folder)))
    Log(out / "results.jsonl").append(record)
    (folder / "config.json").unlink()
    read = subprocess.run(  # a program that never saw the folder
        [sys.executable, "-m", "helpers", "analyze", out / "results.jsonl", "--output", out],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
    )
    assert read.returncode == 0 and "warning" not in read.stderr
    assert f",{folder}," in (out / "tables" / "all_rows.csv").read_text()


@pytest.mark.parametrize("shape", [{}, {"name": "x"}, [], {"name": "x", "num_layers": "two"}])
def test_a_damaged_shape_is_a_damaged_record(tmp_path, shape):
    log = Log(tmp_path / "log.jsonl")
    line = json.loads(make_record().model_dump_json()) | {"model_shape": shape}
    log.path.write_text(json.dumps(line) + "\n")
    with pytest.warns(UserWarning, match="line 1: not a record"):
        assert list(log) == []


@pytest.mark.parametrize(
    "field, value",
    [
        ("pass_latencies_s", []),
        ("pass_latencies_s", [0.0, 0.0]),
        ("pass_latencies_s", [-1.0]),
        ("pass_latencies_s", [1e300]),
        ("peak_gpu_mem_gib", -5.0),
        ("peak_gpu_mem_gib", 1e300),
        ("core_speed", 0.0),
        ("timers_s", {"load_weight": [-1.0]}),
    ],
)
def test_figures_that_cannot_be_are_a_damaged_record(tmp_path, field, value):
    log = Log(tmp_path / "log.jsonl")
    good = json.loads(make_record().model_dump_json())
    bad = good | {"repeats": [good["repeats"][0] | {field: value}]}
    log.path.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    with pytest.warns(UserWarning, match="line 2: not a record, skipped .*" + field):
        assert len(list(log)) == 1


def test_a_record_of_a_later_schema_is_not_read_as_this_ones(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    line = json.loads(make_record().model_dump_json()) | {"schema_version": SCHEMA_VERSION + 1}
    log.path.write_text(json.dumps(line) + "\n")
    with pytest.warns(UserWarning, match="schema_version=2: "):
        assert list(log) == []


def test_a_pipe_or_a_folder_is_no_log_and_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name, kind in (("pipe.jsonl", "a device or a pipe"), ("folder.jsonl", "a folder")):
        touches = (
            lambda path: list(Log(path)),
            lambda path: Log(path).latest(),
            paths.check_writable,
            results_log.read,
        )
        for touch in touches:
            with pytest.raises(Refused, match=f"{name}: {kind}, not a file"):
                touch(tmp_path / name)


def test_empty_lines_are_no_records_and_no_fault(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.append(make_record())
    with open(log.path, "ab") as file:
        file.write(b"\n  \n")
    log.append(make_record())
    assert len(read(log)) == 2


def test_a_record_of_a_field_that_is_not_known_is_not_guessed_at(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    text = json.loads(make_record().model_dump_json()) | {"speed": 3}
    log.path.write_text(json.dumps(text) + "\n")
    with pytest.warns(UserWarning, match="speed"):
        assert list(log) == []


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_record_that_cannot_be_kept_is_an_error_at_once():
    with pytest.raises(OSError):
        Log("/dev/full").append(make_record())


# ---- the record


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_a_figure(figure):
    with pytest.raises(Refused):
        Repeat(started_s=0.0, ended_s=1.0, pass_latencies_s=(1.0, figure), peak_gpu_mem_gib=1.0)


@given(st.lists(st.lists(FINITE, min_size=2, max_size=5), min_size=1, max_size=5))
def test_figures_are_flexgens_of_each_repeat_and_their_median(latencies):
    record = make_record(latencies=tuple(map(tuple, latencies)))
    tokens = record.settings.workload.generated_tokens
    assert sorted(record.throughputs_tok_s) == pytest.approx(sorted(tokens / sum(passes) for passes in latencies))
    assert min(record.throughputs_tok_s) <= record.total_throughput_tok_s <= max(record.throughputs_tok_s)
    for repeat, passes in zip(record.repeats, latencies):
        assert repeat.prefill_latency_s == passes[0] and repeat.decode_latency_s == pytest.approx(sum(passes[1:]))
        assert repeat.total_latency_s == pytest.approx(sum(passes))


def test_without_repeats_every_figure_is_unknown():
    record = make_record(latencies=())
    for name in (
        "total_throughput_tok_s",
        "total_latency_s",
        "prefill_latency_s",
        "decode_latency_s",
        "peak_gpu_mem_gib",
        "bytes_from_disk",
    ):
        assert getattr(record, name) is None, name


def test_the_peak_is_the_first_generations():
    """FlexGen's own command sees one generation; what later ones add to the allocator's peak is not its figure."""
    assert [repeat.peak_gpu_mem_gib for repeat in make_record().repeats] == [0.5, 1.5, 2.5]
    assert make_record().peak_gpu_mem_gib == 0.5


def repeats(*counts):
    return tuple(
        Repeat(
            started_s=0.0,
            ended_s=1.0,
            pass_latencies_s=(1.0,),
            peak_gpu_mem_gib=1.0,
            disk_read_bytes=disk,
            own_read_bytes=own,
        )
        for disk, own in counts
    )


@pytest.mark.parametrize(
    "counts, found",
    [
        (((10, 1), (30, 3), (20, 2)), 20),  # the disk's counter
        (((10, 1), (None, 3), (20, 2)), 2),  # it failed once: the process's own
        (((None, None), (None, 3)), None),  # nobody knows
        (((0, 5),), 0),  # nothing read is known, not unknown
    ],
)
def test_bytes_from_disk_are_the_first_counter_that_saw_every_repeat(counts, found):
    assert make_record(repeats=repeats(*counts)).bytes_from_disk == found


@pytest.mark.parametrize("debug_mode", [None, "breakdown", "fewer_batch"])
def test_a_debug_run_is_projected(debug_mode):
    assert make_record(settings={"debug_mode": debug_mode}).projected == (debug_mode is not None)


def test_a_record_survives_json():
    assert RunRecord.model_validate_json(full_record().model_dump_json()) == full_record()


def test_a_sweep_names_what_failed():
    failed = full_record()
    assert Sweep({"a": make_record(), "b": failed}).failed == {"b": failed}


def test_json_lists_the_samplers_notes_too():
    record = make_record(notes=("shared core",), samples=Samples(notes=("another reader",)))
    assert record.as_json()["notes"] == ["shared core", "another reader"]
