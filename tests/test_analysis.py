"""The answers on the hand-in's figures, on hand-made sweeps, and with rows missing."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from factories import T4, changed, disk_series
from helpers import analysis
from helpers.analysis.values import Interval, Value, in_line, listed, orders, plain, seconds, size
from helpers.homework import DISK
from helpers.predict import gpu_memory
from helpers.settings import OffloadSplit, RunSettings, Workload

QUESTION = {
    "q1": analysis.offload_sweep.analyze,
    "q2": analysis.batch_size.analyze,
    "q3": analysis.weight_compression.analyze,
    "q4": analysis.disk_io.analyze,
}
MOST_VISIBLE_WORDS = 60


def visible(part):
    return f"{part.verdict} {part.reason}"


def readable(answer):
    """Check what every answer promises a reader: a verdict, few words, no raw values."""
    for part in answer.parts:
        assert part.verdict and len(visible(part).split()) <= MOST_VISIBLE_WORDS, visible(part)
    assert not re.search(r"\b(nan|None|inf|np\.)|e[+-]\d", answer.markdown)
    return answer


def sweep(*tokens_per_s, repeats=0.0):
    """The answer to question 1 for other throughputs of (1) to (5), each with a spread of repeats."""
    runs = changed(
        **{
            f"q1_{i}": {
                "total_throughput_tok_s": speed,
                "wall_time_s": None,
                "total_throughput_tok_s_range": (speed * (1 - repeats), speed * (1 + repeats)) if repeats else None,
            }
            for i, speed in enumerate(tokens_per_s, start=1)
        }
    )
    return readable(analysis.offload_sweep.analyze(runs))


# ---- the hand-in's figures


def test_q1_matches_the_hand_in():
    found = readable(analysis.offload_sweep.analyze(T4))
    assert [f"{step.ratio.value:.2f}" for step in found.steps] == ["2.28", "35.51", "1.15", "1.97"]
    assert [step.link for step in found.steps] == ["PCIe", "Disk", "PCIe", "Disk"]
    # The disk already bounded the run before the third step, which adds PCIe.
    assert [step.longest_after for step in found.steps] == ["PCIe", "Disk", "Disk", "Disk"]
    assert found.rates.faster_link == "PCIe"
    a, b = found.parts
    assert a.verdict.startswith("No") and "front" in a.verdict and "already dominates" in a.reason
    assert b.verdict.startswith("Disk, in both pairs")


def test_q1_tells_page_cache_from_pcie():
    """(3) read faster than the disk can: at (5)'s rate its pass would take 1.4145 GB / 0.2533 GB/s."""
    found = analysis.offload_sweep.analyze(T4)
    corrected = [step.ratio_at_one_disk_rate for step in found.steps]
    assert corrected[2] == pytest.approx(1.015, abs=0.002) and corrected[3] is None
    assert "1.016" in visible(found.parts[0])


def test_q1_rates_enclose_bytes_over_time():
    """Oracle: opt-1.3b's fp16 bytes by hand (24 layers of 12 h^2 + 13 h, the embeddings, the last norm)."""
    h, vocabulary = 2048, 50272
    weights = 2 * (24 * (12 * h * h + 13 * h) + 2 * vocabulary * h + 2050 * h + 2 * h)
    disk = analysis.offload_sweep.analyze(T4).rates.disk
    assert disk.low < weights * 0.357 / 4 < disk.high < 1.06 * disk.low


def test_q2_matches_the_hand_in():
    found = readable(analysis.batch_size.analyze(T4))
    assert [f"{step.ratio.value:.2f}" for step in found.steps] == ["4.01", "4.00"]
    assert "both match" in found.parts[0].verdict and found.moving_share.low > 0.9
    assert found.parts[1].verdict.startswith("No")


