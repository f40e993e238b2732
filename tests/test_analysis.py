"""Analysis: the hand-in's figures give the hand-in's ratios, and other figures give other words."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from factories import T4, changed
from helpers import analysis
from helpers.analysis.values import Value, in_line, listed, plain, seconds, size
from helpers.homework import DISK, QUESTIONS
from helpers.predict import gpu_memory
from helpers.settings import OffloadSplit, RunSettings, Workload

QUESTION = {
    "q1": analysis.offload_sweep.analyze,
    "q2": analysis.batch_size.analyze,
    "q3": analysis.weight_compression.analyze,
    "q4": analysis.disk_io.analyze,
}


def speeds(*tokens_per_s, repeats=0.0):
    """The T4's points with other throughputs for settings (1) to (5), each with a spread of repeats."""
    return changed(
        **{
            f"q1_{i}": {
                "total_throughput_tok_s": speed,
                "wall_time_s": None,
                "total_throughput_tok_s_range": (speed * (1 - repeats), speed * (1 + repeats)) if repeats else None,
            }
            for i, speed in enumerate(tokens_per_s, start=1)
        }
    )


def text(answer, title):
    return next(part.verdict + part.reason for part in answer.parts if part.title.startswith(title))


# ---- the hand-in's figures


def test_q1_gives_the_hand_ins_ratios_and_classes():
    sweep = analysis.offload_sweep.analyze(T4)
    assert [f"{s.ratio.value:.2f}" for s in sweep.steps] == ["2.28", "35.51", "1.15", "1.97"]
    assert [s.link for s in sweep.steps] == ["PCIe", "Disk", "PCIe", "Disk"]
    # What bounds the run is not what the third step adds: the disk already did.
    assert [s.longest_after for s in sweep.steps] == ["PCIe", "Disk", "Disk", "Disk"]
    assert "front pair's is the larger" in text(sweep, "(a)") and "Disk" in text(sweep, "(a)")
    assert text(sweep, "(b)").count("disk is the larger") == 2


def test_q1_rates_are_bytes_over_time():
    """Oracle: opt-1.3b's fp16 bytes by hand (24 layers of 12 h^2 + 13 h, the embeddings, the last norm)."""
    h, vocabulary = 2048, 50272
    weights = 2 * (24 * (12 * h * h + 13 * h) + 2 * vocabulary * h + 2050 * h + 2 * h)
    assert analysis.offload_sweep.analyze(T4).rates.disk == pytest.approx(weights * 0.357 / 4)


def test_q2_gives_the_hand_ins_ratios_and_sees_amortization():
    batch = analysis.batch_size.analyze(T4)
    assert [f"{s.ratio.value:.2f}" for s in batch.steps] == ["4.01", "4.00"]
    assert "hardly changes" in batch.markdown and "as good as ideal" in batch.markdown


def test_q2_growth_is_the_slope_of_the_peaks_and_memory_ends_it_first():
    batch = analysis.batch_size.analyze(T4, gpu_mem_gib=14912 / 1024)
    slope = (1.051 - 0.489) / 15
    assert batch.growth.gib_per_sequence == pytest.approx(slope)
    largest = batch.growth.largest_batch
    assert largest == pytest.approx(16 + math.floor((14912 / 1024 - 1.051) / slope), rel=0.05)
    run = RunSettings(model="opt-1.3b", split=OffloadSplit.parse(DISK), device="cuda")
    peaks_mib = [
        gpu_memory.peak_gpu_memory(
            run.model_copy(update={"workload": Workload(gpu_batch_size=batch_size)}), 0
        ).high_bytes
        / 2**20
        for batch_size in (largest, largest + 1)
    ]
    assert peaks_mib[0] <= 14912 < peaks_mib[1]
    assert batch.growth.compute_overtakes_at == pytest.approx(4 * 65.771 / 0.357)
    assert "Memory is the limit" in batch.markdown and "at the earliest" in batch.markdown
    assert "capacity is not given" in analysis.batch_size.analyze(T4).markdown


def test_q3_gives_the_hand_ins_changes_and_the_reason():
    compression = analysis.weight_compression.analyze(T4)
    assert f"{compression.gpu.ratio.value:.2f} {compression.disk.ratio.value:.2f}" == "0.37 4.67"
    assert (compression.gpu.direction, compression.disk.direction) == ("slower", "faster")
    assert compression.byte_ratio == pytest.approx(3.55, abs=0.01)
    assert "page cache" in text(compression, "(b)")  # 4.67 is more than 3.55 times fewer bytes explain


