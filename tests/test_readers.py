"""Figures as people have them: logs, terminal output, notebooks, iostat and CSVs, read as they were measured."""

from __future__ import annotations

import argparse
import csv
import json
import re
import string
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from factories import T4
from helpers import homework
from helpers.analysis import readers
from helpers.analysis.plausibility import remarks_on
from helpers.analysis.readers import flexgen_output, iostat
from helpers.analysis.readers.figures_csv import TEMPLATE
from helpers.engine import patches
from helpers.errors import Refused
from helpers.report import document
from helpers.report.comparison import REFERENCE
from helpers.runs import Run
from helpers.settings import OffloadSplit, RunSettings
from test_settings import all_settings

HEADER = REFERENCE.read_text().splitlines()[0]
DISK = RunSettings.of(model="opt-1.3b", split=OffloadSplit.parse(homework.DISK), device="cuda")


# ---- FlexGen's own writing


@pytest.fixture(scope="module")
def flexgen():
    return patches.import_flexgen()


def record(settings, prefill_s=1.0, decode_s=2.0, projected=False, peak_gib=0.5):
    """The text that FlexGen's write_benchmark_log makes of these figures."""
    from flexgen.opt_config import get_opt_config
    from flexgen.utils import write_benchmark_log

    work, config = settings.workload, get_opt_config(settings.opt_model.name)
    batch, total_s = work.effective_batch, prefill_s + decode_s
    return write_benchmark_log(
        "/dev/null",
        config.model_bytes(),
        config.cache_bytes(batch, work.prompt_len + work.gen_len),
        config.hidden_bytes(batch, work.prompt_len + work.gen_len),
        peak_gib * 2**30,
        projected,
        prefill_s,
        batch * work.prompt_len / prefill_s,
        decode_s,
        batch * (work.gen_len - 1) / max(decode_s, 1e-10),
        total_s,
        batch * work.gen_len / total_s,
    )


def log_name(flexgen, settings):
    parser = argparse.ArgumentParser()
    flexgen.add_parser_arguments(parser)
    return flexgen.get_filename(parser.parse_args(settings.flexgen_arguments()[3:])) + ".log"


def printed(settings, result, timers=""):
    """What `python -m flexgen.flex_opt` prints, from its first line to its last."""
    return (
        f"<run_flexgen>: args.model: facebook/{settings.opt_model.name}\n"
        "model size: 2.443 GB, cache size: 0.105 GB, hidden size (prefill): 0.002 GB\ninit weight...\n"
        f"warmup - generate\nbenchmark - generate\n{timers}TorchDevice: cuda:0\n"
        "  cur_mem: 0.4012 GB,  peak_mem: 0.5123 GB\nTorchDevice: cpu\n  cur_mem: 0.0000 GB,  peak_mem: 0.0000 GB\n"
        f"{result}\n"
    )


TIMERS = (
    "#layers: 50\n#batches prefill:  50\n#batches decoding: 750\nload_weight            (per-layer): 0.072345 s\n"
    "load_cache_prefill     (per-batch): 0.000011 s\ncompute_layer_prefill  (per-batch): 0.001222 s\n"
    "compute_layer_decoding (per-batch): 0.000789 s\n"
)
FLEXGENS_MODELS = st.sampled_from(["opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-175b"])
SECONDS = st.floats(0.05, 5000).map(lambda seconds: round(seconds, 3))


@st.composite
def measured(draw):
    """Runs of FlexGen's own options, with their figures."""
    settings = draw(all_settings())
    settings = settings.replace(
        model=draw(FLEXGENS_MODELS),
        device="cuda",
        page_cache="natural",
        disk_reader="stock",
        copy_buffer="stock",
        repeats=3,
        debug_mode=None,
    )
    return settings, draw(SECONDS), draw(SECONDS)


@hypothesis_settings(max_examples=40)
@given(runs=st.lists(measured(), min_size=1, max_size=4))
def test_printed_output_reads_back_as_the_runs_that_made_it(flexgen, runs):
    text = "".join(
        f"$ {run.flexgen_command.partition('  #')[0]}\n{printed(run, record(run, prefill_s, decode_s))}"
        for run, prefill_s, decode_s in runs
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "out.txt").write_text(text)
        found = readers.collect([folder]).runs
    assert [run.settings for run in found] == [run for run, *_ in runs]
    for run, (_, prefill_s, decode_s) in zip(found, runs):
        assert (run.prefill_latency_s, run.decode_latency_s) == (prefill_s, decode_s)
        assert run.wall_time_s == pytest.approx(prefill_s + decode_s, abs=1e-3)
        assert run.peak_gpu_mem_gib == 0.5123 and run.kind == "measured by you"