def test_q2_memory_ends_growth_at_the_batch_that_fits():
    found = readable(analysis.batch_size.analyze(T4, gpu_mem_gib=14912 / 1024))
    slope = (1.051 - 0.489) / 15
    assert found.growth.gib_per_sequence == pytest.approx(slope)
    largest = found.growth.largest_batch
    assert largest == pytest.approx(16 + math.floor((14912 / 1024 - 1.051) / slope), rel=0.05)
    run = RunSettings(model="opt-1.3b", split=OffloadSplit.parse(DISK), device="cuda")
    peaks_mib = [
        gpu_memory.peak_gpu_memory(run.model_copy(update={"workload": Workload(gpu_batch_size=batch)}), 0).high_bytes
        / 2**20
        for batch in (largest, largest + 1)
    ]
    assert peaks_mib[0] <= 14912 < peaks_mib[1]
    assert f"{largest}" in visible(found.parts[1]) and largest < found.growth.compute_overtakes_at


def test_q3_matches_the_hand_in():
    found = readable(analysis.weight_compression.analyze(T4))
    assert f"{found.gpu.ratio.value:.2f} {found.disk.ratio.value:.2f}" == "0.37 4.67"
    assert (found.gpu.dominates, found.disk.dominates) == ("cost", "saving")
    assert found.byte_ratio == pytest.approx(3.55, abs=0.01)
    assert found.disk.page_cache == 1  # 4.67 is more than 3.55 times fewer bytes explain


def test_q4_matches_the_hand_in():
    found = readable(analysis.disk_io.analyze(T4))
    assert found.classes[0].by_rule == "A"
    assert f"{found.gpu.load_over_compute:.4f} {found.disk.load_over_compute:.2f}" == "0.0054 33.51"
    assert found.compute_is_the_same and found.gpu.compute_exceeds_pass  # 50 layers of it are 5 times (1)'s pass
    assert "about 4 orders of magnitude" in found.parts[2].verdict


def test_reads_faster_than_the_disk_are_page_cache():
    reads = {r.run_id: r for r in analysis.disk_reads.analyze(T4)}
    assert {run for run, r in reads.items() if r.partly_cached} == {"q1-3", "q3-disk-4bit"}
    gb_s = {run: round(r.needed_bytes_per_s / 1e9, 2) for run, r in reads.items()}
    assert gb_s == {"q1-3": 0.29, "q1-4": 0.25, "q1-5": 0.25, "q2-b1": 0.25, "q2-b16": 0.25, "q3-disk-4bit": 0.33}
    assert reads["q1-5"].disk_bytes_per_s == 252500 * 1024


# ---- question 1 on other machines


def test_close_ratios_are_a_yes():
    assert sweep(100, 50, 25, 12.5, 6.25).parts[0].verdict.startswith("Yes")


def test_the_back_ratios_can_be_the_larger():
    assert "back ratio is larger in both" in sweep(100, 90, 50, 20, 5).parts[0].verdict


def test_pcie_can_be_the_larger_ratio():
    assert sweep(100, 10, 8, 4, 3).parts[1].verdict.startswith("PCIe, in both pairs")


def test_ratios_within_the_spread_are_neither():
    assert sweep(100, 60, 30, 20, 10, repeats=0.2).parts[1].verdict.startswith("Neither")
    assert not sweep(100, 90, 50, 45, 25, repeats=0.2).steps[0].slows


def test_the_longest_part_is_named_only_when_decided():
    """Copying takes 0.8 to 1.8 s of (2)'s pass and computing 1 s; then at least 1.2 s against 0.8 s."""
    open_question = sweep(180, 100, 5, 4, 2).steps[0]
    assert open_question.longest_after is None and set(open_question.may_be_longest_after) == {"compute", "PCIe"}
    assert sweep(220, 100, 5, 4, 2).steps[0].longest_after == "PCIe"


def test_hidden_copies_bound_pcie_from_below_only():
    rates = sweep(100, 100, 50, 45, 25).rates
    assert rates.pcie.high == math.inf and rates.parts["q1-2"].longest != "PCIe"