def test_q4_gives_the_hand_ins_class_and_ratios():
    io = analysis.disk_io.analyze(T4)
    assert io.classes[0].by_rule == "A"
    assert f"{io.gpu.load_over_compute:.4f} {io.disk.load_over_compute:.2f}" == "0.0054 33.51"
    assert "6,700x, about 4 orders of magnitude (10^3.8)" in io.markdown
    assert "the same to within 25 %" in text(io, "(a)")


def test_the_reads_that_the_disk_cannot_have_given_are_found():
    reads = {r.run_id: r for r in analysis.disk_reads.analyze(T4)}
    assert {run for run, r in reads.items() if r.partly_cached} == {"q1-3", "q3-disk-4bit"}
    gb_s = {run: round(r.needed_bytes_per_s / 1e9, 2) for run, r in reads.items()}
    assert gb_s == {"q1-3": 0.29, "q1-4": 0.25, "q1-5": 0.25, "q2-b1": 0.25, "q2-b16": 0.25, "q3-disk-4bit": 0.33}
    assert reads["q1-5"].disk_bytes_per_s == 252500 * 1024
    assert "Setting (3) took reads from the page cache" in analysis.offload_sweep.analyze(T4).markdown


# ---- other figures, other words: question 1


def test_pcie_can_be_the_larger_ratio():
    sweep = analysis.offload_sweep.analyze(speeds(100, 10, 8, 4, 3))
    assert text(sweep, "(b)").count(": PCIe is the larger.") == 2 and "disk is the larger" not in text(sweep, "(b)")


def test_the_back_pair_can_be_the_larger():
    assert "back pair's is the larger" in analysis.offload_sweep.analyze(speeds(100, 90, 50, 20, 5)).markdown


def test_close_ratios_are_called_close():
    assert (
        text(analysis.offload_sweep.analyze(speeds(100, 50, 25, 12.5, 6.25)), "(a)").count("close to each other") == 2
    )


@pytest.mark.parametrize(
    "figures, reason",
    [
        ((170, 100, 22, 21.4, 12.7), "There are two reasons"),  # more seconds, on a shorter pass: (3)→(4) is hidden
        ((100, 50, 25, 18, 12.5), "about the same seconds"),
        ((100, 70, 30, 20, 10), "more in proportion"),
        ((100, 90, 50, 20, 5), "outweighs its longer base"),
    ],
)
def test_why_the_two_ratios_of_a_link_differ(figures, reason):
    assert reason in text(analysis.offload_sweep.analyze(speeds(*figures)), "(a)")


def test_what_depends_on_how_much_overlaps_is_not_said():
    """Of a pass of 1.8 s computing is 1 s; copying takes between 0.8 s, if nothing overlaps, and the whole of it."""
    sweep = analysis.offload_sweep.analyze(speeds(180, 100, 5, 4, 2))
    assert sweep.terms["q1-2"].longest is None and set(sweep.steps[0].may_be_longest_after) == {"PCIe", "compute"}
    assert "is PCIe or computing: that depends on how much overlaps" in text(sweep, "What")
    assert "also the longest part" not in text(sweep, "What").split("(1)→(2)")[1].split("(2)→(3)")[0]
    clear = analysis.offload_sweep.analyze(speeds(220, 100, 5, 4, 2))  # 1.2 s at the least
    assert clear.steps[0].longest_after == "PCIe"


def test_copies_hidden_behind_computing_are_no_bottleneck():
    sweep = analysis.offload_sweep.analyze(speeds(100, 100, 50, 45, 25))
    assert sweep.rates.host_to_device_hidden and sweep.terms["q1-2"].longest == "compute"
    assert "is not slower" in text(sweep, "What") and "at least" in sweep.markdown


def test_a_faster_run_after_a_step_is_said():
    assert "is faster" in text(analysis.offload_sweep.analyze(speeds(100, 50, 25, 40, 20)), "What")


