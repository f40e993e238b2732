"""One odd value in figures: its line is skipped or refused with its location, and no traceback ends the report."""

from __future__ import annotations

import json

import pytest

from factories import disk_series, make_record
from helpers.errors import Refused
from helpers.report import document
from helpers.results import Log, Samples

COLUMNS = ("total_throughput_tok_s", "wall_time_s", "peak_gpu_mem_gib", "load_weight_s", "disk_rkb_s_peak")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", ["1e308", "1" + "0" * 400, "1e-300"], ids=["huge", "digits", "tiny"])
def test_an_odd_figure_in_a_csv_is_refused_or_harmless(column, value, tmp_path):
    header = "run_id,model,percent,gpu_batch_size,prompt_len,gen_len,status,reason,"
    row = "a,opt-1.3b,100 0 100 0 100 0,4,128,16,,,"
    (tmp_path / "f.csv").write_text(f"{header}{column}\n{row}{value}\n{row.replace('100 0 100', '0 0 100')}3\n")
    try:
        document.analyze([tmp_path / "f.csv"], tmp_path / "out")
    except Refused as refused:
        assert "line 2" in str(refused)


def with_odd_value(record, place, value):
    fields = json.loads(record.model_dump_json())
    *way, last = place
    inner = fields
    for name in way:
        inner = inner[name]
    inner[last] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    "place, value",
    [
        (("samples", "disk", "read_kib_per_s", 1), 1e308),
        (("samples", "disk", "read_kib_per_s"), [1.0]),
        (("samples", "disk", "time_s", 1), 10**400),
        (("repeats", 0, "pass_latencies_s", 0), 1e308),
        (("repeats", 0, "peak_gpu_mem_gib"), 1e300),
        (("machine", "ram_gib"), 1e308),
        (("bytes_expected_from_disk",), 10**400),
        (("repeats", 0, "disk_read_bytes"), 10**400),
        (("repeats", 0, "ended_s"), 1e308),
        (("repeats", 0, "pass_latencies_s"), [1e-300]),
    ],
    ids=lambda given: str(given)[:60],
)
@pytest.mark.filterwarnings("ignore")
def test_an_odd_value_in_a_record_leaves_a_report(place, value, tmp_path):
    log = Log(tmp_path / "results.jsonl")
    log.append(make_record("100 0 100 0 100 0"))
    odd = with_odd_value(make_record(samples=Samples(disk=disk_series())), place, value)
    with log.path.open("a", encoding="utf-8") as file:
        file.write(odd + "\n")
    written = document.analyze([log.path], tmp_path / "out")
    assert all(path.stat().st_size for path in written)