def test_bytes_from_disk_bound_pcie_too():
    """PCIe at 4 GB/s, the disk at 10 GB/s, in series: the whole pass of (5) is neither link's."""
    gpu, half, whole = 0.06, 1.4145, 2.8374
    times = (gpu, half / 4, half / 4 + half / 10, 2 * half / 4 + half / 10, whole / 4 + whole / 10)
    found = sweep(*(4 / max(time, gpu) for time in times))
    assert found.rates.pcie.low <= 4e9 <= found.rates.pcie.high
    assert found.rates.disk.low <= 10e9 <= found.rates.disk.high
    assert found.rates.parts["q1-5"].longest != "Disk" and found.rates.faster_link is None


def test_no_part_is_longer_than_its_pass():
    for found in (analysis.offload_sweep.analyze(T4), sweep(100, 120, 3, 5, 0.1), sweep(1, 50, 40, 60, 55)):
        for step in found.steps:
            time = 4 / step.after.run.total_throughput_tok_s
            assert all(part.high <= 1.011 * time for part in found.rates.parts[step.after.id].by_name.values())


def test_contradicting_rows_bound_nothing():
    """(5), with twice the bytes, is faster than (2)."""
    assert sweep(100, 2, 10, 10, 10).rates.pcie.high == math.inf


# ---- question 2 on other machines


def batches(*latencies, **others):
    rows = zip(("q2_b1", "q1_5", "q2_b16"), (1, 4, 16), latencies)
    figures = {name: {"wall_time_s": s, "total_throughput_tok_s": 16 * batch / s} for name, batch, s in rows}
    return readable(analysis.batch_size.analyze(changed(**figures, **others)))


def test_a_batch_that_stops_scaling():
    found = batches(10.0, 10.0, 41.0)
    assert not found.steps[1].grows and "without gain" in found.parts[0].verdict
    assert "grows at least until" not in found.markdown


def test_growth_is_not_blamed_on_short_computing():
    """Computing 16 sequences takes at most 4 x 0.06 s of each pass; wall time grows by 22 s per pass."""
    found = batches(179.0, 179.0, 540.0)
    assert not found.computing_may_explain_growth and "too short" in found.parts[0].reason


def test_more_than_ideal_is_not_the_batch():
    assert "another reason" in batches(20.0, 10.0, 10.0).parts[0].reason


def test_launch_bound_passes_are_not_called_weight_bound():
    found = batches(1.6, 1.6, 1.6, q1_1={"total_throughput_tok_s": 45.0})
    assert found.moving_share.low < 0.5 and "launches" in found.parts[0].reason


@pytest.mark.parametrize("peaks", [(1.0, 1.0, 1.0), (1.2, 1.1, 1.0)])
def test_peaks_that_do_not_grow(peaks):
    rows = zip(("q2_b1", "q1_5", "q2_b16"), peaks)
    found = readable(analysis.batch_size.analyze(changed(**{n: {"peak_gpu_mem_gib": p} for n, p in rows}), 10.0))
    assert found.growth.gib_per_sequence <= 0 and "doesn't grow" in found.parts[1].verdict


def test_a_capacity_below_the_peak_is_doubted():
    assert "isn't this GPU's" in readable(analysis.batch_size.analyze(T4, gpu_mem_gib=0.5)).markdown


# ---- question 3 on other machines


def compressed(gpu, disk, **fields):
    return readable(
        analysis.weight_compression.analyze(
            changed(
                q3_gpu_4bit={"total_throughput_tok_s": gpu},
                q3_disk_4bit={"total_throughput_tok_s": disk, **fields.pop("disk_4bit", {})},
                q1_5={"wall_time_s": None, **fields},
            )
        )
    )


def test_slower_with_a_warm_page_cache_is_the_conversion():
    found = compressed(24.1, 0.2, bytes_from_disk=0, disk_4bit={"bytes_from_disk": 0})
    assert found.disk.dominates == "cost" and "fp16 buffer" in found.parts[0].reason


def test_slower_with_less_page_cache_does_not_compare():
    found = compressed(24.1, 0.2, bytes_from_disk=0, disk_4bit={"bytes_from_disk": 10**10})
    assert found.disk.dominates is None and "don't compare" in found.parts[0].reason