def test_a_difference_inside_the_range_of_repeats_is_not_called_one():
    sure, unsure = speeds(100, 90, 50, 45, 25), speeds(100, 90, 50, 45, 25, repeats=0.2)
    assert (
        analysis.offload_sweep.analyze(sure).steps[0].slows
        and not analysis.offload_sweep.analyze(unsure).steps[0].slows
    )
    assert "no difference outside the spread" in text(
        analysis.offload_sweep.analyze(speeds(100, 60, 30, 20, 10, repeats=0.2)), "(b)"
    )


def test_a_disk_tier_faster_than_pcie_is_said():
    assert (
        "times as fast as the copies to the GPU" in analysis.offload_sweep.analyze(speeds(100, 10, 20, 15, 12)).markdown
    )


def test_rates_far_apart_and_near_are_told_apart():
    assert "less than an order of magnitude" in analysis.offload_sweep.analyze(speeds(100, 50, 40, 30, 20)).markdown
    assert "about 2 orders of magnitude (10^1.6)" in analysis.offload_sweep.analyze(T4).markdown


# ---- question 2


def batches(*latencies):
    return changed(
        **{
            name: {"wall_time_s": s, "total_throughput_tok_s": 16 * batch / s}
            for name, batch, s in zip(("q2_b1", "q1_5", "q2_b16"), (1, 4, 16), latencies)
        }
    )


def test_batches_that_stop_scaling_are_said_to():
    batch = analysis.batch_size.analyze(batches(10.0, 10.0, 39.0))
    assert "as good as ideal" in batch.markdown
    assert "all but stopped scaling" in batch.markdown and "The wall time grew" in batch.markdown
    assert "brings nothing" in analysis.batch_size.analyze(batches(10.0, 10.0, 41.0)).markdown
    assert "falls short" in analysis.batch_size.analyze(batches(10.0, 15.0, 15.0)).markdown


def test_more_than_the_ideal_is_not_praised():
    batch = analysis.batch_size.analyze(batches(20.0, 10.0, 10.0)).markdown
    assert "more than the batch can explain" in batch and "hardly changes" not in batch


def test_peaks_that_do_not_grow_are_said_not_to():
    flat = changed(**{name: {"peak_gpu_mem_gib": 1.0} for name in ("q2_b1", "q1_5", "q2_b16")})
    growth = analysis.batch_size.analyze(flat, gpu_mem_gib=10.0)
    assert growth.growth.gib_per_sequence == 0 and "does not grow" in growth.markdown


def test_the_capacity_may_be_smaller_than_what_was_used():
    assert "not this run's" in analysis.batch_size.analyze(T4, gpu_mem_gib=0.5).markdown


def test_computing_is_not_called_the_first_limit_by_a_pass_that_may_be_launching_kernels():
    assert "met first, these figures do not say" in analysis.batch_size.analyze(T4, gpu_mem_gib=1000.0).markdown


# ---- question 3


def compressed(gpu, disk, **fields):
    return changed(
        q3_gpu_4bit={"total_throughput_tok_s": gpu},
        q3_disk_4bit={"total_throughput_tok_s": disk, **fields},
        q1_5={"wall_time_s": None},
    )


def test_compression_that_slows_the_disk_case_is_explained_by_the_relay():
    found = analysis.weight_compression.analyze(compressed(24.1, 0.2, bytes_from_disk=0))
    assert found.disk.direction == "slower"
    answer = text(found, "(a)")
    assert "fp16 buffer" in answer and "throughput falls" in answer and "throughput rises" not in answer
    assert "warm (page cache)" in answer and "less to save" in answer


def test_compression_may_help_on_the_gpu_or_change_nothing():
    assert analysis.weight_compression.analyze(compressed(80.0, 1.0)).gpu.direction == "faster"
    same = analysis.weight_compression.analyze(compressed(65.8, 0.357))
    assert (same.gpu.direction, same.disk.direction) == ("unchanged", "unchanged")
    assert "no change outside the spread" in same.markdown


def test_less_and_as_much_as_the_byte_ratio_are_told_apart():
    assert "less than the bytes" in text(analysis.weight_compression.analyze(compressed(24.1, 0.7)), "(b)")
    assert "close to the byte ratio" in text(analysis.weight_compression.analyze(compressed(24.1, 0.357 * 3.5)), "(b)")
    assert "more than the bytes can explain" in text(analysis.weight_compression.analyze(compressed(24.1, 3.0)), "(b)")