@hypothesis_settings(max_examples=40)
@given(one=measured())
def test_a_log_reads_back_with_the_options_in_its_name(flexgen, one):
    settings, prefill_s, decode_s = one
    settings = settings.replace(overlap=True, pin_weight=True, attn_sparsity=1.0)  # the name leaves these out
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / log_name(flexgen, settings)
        path.write_text(record(settings, prefill_s, decode_s))
        (run,) = readers.read(path)
    assert run.settings == settings and run.wall_time_s == pytest.approx(prefill_s + decode_s, abs=1e-3)
    assert path.name in run.sources[0]


def test_records_may_run_together_and_projections_are_skipped(flexgen, tmp_path):
    path = tmp_path / log_name(flexgen, DISK)
    path.write_text(record(DISK, 1.0, 2.0) + record(DISK, 9.0, 90.0, projected=True) + "\n" + record(DISK, 1.5, 2.5))
    collected = readers.collect([path])
    assert [run.prefill_latency_s for run in collected.runs] == [1.0, 1.5]
    assert "projected" in collected.remarks[0]


def test_a_breakdown_joins_terminal_timers_and_log_options(flexgen, tmp_path):
    (tmp_path / log_name(flexgen, DISK)).write_text(record(DISK, 1.0, 2.0) + "\n" + record(DISK, 1.25, 30.0, True))
    (tmp_path / "terminal.txt").write_text(printed(DISK, record(DISK, 1.25, 30.0, True), TIMERS))
    plain, breakdown = readers.collect([tmp_path]).runs
    assert plain.debug_mode is None and breakdown.debug_mode == "breakdown"
    assert (breakdown.load_weight_s, breakdown.compute_layer_decoding_s) == (0.072345, 0.000789)
    assert len(breakdown.sources) == 2


def test_colours_progress_and_quotation_marks_are_no_obstacle(flexgen, tmp_path):
    text = f"> $ {DISK.flexgen_command}\n> \x1b[31m  5%|▌ | 1/20\r 10%|█ | 2/20\x1b[0m\n"
    text += "".join(f"> {line}\r\n" for line in printed(DISK, record(DISK)).replace("\t", "    ").splitlines())
    (tmp_path / "mail.txt").write_text(text, newline="")
    (run,) = readers.read(tmp_path / "mail.txt")
    assert run.settings == DISK and run.prefill_latency_s == 1.0