def test_slower_for_an_unknown_reason_says_so():
    found = compressed(24.1, 0.2, disk_rkb_s_peak=None)
    assert found.disk.dominates is None and "can't tell" in found.parts[0].reason


def test_faster_on_the_gpu_is_no_saved_transfer():
    found = compressed(80.0, 1.0)
    assert found.gpu.direction == "faster" and found.gpu.dominates is None


def test_unchanged_throughput():
    found = compressed(65.8, 0.357)
    assert (found.gpu.direction, found.disk.direction) == ("unchanged", "unchanged")


@pytest.mark.parametrize("speed, words", [(0.7, "gains only"), (0.357 * 3.5, "comes close"), (3.0, "gains more")])
def test_the_gain_is_compared_with_the_bytes(speed, words):
    assert words in compressed(24.1, speed).parts[1].reason


# ---- question 4 on other machines


def sampled(**fields):
    return readable(analysis.disk_io.analyze(changed(q1_5=fields)))


def iostat(r_s, rkb_s, rareq_kb):
    return {"disk_r_s_peak": r_s, "disk_rkb_s_peak": rkb_s, "disk_rareq_kb_peak": rareq_kb}


@pytest.mark.parametrize(
    "peaks, expected",
    [
        (iostat(2000, 250e3, 32.0), "A"),
        (iostat(3, 384, 128.0), "A"),
        (iostat(20000, 240e3, 12.0), "B"),
        (iostat(60000, 240e3, 4.0), "B"),
        (iostat(50, 200, 4.0), "C"),
        (iostat(3, 12, 4.0), "C"),
        (iostat(50, 800, 16.0), "C"),
        (iostat(0, 0, None), "C"),
        (iostat(None, None, None), "unknown"),
        (iostat(100, 4e3, None), "unknown"),
    ],
)
def test_the_homeworks_rule(peaks, expected):
    found = sampled(**peaks)
    assert found.classes[0].by_rule == expected
    assert ("Class" in found.parts[0].verdict) == (expected in "ABC")


def test_nothing_from_the_disk_is_class_c():
    found = sampled(**iostat(0, 0, None), bytes_from_disk=0)
    assert "0 of 45.4 GB came from the disk" in found.parts[0].verdict


def test_unknown_counters_are_not_zero():
    found = sampled(**iostat(None, None, None), notes=("no /proc/diskstats",))
    assert "no /proc/diskstats" in found.parts[0].verdict
    assert found.classes[0].reads.verdict == "unknown"


def test_a_measured_disk_rate_decides_between_b_and_c():
    slow_disk = changed(q1_5=iostat(2000, 8e3, 4.0))
    assert analysis.disk_io.analyze(slow_disk).classes[0].by_rule == "C"
    assert analysis.disk_io.analyze(slow_disk, disk_kb_s=9e3).classes[0].by_rule == "B"


@pytest.mark.parametrize(
    "share, verdict", [(1.0, "cold"), (0.5, "mixed"), (0.02, "warm (page cache)"), (0.0, "warm (page cache)")]
)
def test_bytes_that_contradict_the_peak_are_second(share, verdict):
    needed = analysis.disk_reads.analyze(T4)[2].bytes_needed
    found = sampled(bytes_from_disk=int(share * needed))
    assert found.classes[0].reads.verdict == verdict
    assert found.parts[0].reason.startswith("But") == (share < 0.9)


def test_samples_that_contradict_the_peak_are_second():
    """One large request among small ones: the rule goes by the peak, most samples say otherwise."""
    series = disk_series(
        time_s=(1.0, 2.0, 3.0, 4.0),
        reads_per_s=(9.0,) * 4,
        read_kib_per_s=(99.0,) * 4,
        request_kib=(4.0, 4.0, 128.0, 4.0),
        util_percent=(1.0,) * 4,
    )
    found = sampled(disk=series, windows_s=((0.0, 5.0),))
    assert found.classes[0].by_rule == "A" and found.classes[0].samples_disagreeing == 3
    assert found.parts[0].reason.startswith("But 3 of 4 samples")