# ---- question 4


def sampled(**fields):
    return analysis.disk_io.analyze(changed(q1_5=fields))


def iostat(r_s, rkb_s, rareq_kb):
    return {"disk_r_s_peak": r_s, "disk_rkb_s_peak": rkb_s, "disk_rareq_kb_peak": rareq_kb}


@pytest.mark.parametrize(
    "peaks, expected",
    [
        (iostat(2000, 250e3, 32.0), "A"),
        (iostat(16000, 256e3, 16.0), "B"),
        (iostat(60000, 240e3, 4.0), "B"),
        (iostat(50, 200, 4.0), "C"),
        (iostat(50, 800, 16.0), "none"),
        (iostat(0, 0, None), "none"),
        (iostat(None, None, None), "unknown"),
        (iostat(100, 4e3, None), "unknown"),
    ],
)
def test_the_homeworks_rule(peaks, expected):
    found = sampled(**peaks)
    assert found.classes[0].by_rule == expected
    assert ("class A" in found.markdown) == (expected == "A")


def test_no_reads_at_all_is_page_cache_and_no_class():
    assert "page cache hit" in sampled(**iostat(0, 0, None)).markdown
    assert "cannot be applied" in sampled(**iostat(0.0, 0.0, 0.0)).markdown


def test_unknown_counters_are_unknown_not_zero():
    found = sampled(**iostat(None, None, None), notes=("no /proc/diskstats",))
    assert "not known" in found.markdown and "no /proc/diskstats" in found.markdown
    assert found.classes[0].reads.verdict == "unknown"


def test_a_measured_limit_of_the_disk_decides_between_b_and_c():
    slow_disk = changed(q1_5=iostat(2000, 8e3, 4.0))
    assert analysis.disk_io.analyze(slow_disk).classes[0].by_rule == "C"
    assert analysis.disk_io.analyze(slow_disk, disk_kb_s=9e3).classes[0].by_rule == "B"


@pytest.mark.parametrize(
    "share, verdict", [(1.0, "cold"), (0.5, "mixed"), (0.02, "warm (page cache)"), (0.0, "warm (page cache)")]
)
def test_the_bytes_say_cold_mixed_or_warm_and_disagreement_is_said(share, verdict):
    needed = analysis.disk_reads.analyze(T4)[2].bytes_needed
    found = sampled(bytes_from_disk=int(share * needed))
    assert found.classes[0].reads.verdict == verdict
    assert ("disagree" in found.markdown) == (share < 0.9)


def test_small_requests_that_give_all_bytes_are_no_page_cache():
    found = sampled(**iostat(50, 200, 4.0), bytes_from_disk=50 * 10**9)
    assert found.classes[0].by_rule == "C" and "the disk gave the reads" in found.markdown


def test_compute_that_changes_is_not_called_the_same():
    found = analysis.disk_io.analyze(changed(q4_breakdown_disk={"compute_layer_decoding_s": 0.02}))
    assert "not the same" in text(found, "(a)") and "Together with (a)" not in text(found, "(b)")


def test_median_beside_mean():
    found = analysis.disk_io.analyze(changed(q4_breakdown_disk={"load_weight_s_median": 0.05}))
    assert "raise the mean" in text(found, "Part 2")


def test_a_zero_timer_is_no_ratio():
    found = analysis.disk_io.analyze(changed(q4_breakdown_gpu={"load_weight_s": 0.0, "compute_layer_decoding_s": 0.0}))
    assert found.load_ratio is None and "no ratio" in text(found, "(b)")


# ---- what is missing


def test_a_missing_row_is_named_and_nothing_is_made_of_it():
    sweep = analysis.offload_sweep.analyze(changed(q1_3=None))
    assert "50 % GPU + 50 % disk" in sweep.gaps[0]
    assert [s.ratio is None for s in sweep.steps] == [False, True, True, False]
    assert "no figures for (3)→(4)" in text(sweep, "(a)") and "no figures for (2)→(3)" in text(sweep, "(b)")


def test_a_failed_row_is_named_with_its_reason():
    failed = {"status": "failed", "reason": "gpu_oom: CUDA out of memory", "total_throughput_tok_s": None}
    sweep = analysis.offload_sweep.analyze(changed(q1_1=failed))
    assert "Failed: 100 % GPU" in sweep.markdown and "CUDA out of memory" in sweep.markdown
    assert sweep.steps[0].ratio is None


