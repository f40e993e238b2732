"""The explorer's numbers: every reachable state can be run, and what is shown is what the models predict."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings as budget, strategies as st

from explorer_factories import at, logged, t4
from helpers import explorer, homework, lab, results
from helpers.errors import Refused
from helpers.explorer import split_map as split_maps
from helpers.explorer.bench import EMULATED, _measured_profile, once, open_bench
from helpers.explorer.controls import BATCH_COUNTS, BATCH_SIZES, SUPPOSED
from helpers.explorer.frontier import frontier
from helpers.explorer.moves import moved
from helpers.explorer.roofline import PARTS, SIZES, roofline
from helpers.explorer.split_map import fit, split_map, with_split
from helpers.explorer.state import HOMES, State, WhatIf, values
from helpers.explorer.tour import compared
from helpers.explorer.view import view, without_split
from helpers.machine import profiles
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.measured_profile import from_ceilings
from helpers.machine.profiles import T4_COLAB
from helpers.placement import place
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.search import all_placements, fits, with_batch
from helpers.predict.time_model import TERMS, predict
from helpers.results import Log, Machine
from helpers.settings import RunSettings


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return open_bench("emulated", tmp_path_factory.mktemp("out"))


# ---- states ---------------------------------------------------------------------------------------------------------

SWITCHES = [
    "compress_weight",
    "compress_cache",
    "cpu_cache_compute",
    "pin_weight",
    "overlap",
    "fitted_buffers",
    "direct_reader",
    "cold",
]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["weights_gpu", "weights_cpu"]), st.integers(0, 100)),
        st.tuples(st.sampled_from(["cache", "activations"]), st.sampled_from(list(HOMES))),
        st.tuples(st.just("gpu_batch_size"), st.sampled_from(BATCH_SIZES)),
        st.tuples(st.just("num_gpu_batches"), st.sampled_from(BATCH_COUNTS)),
        st.tuples(st.just("prompt_len"), st.integers(7, 2047)),
        st.tuples(st.just("gen_len"), st.integers(1, 2041)),
        st.tuples(st.sampled_from(SWITCHES), st.booleans()),
        st.sampled_from([(name, value) for name in SUPPOSED for value in (0.0, *SUPPOSED[name])]),
        st.tuples(st.just("machine"), st.sampled_from([EMULATED, "t4-colab", "t4-gcp"])),
        st.tuples(st.just("model"), st.sampled_from(["opt-125m", "opt-1.3b", "opt-30b", "opt-mini"])),
    ),
    max_size=12,
)


@given(moves=MOVES)
@budget(max_examples=150, deadline=None)
def test_every_move_leads_to_a_state_that_can_run(bench, moves):
    state = bench.start
    for control, value in moves:
        state = moved(state, control, value, bench)
        settings, split, work = state.settings, state.settings.split, state.settings.workload
        assert RunSettings.model_validate_json(settings.model_dump_json()) == settings
        assert split.weights_gpu + split.weights_cpu + split.weights_disk == 100 and split.weights_disk >= 0
        assert work.prompt_len + work.gen_len <= settings.opt_model.max_positions
        assert settings.model in bench.models[state.machine]
        assert settings.device == ("emulated" if state.machine == EMULATED else "cuda")
        too_long = control in ("prompt_len", "gen_len") and value > settings.opt_model.max_positions - 7
        if control not in ("model", "cpu_cache_compute") and not too_long:  # these give way to what can run
            assert values(state)[control] == value


@given(gpu=st.integers(0, 100), cpu=st.integers(0, 100))
@budget(max_examples=50, deadline=None)
def test_the_share_that_was_not_moved_gives_way(bench, gpu, cpu):
    split = at(bench, weights_cpu=cpu, weights_gpu=gpu).settings.split
    assert (split.weights_gpu, split.weights_cpu) == (gpu, min(cpu, 100 - gpu))
    split = at(bench, weights_gpu=gpu, weights_cpu=cpu).settings.split
    assert (split.weights_cpu, split.weights_gpu) == (cpu, min(gpu, 100 - cpu))


def test_moving_back_undoes_a_move(bench):
    away = at(bench, weights_cpu=20)
    assert moved(away, "weights_cpu", 50, bench) == bench.start


def test_a_t4_starts_at_the_quoted_workload(bench):
    state = at(bench, machine="t4-colab")
    assert state.settings.workload == homework.WORKLOAD["cuda"]
    assert view(state, bench, bench.measured("t4-colab")).run.kind == "quoted"
    assert at(bench, machine="t4-colab", prompt_len=300).settings.workload.prompt_len == 300


def test_a_bench_refuses_a_model_flexgen_lacks(tmp_path):
    with pytest.raises(Refused, match="opt-350m"):
        open_bench("emulated", tmp_path, "opt-350m")


# ---- what if --------------------------------------------------------------------------------------------------------


def test_a_faster_disk_speeds_up_what_waits_for_it(bench):
    as_it_is = t4(bench, weights_gpu=0, weights_cpu=0)
    faster = moved(as_it_is, "disk_gb_s", 5.0, bench)
    real, supposed = (view(state, bench, bench.measured("t4-colab")) for state in (as_it_is, faster))
    rate = T4_COLAB.disk_gb_s / 5.0
    assert supposed.prediction.terms_s["disk"] == pytest.approx(rate * real.prediction.terms_s["disk"])
    assert supposed.profile.disk_write_gb_s == pytest.approx(T4_COLAB.disk_write_gb_s / rate)
    assert moved(faster, "disk_gb_s", 0.0, bench) == as_it_is


def test_more_ram_fits_more_and_caches_the_disk(bench):
    crowded = t4(bench, model="opt-6.7b", weights_gpu=0, weights_cpu=100)
    assert "RAM" in view(crowded, bench, {}).why_not
    assert not view(moved(crowded, "host_ram_gib", 64.0, bench), bench, {}).why_not
    on_disk = t4(bench, weights_gpu=0, weights_cpu=0, host_ram_gib=64.0)
    assert predict(on_disk.settings, bench.profile(on_disk)).page_cache_serves_disk
    emulated = at(bench, weights_gpu=0, weights_cpu=0, host_ram_gib=512.0)  # that disk keeps its pace
    assert not predict(emulated.settings, bench.profile(emulated)).page_cache_serves_disk


def test_a_hypothetical_machine_says_so_and_shows_no_runs(bench):
    shown = view(t4(bench, disk_gb_s=5.0, host_ram_gib=24.0), bench, bench.measured("t4-colab"))
    assert "t4-colab, hypothetical: disk 5 GB/s, RAM 24 GiB" in shown.headline
    assert "hypothetical" in shown.aside and not shown.measured and shown.run is None
    assert "hypothetical" in bench.why_not_measurable(shown.state)
    table = compared("one", "One", [shown], bench)
    assert table.frame.loc[0, "machine"] == shown.state.where and "hypothetical" in table.shown["Kind"][0]


# ---- what a state shows ---------------------------------------------------------------------------------------------


def test_a_view_shows_what_the_models_predict(bench):
    state = t4(bench, weights_gpu=30, weights_cpu=70)
    shown, settings = view(state, bench, {}), state.settings
    assert shown.prediction == predict(settings, T4_COLAB)
    placed = place(settings.opt_model, 30, 70, False)
    assert [share.achieved_bytes for share in shown.weights.values()] == list(placed.bytes_by_tier.values())
    assert shown.weights["gpu"].asked_percent == 30 and 35 < shown.weights["gpu"].achieved_percent < 36
    peak = peak_gpu_memory(settings, T4_COLAB.cublas_workspace_bytes)
    overhead = T4_COLAB.gpu_overhead_gib * 2**30
    assert shown.gpu.need_bytes == pytest.approx(peak.likeliest_bytes + overhead)
    assert shown.gpu.most_bytes == pytest.approx(peak.high_bytes + overhead)
    for memory in (shown.gpu, shown.host):
        assert sum(memory.parts.values()) == pytest.approx(memory.need_bytes)
    of_python = T4_COLAB.host_overhead_gib * 2**30
    assert shown.host.need_bytes == pytest.approx(host_memory(settings).total_bytes + of_python)


def test_fitted_buffers_and_readers_reach_the_run(bench):
    settings = t4(bench, fitted_buffers=True, direct_reader=True, cold=True, overlap=False).settings
    assert (settings.copy_buffer, settings.disk_reader, settings.page_cache) == ("fit", "direct", "cold")
    assert not settings.overlap
    stock, fitted = (view(t4(bench, fitted_buffers=on), bench, {}) for on in (False, True))
    assert stock.host.parts["copy buffers"] == 8 * 2**30 > fitted.host.need_bytes


@given(
    gpu=st.integers(0, 100),
    cpu=st.integers(0, 100),
    batch=st.sampled_from(BATCH_SIZES),
    model=st.sampled_from(["opt-125m", "opt-6.7b", "opt-30b"]),
)
@budget(max_examples=40, deadline=None)
def test_a_state_says_whether_it_fits(bench, gpu, cpu, batch, model):
    state = t4(bench, model=model, weights_gpu=gpu, weights_cpu=cpu, gpu_batch_size=batch)
    shown = view(state, bench, {})
    assert bool(shown.why_not) == (not fits(state.settings, T4_COLAB)) == (not shown.prediction.fits)
    assert shown.headline.startswith("Does not fit: needs" if shown.why_not else "Predicted: ")
    share = state.settings.split
    assert shown.splits.fits[share.weights_gpu, share.weights_cpu] == (not shown.why_not)


def test_what_does_not_fit_is_told_with_both_numbers(bench):
    shown = view(t4(bench, model="opt-6.7b", gpu_batch_size=32, prompt_len=256, gen_len=8, weights_gpu=80), bench, {})
    need, there = map(float, re.findall(r"[0-9]+\.[0-9]+", shown.why_not))
    assert "GiB of GPU memory, t4-colab has 14.6" in shown.why_not and need > there == 14.6


def test_measuring_time_grows_with_the_work(bench):
    quick, long = (view(at(bench, gpu_batch_size=size), bench, {}) for size in (4, 1024))
    generation_s = quick.prediction.total_latency_s
    assert quick.measuring_s > 3 * generation_s and long.measuring_s > long.prediction.total_latency_s > generation_s
    slow = view(t4(bench, weights_gpu=0, weights_cpu=0, gen_len=64), bench, {})
    assert slow.measuring_s < 1.2 * slow.prediction.total_latency_s + 60  # one repeat is more than the budget


# ---- the map --------------------------------------------------------------------------------------------------------


def test_the_map_is_the_prediction_of_every_split(bench):
    settings = t4(bench).settings
    whole = split_map(without_split(settings), T4_COLAB)
    assert int((~np.isnan(whole.tok_s)).sum()) == 5151
    for gpu, cpu in itertools.product(range(0, 101, 20), repeat=2):
        if gpu + cpu > 100:
            assert np.isnan(whole.tok_s[gpu, cpu]) and not whole.fits[gpu, cpu]
            continue
        predicted = predict(with_split(settings, gpu, cpu), T4_COLAB)
        assert whole.tok_s[gpu, cpu] == pytest.approx(predicted.total_throughput_tok_s, rel=0.01)
        assert whole.fits[gpu, cpu] == predicted.fits
    assert whole.fastest == (100, 0)


@given(
    model=st.sampled_from(["opt-125m", "opt-1.3b", "opt-30b"]),
    cache=st.sampled_from(list(HOMES)),
    batch=st.sampled_from(BATCH_SIZES),
    batches=st.sampled_from(BATCH_COUNTS),
    prompt_len=st.integers(7, 1500),
    compress=st.booleans(),
    switch=st.booleans(),
    room=st.floats(0.5, 1.5),
    ram_gib=st.sampled_from([12.7, 60.0, 500.0]),
)
@budget(max_examples=30, deadline=None)
def test_the_map_fits_where_each_placement_does(
    bench, model, cache, batch, batches, prompt_len, compress, switch, room, ram_gib
):
    settings = t4(
        bench,
        model=model,
        cache=cache,
        gpu_batch_size=batch,
        num_gpu_batches=batches,
        prompt_len=prompt_len,
        compress_weight=compress,
        compress_cache=compress,
        pin_weight=switch,
        fitted_buffers=switch,
    ).settings
    # A GPU whose memory ends in the midst of what these settings need.
    needed_gib = peak_gpu_memory(settings, T4_COLAB.cublas_workspace_bytes).likeliest_gib
    machine = T4_COLAB.model_copy(
        update={"gpu_mem_gib": T4_COLAB.gpu_overhead_gib + room * needed_gib, "host_ram_gib": ram_gib}
    )
    one_by_one = [fits(with_split(settings, *split), machine) for split in all_placements(settings.opt_model)]
    assert fit(settings, machine).tolist() == one_by_one


def test_the_map_follows_only_peaks_that_bounds_leave_open(bench, monkeypatch):
    followed = []

    def counted(settings, workspace):
        followed.append(settings)
        return peak_gpu_memory(settings, workspace)

    monkeypatch.setattr(split_maps, "peak_gpu_memory", counted)
    for prompt_len in (40, 41, 42):
        fit(t4(bench, prompt_len=prompt_len).settings, T4_COLAB)
    assert len(followed) == 3  # all on the GPU fits by far: once for each prompt length
    followed.clear()
    settings = t4(bench, model="opt-30b", pin_weight=False).settings
    roomy = T4_COLAB.model_copy(update={"host_ram_gib": 500.0})
    fitting = fit(settings, roomy)
    assert 0 < fitting.sum() < len(fitting) and len(followed) < len(fitting) / 4


# ---- frontier and roofline ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controls", [{}, {"model": "opt-6.7b", "compress_weight": True}, {"cache": "CPU"}])
def test_nothing_that_fits_beats_the_frontier(bench, controls):
    settings = t4(bench, **controls).settings
    found = frontier(settings, T4_COLAB)
    waits, speeds, best = zip(*found.best)
    assert list(waits) == sorted(waits) and list(speeds) == sorted(speeds)
    assert all(fits(one, T4_COLAB) for one in best)
    for gpu, cpu, batch in itertools.product((0, 30, 50, 100), (0, 50), (1, 16, 128)):
        one = with_batch(with_split(settings, min(gpu, 100 - cpu), cpu), batch, 1)
        if fits(one, T4_COLAB):
            predicted = predict(one, T4_COLAB)
            faster = [speed for wait, speed in zip(waits, speeds) if wait <= predicted.total_latency_s * 1.01]
            assert faster and max(faster) >= 0.99 * predicted.total_throughput_tok_s


@given(
    gpu=st.integers(0, 50),
    cpu=st.integers(0, 50),
    batches=st.sampled_from(BATCH_COUNTS),
    compress=st.booleans(),
    cache=st.sampled_from(list(HOMES)),
)
@budget(max_examples=10, deadline=None)
def test_a_roofline_is_above_its_prediction(bench, gpu, cpu, batches, compress, cache):
    controls = {"weights_gpu": gpu, "weights_cpu": cpu, "compress_weight": compress, "cache": cache}
    settings = with_batch(t4(bench, num_gpu_batches=batches, **controls).settings, 1, batches)
    found = roofline(settings, T4_COLAB)
    for i in (0, 8, len(SIZES) - 1):
        predicted = predict(with_batch(settings, SIZES[i], batches), T4_COLAB)
        assert found.tok_s[i] == pytest.approx(predicted.total_throughput_tok_s, rel=0.02)
    assert all((roof >= found.tok_s * 0.999).all() for roof in found.roofs.values())
    assert set(TERMS) <= {term for terms in PARTS.values() for term in terms} | {"cache moves"}
    if 0 < found.largest < SIZES[-1]:
        assert fits(with_batch(settings, found.largest, batches), T4_COLAB)
        assert not fits(with_batch(settings, found.largest + 1, batches), T4_COLAB)


def test_a_roofline_crosses_from_the_disk_to_computing(bench):
    settings = with_batch(t4(bench, weights_gpu=0, weights_cpu=0).settings, 1, 1)
    faster_disk = WhatIf(disk_gb_s=28.0).applied_to(T4_COLAB)
    ((size, _, before, after),) = roofline(settings, faster_disk).crossings
    assert 1 < size < SIZES[-1] and (before, after) in {("PCIe", "compute"), ("disk", "compute")}


# ---- what was measured ----------------------------------------------------------------------------------------------


def test_measured_runs_lie_over_the_predictions(tmp_path):
    bench = open_bench("emulated", tmp_path)
    log = Log(tmp_path / results.LOG_NAME)
    log.append(logged(bench, "50 50 100 0 100 0", ((0.1, 0.1),)))
    log.append(logged(bench, "0 0 100 0 100 0", ((3.0, 3.0),)))
    log.append(logged(bench, "0 0 100 0 100 0", ((3.0, 3.0),), compress_weight=True))
    another = lab.describe_machine("emulated").model_copy(update={"cpu": "another"})
    there = logged(bench, "50 50 100 0 100 0", ((9.0, 9.0),))
    log.append(there.model_copy(update={"machine": another, "key": lab.run_key(there.settings, another)}))
    shown = view(bench.start, bench, bench.measured(EMULATED))
    tokens = shown.settings.workload.generated_tokens
    assert shown.measured_tok_s.value == pytest.approx(tokens / 0.2)
    assert [settings.split.percent[:2] for settings, _ in shown.measured_like(without_split)] == [(0, 0)]
    assert len(bench.measured(EMULATED)) == 3
    table, _ = explorer.tour(bench)
    by_percent = table.frame.set_index("percent")
    assert by_percent.loc["0 0 100 0 100 0", "measured_tok_s"] == pytest.approx(tokens / 6)
    assert by_percent["measured_tok_s"].notna().sum() == 2
    assert set(by_percent["kind"].dropna()) == {"measured on the emulated GPU"}


def test_the_hand_in_is_quoted_for_its_machine(bench):
    shown = view(t4(bench), bench, bench.measured("t4-colab"))
    assert shown.run.kind == "quoted" and shown.measured_tok_s.value == pytest.approx(28.908)
    assert len(shown.measured_like(without_split)) == 4
    assert bench.was_calibrated_on(shown.state)
    assert not bench.was_calibrated_on(t4(bench, weights_gpu=50, weights_cpu=0))
    disk = view(t4(bench, weights_gpu=0, weights_cpu=0), bench, bench.measured("t4-colab"))
    assert disk.breakdown is not None and disk.breakdown.load_weight_s > 0


def test_the_tour_is_a_table_and_five_pictures(bench):
    table, pictures = explorer.tour(bench)
    assert [picture.name for picture in pictures] == [f"explore_{row.id}" for row in homework.QUESTIONS["q1"]]
    assert table.frame["percent"].tolist() == [row.percent for row in homework.QUESTIONS["q1"]]
    assert table.frame["measured_tok_s"].isna().all() and "emulated GPU" in table.caption
    peaks = [table.frame[f"predicted_peak_gpu_mem_gib{end}"] for end in ("_low", "", "_high")]
    assert (peaks[0] <= peaks[1]).all() and (peaks[1] <= peaks[2]).all()


def test_a_damaged_profile_falls_back_to_its_ceilings(tmp_path, monkeypatch):
    here = Machine(name="NVIDIA H200", cpu="a CPU", cpu_count=16, ram_gib=128.0, gpu_mem_gib=139.8, platform="Linux")
    monkeypatch.setattr(lab, "describe_machine", lambda device: here)
    ceilings = MachineCeilings(
        machine=here,
        folder="/data",
        disk_read_gb_s=1.7,
        page_cache_read_gb_s=14.0,
        gpu_copy_gb_s=4200.0,
        host_to_device_gb_s=55.0,
        device_to_host_gb_s=50.0,
        matmul_tflop_s=700.0,
        notes=(),
    )
    (tmp_path / profiles.CEILINGS_NAME).write_text(ceilings.model_dump_json())
    (tmp_path / profiles.PROFILE_NAME).write_text('{"name": "NVIDIA H200", "gpu_mem_gib": 139.8}')
    with pytest.warns(UserWarning, match="run notebook 00 again"):
        found = _measured_profile(tmp_path)
    assert found == from_ceilings(ceilings)
    (tmp_path / profiles.CEILINGS_NAME).write_bytes(b"\xff\x80")
    with pytest.warns(UserWarning, match="run notebook 00 again"):
        assert _measured_profile(tmp_path) is None


def test_runs_are_found_however_often_they_were_repeated(bench):
    settings = bench.start.settings
    assert once(settings) == once(settings.replace(repeats=7)) != once(settings.replace(gen_len=9))
    assert State(EMULATED, settings).where == EMULATED