def test_an_executed_notebook_is_read_cell_by_cell(flexgen, tmp_path):
    gpu = DISK.replace(split=OffloadSplit.parse(homework.GPU))
    both = [f"!{one.flexgen_command}\n" for one in (gpu, DISK)]
    outputs = printed(gpu, record(gpu, 0.1, 0.4)) + printed(DISK, record(DISK, 10.0, 170.0))
    cells = [
        {"cell_type": "markdown", "source": ["# Homework"]},
        {
            "cell_type": "code",
            "source": both,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": outputs}],
        },
    ]
    (tmp_path / "hw.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    first, second = readers.read(tmp_path / "hw.ipynb")
    assert (first.settings, second.settings) == (gpu, DISK) and "hw.ipynb, cell 2, line" in first.sources[0]
    assert (first.run_id, second.run_id) == ("q1-1", "q1-5")


def test_a_command_without_a_result_is_a_failed_run_with_the_last_error(flexgen, tmp_path):
    gpu = DISK.replace(split=OffloadSplit.parse(homework.GPU))
    begun = printed(gpu, "").partition("benchmark")[0]
    text = f"$ {gpu.flexgen_command}\n{begun}torch.cuda.OutOfMemoryError: CUDA out of memory.\n"
    text += f"$ {DISK.flexgen_command}\n{printed(DISK, record(DISK))}"
    (tmp_path / "out.txt").write_text(text)
    failed, done = readers.read(tmp_path / "out.txt")
    assert failed.status == "failed" and "out of memory" in failed.reason and failed.settings == gpu
    assert done.status == "done" and done.settings == DISK


def test_a_name_that_disagrees_with_its_record_is_remarked_on(flexgen, tmp_path):
    small, large = DISK.replace(model="opt-13b"), DISK.replace(model="opt-66b", gpu_batch_size=24)
    path = tmp_path / log_name(flexgen, large)
    path.write_text(record(small.replace(gpu_batch_size=96), 3.0, 30.0))
    (run,) = readers.read(path)
    assert run.model == "opt-13b"
    assert any("opt-66b" in remark and "opt-13b" in remark for remark in run.remarks)
    assert any("batch 24" in remark for remark in run.remarks)


def test_what_a_file_does_not_say_is_asked_for_in_one_line(flexgen, tmp_path):
    (tmp_path / "x.log").write_text(record(DISK, 10.0, 100.0))
    with pytest.raises(Refused, match=r"x\.log, line 1: the split is missing; write the run's command") as refused:
        readers.read(tmp_path / "x.log")
    assert "\n" not in str(refused.value)
    (tmp_path / "x.log").write_text(f"python3 -m flexgen.flex_opt --percent $P\n{record(DISK)}")
    with pytest.raises(Refused, match="variable"):
        readers.read(tmp_path / "x.log")


def test_other_programs_logs_are_refused_by_name(flexgen, tmp_path):
    path = tmp_path / log_name(flexgen, DISK).replace("fo-", "ds-")
    path.write_text(record(DISK))
    with pytest.raises(Refused, match="DeepSpeed"):
        readers.read(path)


def test_the_distributed_form_and_nan_are_read(flexgen):
    text = record(DISK, 10.0, 100.0).replace("\tprojected: False", "").replace("\n", "\nrank #3: ")
    (found,) = flexgen_output.read(text, log_name(flexgen, DISK))
    assert found.figures["prefill_latency_s"] == 10.0
    (broken,) = flexgen_output.read(text.replace("decode latency: 100.000", "decode latency: nan"), "x.log")
    assert broken.figures["status"] == "failed"


# ---- iostat

CAPTURED = (  # r/s, rkB/s, rareq-sz, %util of sda, since boot and then a second each
    (3.1, 99.0, 31.94, 0.4),
    (0.0, 0.0, 0.0, 0.0),
    (1972.0, 252416.0, 128.0, 99.6),
    (1200.5, 150000.0, 124.95, 101.2),
)


def as_text(samples, columns="r/s rkB/s rrqm/s r_await rareq-sz w/s %util", decimal=".", stamp="", once=False):
    lines = ["Linux 6.6.56 (host) \t11/30/26 \t_x86_64_\t(2 CPU)\n"]
    for i, (reads, kib, size, util) in enumerate(samples):
        values = {
            "r/s": reads,
            "rkB/s": kib,
            "rMB/s": kib / 1024,
            "rsec/s": kib * 2,
            "rareq-sz": size,
            "avgrq-sz": size * 2,
            "%util": util,
        }
        if stamp:
            lines.append(stamp.format(i))
        if not (once and i):
            lines.append(f"Device {'  '.join(columns.split())}")
        row = [f"{values.get(name, 0.0):.4f}".replace(".", decimal) for name in columns.split()]
        lines += [f"loop0 {' '.join('0' + decimal + '00' for _ in row)}", f"sda {' '.join(row)}", ""]
    return "\n".join(lines)


def as_json(samples):
    statistics = [
        {
            "timestamp": f"2026-11-30T23:00:{i:02}Z",
            "disk": [{"disk_device": "sda", "r/s": reads, "rkB/s": kib, "rareq-sz": size, "util": util}],
        }
        for i, (reads, kib, size, util) in enumerate(samples)
    ]
    return json.dumps({"sysstat": {"hosts": [{"nodename": "host", "statistics": statistics}]}}, indent=1)


@pytest.mark.parametrize(
    "text",
    [
        as_text(CAPTURED),
        as_text(CAPTURED, decimal=","),
        as_text(CAPTURED, once=True),
        as_text(CAPTURED, "rrqm/s r/s w/s rMB/s avgrq-sz %util"),
        as_text(CAPTURED, "rrqm/s r/s w/s rsec/s wsec/s avgrq-sz await %util"),
        as_text(CAPTURED, stamp="11/30/2026 11:00:{:02} PM"),
        as_text(CAPTURED, stamp="2026年11月30日 23時00分{:02}秒"),
        as_text(CAPTURED).replace("Device", "デバイス").replace("sda", "sda   "),
        "\n".join(f"> {line}" for line in as_text(CAPTURED).splitlines()),
        as_json(CAPTURED),
        as_json(CAPTURED)[: -len(" } ] } ] } ] } }")],
        as_json(CAPTURED).replace("]", "", 1),
    ],
)
def test_iostat_of_any_version_interval_and_locale_gives_the_samples(text):
    series = iostat.read(text, "iostat.txt").series
    assert series.device == "sda" and len(series.time_s) == 3
    assert series.reads_per_s == pytest.approx([0.0, 1972.0, 1200.5], abs=0.01)
    assert series.read_kib_per_s == pytest.approx([0.0, 252416.0, 150000.0], rel=1e-3)
    assert series.util_percent == pytest.approx([0.0, 99.6, 101.2], abs=0.01)


def test_timestamps_give_the_interval():
    assert iostat.read(as_text(CAPTURED, stamp="23:59:{:02}"), "x").series.interval_s == 1.0
    assert iostat.read(as_text(CAPTURED, stamp="11:0{}:00 PM"), "x").series.interval_s == 60.0
    assert any("interval" in remark for remark in iostat.read(as_text(CAPTURED), "x").remarks)


@pytest.mark.parametrize(
    "text, named",
    [
        (as_text(CAPTURED[:1]), "since boot"),
        ("Device             tps    kB_read/s    kB_wrtn/s\nsda  1.0 2.0 3.0\n", "without -x"),
        ("              capacity     operations     bandwidth\npool  alloc free read write\n", "zpool"),
        ("              disk0\n    KB/t  tps  MB/s\n   20.0   10  0.20\n", "macOS"),
        ("    extended device statistics\n    r/s    w/s   kr/s   kw/s wait actv wsvc_t  %b device\n", "Solaris"),
    ],
)
def test_another_report_is_refused_by_name_with_what_to_run(text, named):
    with pytest.raises(Refused, match=named) as refused:
        iostat.read(text, "iostat.txt")
    assert "iostat -x" in str(refused.value) and "\n" not in str(refused.value)


@given(st.text(max_size=300))
def test_any_text_is_an_iostat_log_or_refused(text):
    with pytest.raises(Refused):
        iostat.read(text, "x")


def test_an_iostat_log_goes_to_its_run_or_is_asked_about(flexgen, tmp_path):
    half = DISK.replace(split=OffloadSplit.parse("50 0 100 0 100 0"))
    for one in (DISK, half):
        (tmp_path / log_name(flexgen, one)).write_text(record(one, 10.0, 100.0))
    (tmp_path / "iostat.txt").write_text(as_text(CAPTURED))
    with pytest.raises(
        Refused, match=r"iostat\.txt: which run does it belong to\? Rename it: .*q1-5\.iostat"
    ) as refused:
        readers.collect([tmp_path])
    assert "\n" not in str(refused.value)
    name = f"{log_name(flexgen, DISK)[:-4]}.iostat.txt"
    (tmp_path / "iostat.txt").rename(tmp_path / name)
    assert "iostat" in next(run for run in readers.collect([tmp_path]).runs if run.settings == DISK).sources[1]
    (tmp_path / name).rename(tmp_path / "q1-5.iostat.txt")
    by_split = {str(run.split): run for run in readers.collect([tmp_path]).runs}
    assert by_split[homework.DISK].disk_rkb_s_peak == 252416.0
    assert by_split["50 0 100 0 100 0"].disk_rkb_s_peak is None
    assert "iostat" in by_split[homework.DISK].sources[1]


# ---- CSV


def write_csv(path, *rows, header=HEADER):
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def row(**cells):
    base = {
        "run_id": "x",
        "model": "opt-1.3b",
        "percent": "0 0 100 0 100 0",
        "gpu_batch_size": "4",
        "num_gpu_batches": "1",
        "prompt_len": "128",
        "gen_len": "16",
    }
    return ",".join((base | cells).get(name, "") for name in HEADER.split(","))


def test_the_reference_is_read_as_it_stands():
    found = readers.read(REFERENCE)
    with open(REFERENCE, encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [p.run_id for p in found] == [line["run_id"] for line in lines]
    for point, line in zip(found, lines):
        assert point.kind == "quoted" and "figures.csv" in point.source
        for name in ("wall_time_s", "total_throughput_tok_s", "peak_gpu_mem_gib", "load_weight_s", "disk_rkb_s_peak"):
            assert getattr(point, name) == (float(line[name]) if line[name] else None)


def test_wall_time_follows_from_tokens_and_throughput_and_back():
    disk = next(p for p in readers.read(REFERENCE) if p.run_id == "q1-5")
    derived = disk.model_copy(update={"wall_time_s": None})
    assert derived.latency_s == pytest.approx(disk.wall_time_s, rel=0.002)


def test_a_wall_time_of_something_else_is_not_used():
    point = next(p for p in readers.read(REFERENCE) if p.run_id == "q1-5").model_copy(update={"wall_time_s": 300.0})
    assert point.figures_disagree and point.latency_s == pytest.approx(64 / 0.357)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace(",", " , ").encode(),
        lambda text: text.replace("false", "FALSE").encode(),
        lambda text: (text + "\n" + 17 * "," + "\n\n").encode(),
    ],
)
def test_what_spreadsheets_do_to_a_csv_changes_nothing(tmp_path, encode):
    folder = tmp_path / "t4-colab"
    folder.mkdir()
    (folder / "figures.csv").write_bytes(encode(REFERENCE.read_text()))
    fields = {"kind", "source", "remarks"}
    dumps = [
        [run.model_dump(exclude=fields) for run in readers.read(path)] for path in (folder / "figures.csv", REFERENCE)
    ]
    assert dumps[0] == dumps[1]