def test_no_rows_at_all():
    for answer in QUESTION.values():
        assert "Missing" in answer(()).markdown


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(range(len(T4))), unique=True))
def test_any_rows_in_any_order_give_only_what_can_be_derived(order):
    rows = [T4[i] for i in order]
    speed = {p.run_id: p.total_throughput_tok_s for p in rows}
    for question, answer in QUESTION.items():
        found = answer(rows)
        markdown = found.markdown
        assert not re.search(r"\b(nan|None|inf|np\.)", markdown)
        for row in QUESTIONS[question]:
            if row.page_cache is None and row.id not in speed:
                assert row.label in markdown
    for step in analysis.offload_sweep.analyze(rows).steps:
        assert (step.ratio is not None) == (step.before in speed and step.after in speed)
        if step.ratio:
            assert step.ratio.value == speed[step.before] / speed[step.after]
    for a, b, word in (("q1-1", "q1-2", "2.28"), ("q1-2", "q1-3", "35.51"), ("q1-4", "q1-5", "1.97")):
        assert (word in analysis.offload_sweep.analyze(rows).markdown) == (a in speed and b in speed)
    for a, b, word in (("q1-1", "q3-gpu-4bit", "0.37x"), ("q1-5", "q3-disk-4bit", "4.67x")):
        assert (word in analysis.weight_compression.analyze(rows).markdown) == (a in speed and b in speed)
    assert ("6,700x" in analysis.disk_io.analyze(rows).markdown) == (
        {"q4-breakdown-gpu", "q4-breakdown-disk"} <= set(speed)
    )
    analysis.disk_reads.markdown(rows)


positive = st.floats(1e-4, 1e5)
spread = st.floats(0, 0.5)


@st.composite
def other_figures(draw):
    found = []
    for point in T4:
        speed, width = draw(positive), draw(spread)
        found.append(
            point.model_copy(
                update={
                    "total_throughput_tok_s": speed,
                    "wall_time_s": None,
                    "total_throughput_tok_s_range": (speed * (1 - width), speed * (1 + width)),
                    "peak_gpu_mem_gib": draw(st.none() | positive),
                    "bytes_from_disk": draw(st.none() | st.integers(0, 10**12)),
                    "load_weight_s": draw(st.none() | st.just(0.0) | positive),
                    "compute_layer_decoding_s": draw(st.none() | st.just(0.0) | positive),
                    "disk_r_s_peak": draw(st.none() | st.floats(0, 1e6)),
                    "disk_rkb_s_peak": draw(st.none() | st.floats(0, 1e7)),
                    "disk_rareq_kb_peak": draw(st.none() | st.floats(0, 1024)),
                }
            )
        )
    return found


@hypothesis_settings(max_examples=60, deadline=None)
@given(other_figures(), st.none() | positive)
def test_any_figures_get_an_answer(rows, limit):
    answers = [
        analysis.offload_sweep.analyze(rows),
        analysis.batch_size.analyze(rows, limit),
        analysis.weight_compression.analyze(rows),
        analysis.disk_io.analyze(rows, limit),
    ]
    for markdown in [a.markdown for a in answers] + [analysis.disk_reads.markdown(rows)]:
        assert not re.search(r"\b(nan|None|inf|np\.)|e[+-]\d", markdown)


# ---- values and words


@given(st.tuples(positive, spread), st.tuples(positive, spread))
def test_a_ratio_holds_every_ratio_of_its_repeats(a, b):
    a, b = (Value.of(v, (v * (1 - s), v * (1 + s))) for v, s in (a, b))
    found = a.over(b)
    for x, y in itertools.product((a.low, a.value, a.high), (b.low, b.value, b.high)):
        assert found.low <= x / y * (1 + 1e-12) and x / y <= found.high * (1 + 1e-12)
    assert a.differs_from(b) == b.differs_from(a) and not a.differs_from(a)


@given(st.floats(1e-9, 1e12))
def test_plain_numbers_keep_three_digits_and_have_no_exponent(value):
    assert "e" not in plain(value)
    assert float(plain(value).replace(",", "")) == pytest.approx(value, rel=0.006)


