"""Points: the same figures from a record and from a CSV, matched to the homework by what they are."""

from __future__ import annotations

import json
import statistics

import pytest

from factories import disk_series, make_record
from helpers.analysis import matching, readers
from helpers.errors import Refused
from helpers.results import Failure, Log, Repeat, RunRecord, Samples
from helpers.runs import from_record


def of_folder(record, folder, shape):
    """The record as it would be read if a folder, now gone, had held this model."""
    text = json.loads(record.model_dump_json())
    text["settings"]["model"] = folder
    return RunRecord.model_validate_json(json.dumps(text), context={"model_shape": shape})


# ---- records


def test_a_record_gives_medians_with_the_range_of_its_repeats():
    point = from_record("a", make_record())
    assert point.wall_time_s == 2.0
    assert point.wall_time_s_range == pytest.approx((1.8, 2.2))
    assert point.total_throughput_tok_s == pytest.approx(32 / 2.0)
    assert point.total_throughput_tok_s_range == pytest.approx((32 / 2.2, 32 / 1.8))
    assert (point.repeats, point.prefill_latency_s, point.decode_latency_s) == (3, 1.0, 1.0)
    assert point.peak_gpu_mem_gib == 0.5  # the first generation's, as FlexGen's own command has it
    assert (point.bytes_from_disk, point.bytes_expected_from_disk) == (2000, 4000)
    assert (point.source, point.kind, point.gpu_mem_gib) == ("Tesla T4", "measured on CUDA", 14.6)


def test_one_repeat_has_no_range():
    point = from_record("a", make_record(latencies=((1.0, 1.0),)))
    assert point.total_throughput_tok_s_range is None and point.repeats == 1


def test_timers_become_flexgens_mean_and_a_median():
    repeat = Repeat(
        started_s=0.0,
        ended_s=1.0,
        pass_latencies_s=(1.0,),
        peak_gpu_mem_gib=1.0,
        timers_s={"load_weight": (9.0, 1.0, 2.0), "compute_layer_decoding": (0.5, 0.1)},
    )
    point = from_record("a", make_record(repeats=(repeat,), kind="projected by FlexGen"))
    assert point.load_weight_s == statistics.fmean((9.0, 1.0, 2.0)) and point.load_weight_s_median == 2.0
    assert point.compute_layer_decoding_s == pytest.approx(0.3)


def test_disk_peaks_are_those_of_the_measured_repeats_only():
    """Copying the weights before a run reads the disk too."""
    point = from_record("a", make_record(samples=Samples(disk=disk_series())))
    assert (point.disk_r_s_peak, point.disk_rkb_s_peak, point.disk_rareq_kb_peak, point.disk_util_percent_peak) == (
        20.0,
        200.0,
        16.0,
        2.0,
    )
    assert point.windows_s == ((10.0, 15.0), (20.0, 25.0), (30.0, 35.0))


def test_disk_peaks_leave_out_what_was_read_at_a_windows_edges():
    """A sample that ends in a window holds what was read before it; only a window too short for one has no other."""
    edges = disk_series(
        time_s=(10.5, 12.0, 15.5),
        reads_per_s=(900.0, 20.0, 800.0),
        read_kib_per_s=(9000.0, 200.0, 8000.0),
        request_kib=(512.0, 16.0, 512.0),
        util_percent=(99.0, 2.0, 98.0),
    )
    point = from_record("a", make_record(samples=Samples(disk=edges)))
    assert (point.disk_r_s_peak, point.disk_rkb_s_peak, point.disk_rareq_kb_peak) == (20.0, 200.0, 16.0)
    short = Repeat(started_s=10.2, ended_s=10.4, pass_latencies_s=(0.2,), peak_gpu_mem_gib=1.0)
    point = from_record("a", make_record(samples=Samples(disk=edges), repeats=(short,)))
    assert point.disk_r_s_peak == 900.0


def test_a_peak_rate_is_no_less_than_the_mean_of_its_repeat():
    """A sample longer than a repeat averages idle time in; the disk's own count of the repeat doesn't."""
    short = Repeat(
        started_s=10.2, ended_s=10.4, pass_latencies_s=(0.2,), peak_gpu_mem_gib=1.0, disk_read_bytes=200 * 1024
    )
    point = from_record("a", make_record(samples=Samples(disk=disk_series()), repeats=(short,)))
    assert point.disk_rkb_s_peak == pytest.approx(1000.0)


def test_unsampled_reads_have_an_unknown_request_size():
    """The disk's own count says that there were some: none of them is a peak of 0."""
    within = disk_series(
        time_s=(10.5, 12.0, 15.5),
        reads_per_s=(900.0, 0.0, 800.0),
        read_kib_per_s=(9000.0, 0.0, 8000.0),
        request_kib=(512.0, None, 512.0),
        util_percent=(99.0, 0.0, 98.0),
    )
    repeat = Repeat(
        started_s=10.0, ended_s=15.0, pass_latencies_s=(5.0,), peak_gpu_mem_gib=1.0, disk_read_bytes=50 * 1024
    )
    point = from_record("a", make_record(samples=Samples(disk=within), repeats=(repeat,)))
    assert point.disk_rkb_s_peak == pytest.approx(10.0)
    assert point.disk_r_s_peak is point.disk_rareq_kb_peak is point.disk_util_percent_peak is None


def test_a_run_with_another_disk_reader_is_not_a_homework_row():
    direct = make_record(settings={"disk_reader": "direct"})
    rows = matching.homework_rows([from_record("a", direct)])
    assert not rows.by_id and not rows.extras


def test_no_disk_samples_is_unknown_not_zero():
    point = from_record("a", make_record())
    assert point.disk_r_s_peak is None and point.disk_rkb_s_peak is None


def test_a_failed_record_has_a_reason_and_no_figures():
    failed = make_record(status="failed", failure=Failure(kind="gpu_oom", message="CUDA out of memory"))
    point = from_record("a", failed)
    assert point.status == "failed" and "gpu_oom" in point.reason and "CUDA out of memory" in point.reason
    assert point.total_throughput_tok_s is None and point.peak_gpu_mem_gib is None


def test_the_last_done_record_of_a_run_wins_else_the_last_failure(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    failure = {"status": "failed", "repeats": ()}
    log.append(make_record(latencies=((4.0,),)))
    log.append(make_record(latencies=((2.0,),)))
    log.append(make_record(**failure, failure=Failure(kind="error", message="later")))
    log.append(make_record("100 0 100 0 100 0", **failure, failure=Failure(kind="error", message="first")))
    log.append(make_record("100 0 100 0 100 0", **failure, failure=Failure(kind="error", message="last")))
    disk, gpu = readers.read(log.path)
    assert (disk.run_id, disk.wall_time_s) == ("q1-5", 2.0)
    assert (gpu.run_id, gpu.status, gpu.reason) == ("q1-1", "failed", "error: last")


def test_a_log_without_records_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("\n")
    with pytest.raises(Refused, match="no readable record"):
        readers.read(path)