def test_optional_columns_may_be_left_out(tmp_path):
    path = write_csv(
        tmp_path / "f.csv",
        "opt-1.3b,0 0 100 0 100 0,4,128,16,0.5",
        header="model,percent,gpu_batch_size,prompt_len,gen_len,total_throughput_tok_s",
    )
    (point,) = readers.read(path)
    assert point.total_throughput_tok_s == 0.5 and point.peak_gpu_mem_gib is None and not point.compress_weight


@pytest.mark.parametrize(
    "column, text",
    [
        ("total_throughput_tok_s", "OOM"),
        ("peak_gpu_mem_gib", "nan"),
        ("wall_time_s", "-3"),
        ("wall_time_s", "inf"),
        ("total_throughput_tok_s", "0"),
        ("gen_len", "16.5"),
        ("gpu_batch_size", "four"),
        ("compress_weight", "maybe"),
        ("debug_mode", "quick"),
        ("model", "opt-350m"),
        ("percent", "-10 50 100 0 100 0"),
        ("percent", "100 0 100"),
    ],
)
def test_a_malformed_cell_is_refused_with_line_column_and_value(tmp_path, column, text):
    path = write_csv(tmp_path / "f.csv", row(), row(**{column: text}))
    with pytest.raises(Refused) as refused:
        readers.read(path)
    message = str(refused.value)
    assert "line 3" in message and "\n" not in message
    assert text.split(" ")[0] in message and column in message


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("", "empty"),
        (HEADER, "no rows"),
        ("a,b\n1,2", "no column percent"),
        (HEADER + ",gen_len\n" + row() + ",1", "appears twice"),
        (HEADER + "\n" + row() + ",7", "line 2"),
        (HEADER + "\n" + row(gpu_batch_size="0"), "line 2"),
    ],
)
def test_a_file_that_is_not_such_a_table_is_refused(tmp_path, content, complaint):
    (tmp_path / "f.csv").write_text(content)
    with pytest.raises(Refused, match=complaint):
        readers.read(tmp_path / "f.csv")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "f.csv").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "f.xlsx").write_bytes(b"PK\x03\x04\0")
    for name in ("f.csv", "nothing.csv", "f.xlsx"):
        with pytest.raises(Refused):
            readers.read(tmp_path / name)