def test_words():
    assert (plain(6737.3, 2), size(1414471680)) == ("6,700", "1.41 GB")
    assert [seconds(s) for s in (0.0000033, 0.000033, 0.00558, 0.1, 36.8)] == [
        "3.30 µs",
        "0.0330 ms",
        "5.58 ms",
        "0.100 s",
        "36.8 s",
    ]
    assert [nearest_power_of_ten(x) for x in (0.35, 3.2, 8.67, 39.4, 63)] == [0.1, 1, 10, 10, 100]
    assert (listed([]), listed("a"), listed("abc")) == ("", "a", "a, b and c")
    assert in_line("a|b\n<i>") == r"a\|b \<i\>"


def emulated(**changes: dict) -> list:
    return [p.model_copy(update={"kind": "measured on the emulated GPU"}) for p in changed(**changes)]


def test_page_cache_is_no_reason_where_the_emulation_paces_the_disk():
    warm = {"q1_3": {"bytes_from_disk": 0}, "q1_4": {"bytes_from_disk": 0}, "q1_5": {"bytes_from_disk": 0}}
    measured, paced = changed(**warm), emulated(**warm)
    assert "also holds the difference between page cache and disk" in analysis.disk_reads.markdown(measured)
    assert "the emulation paces the disk tier" in analysis.disk_reads.markdown(paced)
    assert (
        "disk's alone" in analysis.offload_sweep.analyze(measured).markdown
        and "disk's alone" not in analysis.offload_sweep.analyze(paced).markdown
    )


@pytest.mark.parametrize(
    "medians, said, not_said",
    [
        ((0.006, 0.006), "the means differ, the medians are the same to within 25 %", "something besides"),
        ((0.006, 0.012), "something besides computing (threads", "cold"),
        ((None, None), "cold first calls", "medians"),
    ],
)
def test_a_cold_first_call_is_not_blamed_for_what_the_medians_show(medians, said, not_said):
    name = "compute_layer_decoding_s"
    answer = analysis.disk_io.analyze(
        changed(
            q4_breakdown_gpu={name: 0.006, f"{name}_median": medians[0]},
            q4_breakdown_disk={name: 0.012, f"{name}_median": medians[1]},
        )
    )
    text = next(part.reason for part in answer.parts if part.title.startswith("(a)"))
    assert said in text and not_said not in text


@pytest.mark.parametrize("medians, same", [((0.0006, 0.0007), True), ((0.0006, 0.0011), False)])
def test_means_that_agree_do_not_hide_that_the_usual_layer_steps_differ(medians, same):
    name = "compute_layer_decoding_s"
    answer = analysis.disk_io.analyze(
        changed(
            q4_breakdown_gpu={name: 0.006, f"{name}_median": medians[0]},
            q4_breakdown_disk={name: 0.0062, f"{name}_median": medians[1]},
        )
    )
    compute, load = answer.parts[-2].reason, answer.parts[-1].reason
    assert ("the means are the same to within 25 %, the medians are not" not in compute) is same
    assert ("Together with (a)" in load) is same


def test_a_few_slow_calls_do_not_decide_what_takes_longer():
    """An H200's breakdown with all weights on disk: three of twenty calls loaded kernels."""
    compute, load = "compute_layer_decoding_s", "load_weight_s"
    answer = analysis.disk_io.analyze(
        changed(
            q4_breakdown_disk={
                load: 0.00559,
                f"{load}_median": 0.00531,
                compute: 0.00636,
                f"{compute}_median": 0.000809,
            }
        )
    )
    text = next(part.reason for part in answer.parts if part.title.startswith("Part 2"))
    assert "5.59 ms / 6.36 ms = 0.88 by the means that FlexGen prints." in text
    assert "By the medians 5.31 ms / 0.809 ms = 6.56." in text
    assert "So load_weight is the longer part of a usual layer-step. A few slow calls" in text
    assert "raise the mean of compute_layer_decoding." in text


def test_a_step_that_costs_nothing_is_explained_by_what_hides_it():
    speed = next(p for p in T4 if p.run_id == "q1-3").total_throughput_tok_s
    same = analysis.offload_sweep.analyze(changed(q1_4={"total_throughput_tok_s": speed})).markdown
    assert "(3)→(4) does not lengthen the pass measurably: the copies over PCIe" in same
    assert "hide behind the disk tier" in same