def test_another_reader_is_second():
    note = "300 MiB were read from sda by something other than this run"
    found = sampled(notes=(note,))
    assert found.parts[0].reason.startswith("But another process") and "Disturbed" in found.gaps[0]


def test_a_median_next_to_the_peak():
    found = sampled(disk=disk_series(), windows_s=((9.0, 13.0),))
    assert found.classes[0].request_kb_median == 16.0


@pytest.mark.parametrize(
    "gpu, disk, same",
    [
        ((0.006, 0.0006), (0.0062, 0.0011), False),  # the means agree, the medians don't
        ((0.006, 0.0006), (0.0200, 0.0007), True),  # a few slow calls
        ((0.006, None), (0.0200, None), False),
        ((0.006, None), (0.0062, None), True),
    ],
)
def test_a_typical_layer_step_decides_if_computing_is_the_same(gpu, disk, same):
    name = "compute_layer_decoding_s"
    found = readable(
        analysis.disk_io.analyze(
            changed(
                q4_breakdown_gpu={name: gpu[0], f"{name}_median": gpu[1]},
                q4_breakdown_disk={name: disk[0], f"{name}_median": disk[1]},
            )
        )
    )
    assert found.compute_is_the_same == same
    assert ("With (a)" in found.parts[2].reason) == same


@pytest.mark.parametrize("load, words", [(0.5, "takes no longer"), (3.0, "less than an order"), (0.0, "Can't tell")])
def test_load_weight_that_hardly_differs(load, words):
    found = readable(analysis.disk_io.analyze(changed(q4_breakdown_disk={"load_weight_s": 0.000033 * load})))
    assert words in found.parts[2].verdict


# ---- what is missing or was disturbed


def test_a_missing_row_is_named_and_its_ratios_left_out():
    found = readable(analysis.offload_sweep.analyze(changed(q1_3=None)))
    assert "50 % GPU + 50 % disk" in found.gaps[0]
    assert [step.name for step in found.steps] == ["(1)→(2)", "(2)→(4)", "(4)→(5)"]
    assert all(part.verdict.startswith("Can't tell") for part in found.parts[:2])


def test_only_the_ends_of_the_sweep_still_make_a_step():
    found = readable(analysis.offload_sweep.analyze([run for run in T4 if run.run_id in ("q1-1", "q1-5")]))
    assert [(step.name, step.link) for step in found.steps] == [("(1)→(5)", "Disk")]


def test_a_failed_row_opens_the_answer():
    failed = {"status": "failed", "reason": "gpu_oom: CUDA out of memory", "total_throughput_tok_s": None}
    found = readable(analysis.offload_sweep.analyze(changed(q1_1=failed)))
    assert "CUDA out of memory" in found.markdown.splitlines()[0]


def test_a_disturbed_row_opens_the_answer():
    slow = {"notes": ("the processor core ran at 52 % of the fastest seen here: others use it too",)}
    slower = {"notes": ("the processor core ran at 41 % of the fastest seen here: others use it too",)}
    found = analysis.offload_sweep.analyze(changed(q1_2=slow, q1_4=slower))
    assert found.gaps == ("Disturbed: (2) and (4) (the CPU core ran at 41 to 52 % of its full speed).",)
    assert not analysis.weight_compression.analyze(changed(q1_2=slow)).gaps
    assert "100 % GPU" in analysis.batch_size.analyze(changed(q1_1=slow)).gaps[0]  # what its passes are compared with


def test_no_rows_at_all():
    for answer in QUESTION.values():
        assert "Missing" in readable(answer(())).markdown


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(T4), unique_by=id))
def test_any_rows_in_any_order_give_the_same_ratios(runs):
    speed = {run.run_id: run.total_throughput_tok_s for run in runs}
    for answer in QUESTION.values():
        readable(answer(runs))
    for step in analysis.offload_sweep.analyze(runs).steps:
        assert step.ratio.value == pytest.approx(speed[step.before.id] / speed[step.after.id])
    compression = analysis.weight_compression.analyze(runs)
    assert (compression.gpu is not None) == ({"q1-1", "q3-gpu-4bit"} <= set(speed))
    assert (compression.disk is not None) == ({"q1-5", "q3-disk-4bit"} <= set(speed))
    analysis.disk_reads.markdown(runs)


