"""The benchmark against stock: what FlexGen printed is read right, pairs are compared by themselves, shares add up."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from factories import make_record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import against_stock  # noqa: E402

# FlexGen 0.1.8's own print of a small run.
PRINTED = """\
<run_flexgen>: args.model: facebook/opt-mini
model size: 0.006 GB, cache size: 0.000 GB, hidden size (prefill): 0.000 GB
init weight...
warmup - generate
benchmark - generate
Outputs:
----------------------------------------------------------------------
0: 1 1 1 1 1 1 1 1 1 2 826 16 5 812 343 9 851 774 518
----------------------------------------------------------------------
1: 1 1 1 1 1 1 1 1 1 2 826 16 5 812 343 9 851 774 518
----------------------------------------------------------------------

TorchDevice: cuda:0
  cur_mem: 0.0000 GB,  peak_mem: 0.0026 GB
TorchDevice: cpu
  cur_mem: 0.0000 GB,  peak_mem: 0.0000 GB
model size: 0.006 GB	cache size: 0.000 GB	hidden size (p): 0.000 GB
peak gpu mem: 0.003 GB	projected: False
prefill latency: 0.046 s	prefill throughput: 693.385 token/s
decode latency: 0.071 s	decode throughput: 56.489 token/s
total latency: 0.117 s	total throughput: 51.299 token/s
"""


def line(part, setting, who="lab", **fields):
    return {
        "part": part,
        "setting": setting,
        "run": "2026-01-01",
        "machine": "a GPU",
        "platform": "Linux",
        "versions": {"torch": "2.11"},
        "who": who,
        "pair": 0,
        "page_cache": "natural",
        "throughput_tok_s": 100.0,
        "peak_gpu_mem_gib": 1.0,
        "tokens": [[851, 774, 518]] * 2,
        "wall_s": 10.0,
        "read_gb_s": 1.0,
        "phases_s": {"start": 1.0, "measured": 5.0},
    } | fields


def test_what_flexgen_prints():
    read = against_stock.read_stock(PRINTED)
    assert read["throughput_tok_s"] == 51.299 and read["peak_gpu_mem_gib"] == 0.0026
    assert [row[-4:] for row in read["tokens"]] == [[9, 851, 774, 518]] * 2


def test_a_print_without_figures_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match="init weight"):
        against_stock.read_stock("init weight...\n")


def test_a_homework_is_thirteen_commands():
    assert len(against_stock.TYPED) == 13 and "q4-disk-cold" not in against_stock.TYPED


@given(st.lists(st.tuples(st.floats(1, 1e3), st.floats(0.5, 2)), min_size=1, max_size=9))
def test_each_pair_is_compared_with_itself(pairs):
    """However much the machine drifts from pair to pair, the ratio is that within the pairs."""
    lines = []
    for number, (stock, ratio) in enumerate(pairs):
        lines.append(line("fidelity", "q1-1", who="stock", pair=number, throughput_tok_s=stock))
        lines.append(line("fidelity", "q1-1", pair=number, throughput_tok_s=stock * ratio))
    lines.append(line("fidelity", "q1-1", who="stock", pair=len(pairs)))  # cut off
    found = against_stock.ratios(lines, "throughput_tok_s", lambda one: one["who"] == "lab")
    assert found.values == pytest.approx([ratio for _, ratio in pairs])


def test_pairs_of_several_runs_are_not_mixed():
    lines = [
        line("fidelity", "q1-1", who=who, run=run, throughput_tok_s=speed)
        for run, who, speed in (("a", "stock", 1.0), ("a", "lab", 2.0), ("b", "stock", 10.0), ("b", "lab", 30.0))
    ]
    assert against_stock.ratios(lines, "throughput_tok_s", lambda one: one["who"] == "lab").values == (2.0, 3.0)


@given(st.floats(0.5, 2.0), st.lists(st.tuples(st.floats(0.4, 1.0), st.floats(0.4, 1.0)), max_size=5))
def test_the_fastest_tell_the_ratio_whatever_others_take_from_some(ratio, taken):
    lines = []
    for number, (of_stock, of_ours) in enumerate([*taken, (1.0, 1.0)]):
        lines.append(line("fidelity", "q1-1", pair=number, throughput_tok_s=100.0 * of_stock) | {"who": "stock"})
        lines.append(line("fidelity", "q1-1", pair=number, throughput_tok_s=100.0 * ratio * of_ours))
    other_run = [one | {"run": "another", "throughput_tok_s": 5.0} for one in lines]
    assert against_stock.fastest(lines + other_run).values == pytest.approx((ratio, 1.0))


def test_a_run_that_failed_has_no_figures_and_loses_nobody_elses():
    record = make_record(latencies=()).model_copy(update={"status": "failed"})
    found = against_stock.figures_of(record)
    assert found["throughput_tok_s"] is found["peak_gpu_mem_gib"] is found["core_speed"] is None


def test_tokens_are_compared_behind_stocks_prompt():
    stock = line("fidelity", "q1-1", who="stock", tokens=against_stock.read_stock(PRINTED)["tokens"])
    assert against_stock.same_tokens([stock, line("fidelity", "q1-1")]) is True
    assert against_stock.same_tokens([stock, line("fidelity", "q1-1", tokens=[[851, 774, 519]] * 2)]) is False
    assert against_stock.same_tokens([stock, line("fidelity", "q1-1", tokens=[])]) is None


@given(st.lists(st.dictionaries(st.sampled_from(["start", "weights", "measured"]), st.floats(0, 50)), max_size=5))
def test_the_shares_of_the_whole_add_up(runs):
    records = [line("whole", "q", wall_s=sum(found.values()) + 1.5, phases_s=found) for found in runs]
    wall_s = sum(record["wall_s"] for record in records) + 20
    shares = against_stock.phases(records, wall_s)
    assert sum(shares.values()) == pytest.approx(wall_s)
    assert min(shares.values()) >= -1e-9


def test_a_report_of_every_part(tmp_path, capsys):
    lines = [
        line("fidelity", "q1-1", who="stock", throughput_tok_s=50.0),
        line("fidelity", "q1-1"),
        line("whole", "q1-1", who="stock", run="before", wall_s=99.0),
        line("whole", "q1-1", who="stock", run="first", wall_s=25.0, throughput_tok_s=80.0),
        line("whole", "q1-1", who="lab run"),
        line("whole", "q4-disk-cold", who="lab run", page_cache="cold"),
        line("whole", "q1-5", who="lab run", wall_s=5.0, throughput_tok_s=None, peak_gpu_mem_gib=None),
        line("whole", "all", wall_s=27.5),
        line("direct", "stock reader"),
        line("direct", "direct reader", throughput_tok_s=170.0, read_gb_s=1.8),
        {
            name: value
            for name, value in line("direct", "plain O_DIRECT, 4 MiB", read_gb_s=2.0).items()
            if name != "throughput_tok_s"
        },
        line("overhead", "q1-1", sampled=True),
        line("overhead", "q1-1", sampled=False, throughput_tok_s=101.0),
        line("page-cache", against_stock.COPIED, read_gb_s=12.0),
        line("page-cache", "from the disk", read_gb_s=9.0),
        line(
            "small-host",
            "12 GiB, copy buffer stock",
            status="done",
            total_throughput_tok_s=1.5,
            bytes_from_disk=90,
            bytes_expected_from_disk=100,
            memory_peak_gib=11.9,
        ),
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert against_stock.main(["--report", "--output", str(log)]) == 0
    text = capsys.readouterr().out
    assert "a GPU, Linux" in text and "torch 2.11" in text
    rows = [row for row in text.splitlines() if row.startswith("|")]
    for wanted in (
        "| 2.000 |",
        "| 3 runs | 27.5 |  | 1.1 |",
        "| 2 runs | 17.5 |  | 0.7 |",
        "| 1.250 |",
        "| 1.70 | 0.90 |",
        "| 0.9901 |",
        "| 0.9 | 11.9 |",
        "| the same |",
        "| from the disk | 9 | 0.750 |",
    ):
        assert any(wanted in row for row in rows), (wanted, text)


def test_a_plain_read_reads_files_whole(tmp_path):
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(10_000_000 + number))
    assert against_stock.plain_read_gb_s(sorted(tmp_path.iterdir()), 2**20) > 0


def test_weights_are_read_from_the_page_cache_however_they_came_there(tmp_path):
    log = tmp_path / "log.jsonl"
    asked = ["--parts", "page-cache", "--pairs", "2", "--device", "emulated", "--offload-root", str(tmp_path / "root")]
    assert against_stock.main([*asked, "--output", str(log)]) == 0
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    assert [line["pair"] for line in lines] == [0, 0, 0, 1, 1, 1] and len({line["setting"] for line in lines}) == 3
    assert all(line["read_gb_s"] > 0 for line in lines)
    assert list((tmp_path / "root").iterdir()) == []