@given(st.text(alphabet=string.printable, max_size=200))
def test_any_text_is_read_or_refused(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.csv"
        path.write_text(HEADER + "\n" + text, newline="")
        try:
            assert readers.read(path)
        except Refused as error:
            assert "f.csv" in str(error)


MINE = """run;percent;throughput;prefill latency;decode latency;comment;
one;"100 0 100 0 100 0";65,771;;;fast;
two;"0 0 100 0 100 0";;10,5;168,8;slow;
"""


def test_a_csv_as_people_write_it_needs_only_percent_and_throughput(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(MINE)
    collected = readers.collect([path], readers.About("My T4", 14.6, 12.7, 0.25))
    one, two = collected.runs
    assert one.total_throughput_tok_s == 65.771 and one.workload == homework.WORKLOAD["cuda"]
    assert {"model", "gpu_batch_size", "prompt_len", "gen_len"} <= set(one.assumed)
    assert two.wall_time_s == pytest.approx(179.3) and two.total_throughput_tok_s == pytest.approx(64 / 179.3)
    assert one.kind == "measured by you" and one.source == "My T4" and one.gpu_mem_gib == 14.6
    assert one.machine and one.machine.ram_gib == 12.7 and one.machine.disk_read_gb_s == 0.25
    assert one.sources == ("mine.csv, line 2",) and any("comment" in remark for remark in collected.remarks)


def test_the_template_is_filled_in_by_removing_a_comment_sign(tmp_path):
    path = tmp_path / "figures.csv"
    path.write_text(TEMPLATE)
    with pytest.raises(Refused, match="no rows"):
        readers.read(path)
    comment, header = TEMPLATE.splitlines()[-2:]
    path.write_text(f"{header}\n{comment.removeprefix('# ')}\n")
    (run,) = readers.read(path)
    assert run.total_throughput_tok_s == 0.357 and run.disk_rkb_s_peak == 252500 and not run.remarks


def test_the_labs_own_tables_read_back(tmp_path):
    document.write(T4, tmp_path)
    for name in ("all_rows", "q1", "q2"):
        runs = readers.read(tmp_path / "tables" / f"{name}.csv")
        known = {run.settings: run.total_throughput_tok_s for run in T4}
        assert all(run.total_throughput_tok_s == known[run.settings] for run in runs)


# ---- plausibility


def mine(**figures):
    fields = {"run_id": "x", "kind": "measured by you", "source": "me", "settings": DISK, "wall_time_s": None}
    return Run(**(fields | figures))


@pytest.mark.parametrize(
    "figures, slip",
    [
        ({"disk_r_s_peak": 1972.0, "disk_rkb_s_peak": 246.5, "disk_rareq_kb_peak": 128.0}, "iostat -m"),
        ({"disk_util_percent_peak": 9960.0}, "%util"),
        ({"settings": DISK.replace(split=OffloadSplit.parse(homework.GPU)), "peak_gpu_mem_gib": 1.2}, "less than"),
        ({"peak_gpu_mem_gib": 16.0, "gpu_mem_gib": 14.6}, "more than the card"),
        ({"settings": DISK.replace(split=OffloadSplit.parse(homework.GPU)), "peak_gpu_mem_gib": 5.41}, "opt-2.7b's"),
        ({"wall_time_s": 300.0, "total_throughput_tok_s": 0.357}, "tokens"),
        ({"load_weight_s": 72.3, "compute_layer_decoding_s": 0.789}, "milliseconds"),
        ({"total_throughput_tok_s": 50000.0}, "faster than any machine"),
    ],
)
def test_a_likely_slip_is_a_remark(figures, slip):
    assert any(slip in remark for remark in remarks_on(mine(**figures)))


def test_a_real_machines_figures_have_no_remarks():
    measured = [run.model_copy(update={"kind": "measured by you", "gpu_mem_gib": 14.6}) for run in T4]
    assert [remarks_on(run) for run in measured] == [()] * len(T4)


# ---- FlexGen's own output, as an H200 printed it


def test_what_flexgen_printed_on_an_h200_reads_as_typed_by_hand():
    """Thirteen commands of the homework, their logs and iostat next to (5): the figures are those that grep finds."""
    folder = REFERENCE.parents[1] / "h200" / "stock"
    printed = (folder / "printed.txt").read_text()
    runs = readers.read(folder / "printed.txt")
    assert [run.total_throughput_tok_s for run in runs if not run.debug_mode] == [
        float(figure)
        for command, figure in zip(
            re.findall(r"^\$ (.*)$", printed, re.M), re.findall(r"total throughput: (\S+)", printed)
        )
        if "--debug-mode" not in command
    ]
    assert [run.peak_gpu_mem_gib for run in runs] == [
        float(peak) for peak in re.findall(r"peak_mem: ([\d.]+)", printed)
    ][::2]
    loads = [run.load_weight_s for run in runs if run.debug_mode]
    assert loads == [float(seconds) for seconds in re.findall(r"load_weight +\(per-layer\): ([\d.]+)", printed)]


def test_an_iostat_log_named_after_a_run_made_twice_goes_to_the_last():
    runs = readers.read(REFERENCE.parents[1] / "h200" / "stock")
    with_disk = [run for run in runs if run.disk is not None]
    assert len(with_disk) == 1 and str(with_disk[0].split) == "0 0 100 0 100 0"
    assert with_disk[0].disk_rkb_s_peak == 0  # every read came from the page cache