positive = st.floats(1e-4, 1e5)
spread = st.floats(0, 0.5)


odd = positive | st.sampled_from((1e-300, 1e-12, 1e100, 1e300))  # slips that a file may hold


@st.composite
def other_figures(draw):
    found = []
    for run in T4:
        speed, width = draw(odd), draw(spread)
        figures = {
            "total_throughput_tok_s": speed,
            "wall_time_s": None,
            "total_throughput_tok_s_range": (speed * (1 - width), speed * (1 + width)),
            "peak_gpu_mem_gib": draw(st.none() | odd),
            "bytes_from_disk": draw(st.none() | st.integers(0, 10**12)),
            "load_weight_s": draw(st.none() | st.just(0.0) | odd),
            "compute_layer_decoding_s": draw(st.none() | st.just(0.0) | odd),
            "disk_r_s_peak": draw(st.none() | st.floats(0, 1e6)),
            "disk_rkb_s_peak": draw(st.none() | st.floats(0, 1e7)),
            "disk_rareq_kb_peak": draw(st.none() | st.floats(0, 1024)),
        }
        found.append(run.model_copy(update=figures))
    return found


@hypothesis_settings(max_examples=100, deadline=None)
@given(other_figures(), st.none() | positive)
def test_any_figures_get_a_readable_answer(runs, limit):
    readable(analysis.offload_sweep.analyze(runs))
    readable(analysis.batch_size.analyze(runs, limit))
    readable(analysis.weight_compression.analyze(runs))
    readable(analysis.disk_io.analyze(runs, limit))
    analysis.disk_reads.markdown(runs)


# ---- values and words


@given(st.tuples(positive, spread), st.tuples(positive, spread))
def test_a_ratio_encloses_every_ratio_of_its_repeats(a, b):
    a, b = (Value.of(v, (v * (1 - s), v * (1 + s))) for v, s in (a, b))
    found = a.over(b)
    for x, y in itertools.product((a.low, a.value, a.high), (b.low, b.value, b.high)):
        assert found.low <= x / y * (1 + 1e-12) and x / y <= found.high * (1 + 1e-12)
    assert a.differs_from(b) == b.differs_from(a) and not a.differs_from(a)


@given(st.floats(1e-9, 1e12))
def test_plain_numbers_keep_three_digits_and_have_no_exponent(value):
    assert "e" not in plain(value)
    assert float(plain(value).replace(",", "")) == pytest.approx(value, rel=0.006)


@given(st.floats(10, 1e9), st.floats(1, 1e4))
def test_orders_of_magnitude_hold_for_the_whole_range(low, wider):
    words, high = orders(low, low * wider), low * wider
    count = 1 if "one" in words else int(re.search(r"\d+", words)[0])
    if words.startswith("about"):
        assert 10 ** (count - 0.21) <= low and high <= 10 ** (count + 0.21)
    else:
        assert low >= 10**count * (1 - 1e-9)


def test_words():
    assert (plain(6737.3, 2), size(1414471680)) == ("6,700", "1.41 GB")
    figures = (0.0000033, 0.000033, 0.00558, 0.1, 36.8)
    assert [seconds(s) for s in figures] == ["3.30 µs", "0.0330 ms", "5.58 ms", "0.100 s", "36.8 s"]
    assert (listed([]), listed("a"), listed("abc")) == ("", "a", "a, b and c")
    assert in_line("a|b\n<i>") == r"a\|b \<i\>"
    bounds = Interval(10.0, 18.0), Interval(10.0), Interval(0.0, 18.0), Interval(10.0, 10.1), Interval(1.0, 900.0)
    words = [interval.words(lambda value: f"{value:.0f} GB/s") for interval in bounds]
    assert words == ["10 to 18 GB/s", "at least 10 GB/s", "at most 18 GB/s", "10 GB/s", "at least 1 GB/s"]
