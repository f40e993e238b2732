"""The emulated machine's clock: each part at its rate, waits that add up exactly, and books that show it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, strategies as st

from factories import done, mini, run_one
from helpers.engine.pacing import BEHIND, OPERATORS_A_LAYER, Pacer
from helpers.machine.emulation import EMULATED_T4
from helpers.placement import place
from helpers.predict import time_model
from helpers.settings import Workload

H2D, DISK = EMULATED_T4.h2d_gb_s * 1e9, EMULATED_T4.disk_gb_s * 1e9
LAUNCH_S = EMULATED_T4.layer_overhead_us / 1e6


class Clock:
    """A clock that moves when someone sleeps, or when the CPU `works`."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def works(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pacer(clock):
    pacer = Pacer(EMULATED_T4, clock, clock.works)
    pacer.begin()
    pacer.next_pass()
    return pacer


def test_nothing_waits_before_the_measurement(clock):
    pacer = Pacer(EMULATED_T4, clock, clock.works)
    pacer.use_disk(10**9)
    pacer.copy_to_device(10**9, blocking=True)
    pacer.launch_layer()
    pacer.synchronize()
    assert clock.now_s == 100


@given(st.lists(st.tuples(st.sampled_from(["disk", "h2d", "d2h"]), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_each_part_takes_the_time_of_its_bytes(work):
    clock = Clock()
    pacer = Pacer(EMULATED_T4, clock, clock.works)
    pacer.begin()
    pacer.next_pass()
    with pacer.side_stream():
        for part, nbytes in work:
            if part == "disk":
                pacer.use_disk(nbytes)
            elif part == "h2d":
                pacer.copy_to_device(nbytes, blocking=True)
            else:
                pacer.copy_to_host(nbytes, blocking=True)
    total = {part: sum(nbytes for one, nbytes in work if one == part) for part in ("disk", "h2d", "d2h")}
    booked = pacer.passes[0]
    assert booked["disk"] == pytest.approx(total["disk"] / DISK)
    assert booked["host to device"] == pytest.approx(total["h2d"] / H2D)
    assert clock.now_s - 100 == pytest.approx(sum(booked.values()))  # one thread waits for each


def test_copies_overlap_with_computing(pacer, clock):
    with pacer.side_stream():
        pacer.copy_to_device(int(H2D), blocking=False)  # a second
    pacer.launch_layer()
    pacer.dequantise(0.6 * EMULATED_T4.dequantize_gb_s * 1e9)
    pacer.synchronize()
    assert clock.now_s - 100 == pytest.approx(1.0)


def test_the_default_stream_keeps_its_order(pacer, clock):
    pacer.dequantise(0.5 * EMULATED_T4.dequantize_gb_s * 1e9)
    pacer.copy_to_device(int(H2D), blocking=False)
    pacer.synchronize()
    assert clock.now_s - 100 == pytest.approx(1.5)


def test_launching_and_computing_a_layer_overlap(pacer, clock):
    pacer.launch_layer()
    pacer.dequantise(0.5 * LAUNCH_S * EMULATED_T4.dequantize_gb_s * 1e9)
    pacer.synchronize()
    assert clock.now_s - 100 == pytest.approx(LAUNCH_S)


def test_a_product_is_bound_by_arithmetic_or_by_memory(pacer, clock):
    flop_s, byte_s = EMULATED_T4.gpu_fp16_tflop_s * 1e12, EMULATED_T4.gpu_mem_gb_s * 1e9
    pacer.multiply(flop_s, 0.2 * byte_s)
    pacer.multiply(0.2 * flop_s, byte_s)
    pacer.synchronize()
    assert clock.now_s - 100 == pytest.approx(2.0)


def test_copy_threads_share_one_disk():
    pacer = Pacer(EMULATED_T4, lambda: 100.0, lambda seconds: None)
    pacer.begin()
    pacer.next_pass()
    threads = [threading.Thread(target=pacer.use_disk, args=(int(DISK),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slept = []
    pacer._sleep = slept.append
    pacer.synchronize()
    assert slept == [pytest.approx(4.0)]


@pytest.mark.parametrize("late_by, behind", [(0.5 * BEHIND, 0), (2 * BEHIND, 1)])
def test_a_pass_is_behind_if_the_cpu_was_too_slow(pacer, clock, late_by, behind):
    for _ in range(10):
        pacer.launch_layer()
    clock.works((1 + late_by) * 10 * LAUNCH_S)
    pacer.synchronize()
    pacer.next_pass()
    began_s = clock.now_s
    for _ in range(10):
        pacer.launch_layer()
    pacer.synchronize()
    pacer.end()
    assert pacer.passes_behind == behind
    made_up_for = 0 if behind else late_by * 10 * LAUNCH_S
    assert clock.now_s - began_s == pytest.approx(10 * LAUNCH_S - made_up_for)


def test_single_steps_take_their_time_after_a_late_one(clock):
    pacer = Pacer(EMULATED_T4, clock, clock.works)
    pacer.begin(makes_up=False)
    pacer.next_pass()
    steps_s = []
    for late_s in (0.0, 3 * LAUNCH_S, 0.0, 0.0):
        began_s = clock.now_s
        pacer.launch_layer()
        clock.works(late_s)
        pacer.synchronize()
        steps_s.append(clock.now_s - began_s)
    pacer.end()
    assert steps_s == pytest.approx([LAUNCH_S, 3 * LAUNCH_S, LAUNCH_S, LAUNCH_S]) and pacer.passes_behind == 1


# ---- the books of real runs


WORK = Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=16, gen_len=4)
SPLITS = ("100 0 100 0 100 0", "50 50 100 0 100 0", "50 0 100 0 100 0", "0 50 100 0 100 0", "0 0 100 0 100 0")


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("percent", SPLITS)
def test_each_pass_paces_the_bytes_that_it_moves(percent, compress, tmp_path, monkeypatch):
    """Counted from the placement: weights on the CPU and on disk cross PCIe once a pass, those on disk are read."""
    monkeypatch.setattr("helpers.engine.launcher.EMULATED_T4", twenty_times_faster())
    settings = mini(percent, workload=WORK, compress_weight=compress)
    paced = done(run_one(settings, tmp_path)).repeats[0].paced_s
    placed = place(settings.opt_model, settings.split.weights_gpu, settings.split.weights_cpu, compress)
    on_disk, on_cpu = placed.bytes_by_tier["disk"], placed.bytes_by_tier["cpu"]
    relayed = on_disk  # 4-bit values cross PCIe as the bytes they are: the copy converts at its end
    layers = len(settings.opt_model.layers)
    for i in range(WORK.gen_len - 1):  # the last pass loads no next layer
        if on_disk:
            assert paced["disk"][i] == pytest.approx(on_disk / DISK / 20, rel=0.05)
        if on_disk or on_cpu:
            assert paced["host to device"][i] == pytest.approx((on_cpu + relayed) / H2D / 20, rel=0.05)
        assert paced["launch overhead"][i] >= layers * LAUNCH_S / 20
        copies = sum(1 + t.compressed for layer in placed.layers for t in layer if t.tier == "cpu")
        launches = layers + copies / OPERATORS_A_LAYER
        assert paced["launch overhead"][i] == pytest.approx(launches * LAUNCH_S / 20, rel=0.05)


@pytest.mark.parametrize("percent, compress", [("100 0 100 0 100 0", True), ("100 0 0 100 100 0", False)])
def test_the_books_agree_with_the_prediction(percent, compress, tmp_path, monkeypatch):
    fast = twenty_times_faster()
    monkeypatch.setattr("helpers.engine.launcher.EMULATED_T4", fast)
    settings = mini(percent, workload=WORK, compress_weight=compress)
    paced = done(run_one(settings, tmp_path)).repeats[0].paced_s
    predicted = time_model.predict(settings, fast).terms_s
    for term in ("dequantisation", "GPU compute", "launch overhead"):
        assert sum(paced.get(term, (0.0,))) == pytest.approx(predicted[term], rel=0.1)


def twenty_times_faster():
    rates = ("gpu_mem_gb_s", "gpu_fp16_tflop_s", "dequantize_gb_s", "h2d_gb_s", "d2h_gb_s", "disk_gb_s")
    faster = {rate: 20 * getattr(EMULATED_T4, rate) for rate in rates}
    return EMULATED_T4.model_copy(update=faster | {"layer_overhead_us": EMULATED_T4.layer_overhead_us / 20})


# ---- the emulated machine is a T4 in slow motion


def test_its_proportions_are_the_t4s():
    from helpers import homework
    from helpers.machine.profiles import T4_COLAB

    def passes(profile, device):
        model = {"cuda": "opt-1.3b", "emulated": "opt-mini"}[device]
        runs = homework.plan("q1", device, model) | homework.plan("q3", device, model)
        return {name: 1 / time_model.predict(run, profile).total_throughput_tok_s for name, run in runs.items()}

    here, there = passes(EMULATED_T4, "emulated"), passes(T4_COLAB, "cuda")
    for slow, fast in (("q1-2", "q1-1"), ("q1-3", "q1-2"), ("q1-4", "q1-3"), ("q1-5", "q1-4"), ("q3-gpu-4bit", "q1-1")):
        assert here[slow] / here[fast] == pytest.approx(there[slow] / there[fast], rel=0.35)
    assert EMULATED_T4.h2d_gb_s >= 30 * EMULATED_T4.disk_gb_s
