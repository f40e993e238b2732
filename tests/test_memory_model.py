"""Memory before a run: against peaks that were measured, and against FlexGen itself on the emulated GPU."""

import pytest
from hypothesis import given, settings as budget, strategies as st

from helpers import models
from helpers.analysis import readers
from helpers.engine import launcher
from helpers.placement import place
from helpers.predict.batch_bound import largest_batch_bounds
from helpers.predict.gpu_memory import PARTS, peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.tensors import block_bytes, pinned_block_bytes, representative_split
from helpers.report.comparison import REFERENCE
from helpers.settings import OffloadSplit, RunSettings, Workload
from helpers.weights import store

MIB, GIB = 2**20, 2**30
T4_WORKSPACE, HOPPER_WORKSPACE = int(8.125 * MIB), 32 * MIB


def run(percent, batch=4, batches=1, prompt_len=128, gen_len=16, model="opt-1.3b", device="cuda", **options):
    workload = Workload(gpu_batch_size=batch, num_gpu_batches=batches, prompt_len=prompt_len, gen_len=gen_len)
    return RunSettings(model=model, split=OffloadSplit.parse(percent), workload=workload, device=device, **options)


def run_of(point):
    return RunSettings(
        model=point.model,
        split=point.split,
        workload=point.workload,
        device="cuda",
        compress_weight=point.compress_weight,
        debug_mode=point.debug_mode,
    )


T4_PEAKS = [point for point in readers.read(REFERENCE) if point.peak_gpu_mem_gib is not None]
# Stock FlexGen 0.1.8 with torch 2.11 on an NVIDIA H200.
H200_PEAKS = [("100 0", 2.830), ("50 50", 1.706), ("50 0", 1.738), ("0 50", 0.610), ("0 0", 0.610)]


@pytest.mark.parametrize("point", T4_PEAKS, ids=lambda point: point.run_id)
def test_peaks_of_the_hand_in(point):
    peak = peak_gpu_memory(run_of(point), T4_WORKSPACE)
    assert peak.likeliest_gib == pytest.approx(point.peak_gpu_mem_gib, rel=0.01)
    low, high = peak.range_gib
    assert low - 0.0005 <= point.peak_gpu_mem_gib <= high + 0.0005  # it has three decimals


@pytest.mark.parametrize("weights_split, measured_gib", H200_PEAKS)
def test_peaks_of_an_h200_differ_by_cublas_workspace_alone(weights_split, measured_gib):
    settings = run(f"{weights_split} 100 0 100 0")
    peak = peak_gpu_memory(settings, HOPPER_WORKSPACE)
    assert peak.likeliest_gib == pytest.approx(measured_gib, rel=0.01)
    assert peak.range_gib[0] - 0.0005 <= measured_gib <= peak.range_gib[1] + 0.0005
    other = peak_gpu_memory(settings, T4_WORKSPACE)
    assert peak.likeliest_bytes - other.likeliest_bytes == HOPPER_WORKSPACE - T4_WORKSPACE


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    return store.prepare("opt-mini", lambda line: None, tmp_path_factory.mktemp("home"))


def peak_of_flexgen(settings, mini, tmp_path):
    outcome = launcher.Outcome.now()
    launcher.run(settings, mini, tmp_path, outcome, limit_s=60)
    assert outcome.failure is None
    return outcome.repeats[0].peak_gpu_mem_gib * GIB


@pytest.mark.parametrize(
    "percent, options",
    [
        ("100 0 100 0 100 0", {}),
        ("0 100 100 0 100 0", {}),
        ("50 50 100 0 100 0", {"compress_weight": True}),
        ("100 0 100 0 100 0", {"batches": 3, "prompt_len": 64, "compress_cache": True}),
        ("100 0 0 100 100 0", {"overlap": False}),
        ("0 100 0 100 0 100", {"batches": 2, "cpu_cache_compute": True}),
    ],
)
def test_what_flexgen_allocates_on_the_emulated_gpu(percent, options, mini, tmp_path):
    options = {"prompt_len": 32, "gen_len": 4} | options
    settings = run(percent, model="opt-mini", device="emulated", repeats=1, **options)
    peak = peak_gpu_memory(settings, cublas_workspace_bytes=0)
    measured = peak_of_flexgen(settings, mini, tmp_path)
    if settings.split.cache_cpu:  # through the copy threads: which tensors they hold differs from run to run
        assert 0.999 * peak.low_bytes <= measured <= 1.001 * peak.high_bytes
    else:
        assert measured == pytest.approx(peak.likeliest_bytes, rel=0.005)


@pytest.mark.parametrize("options", [{}, {"compress_weight": True}])
def test_what_copy_threads_hold_is_within_the_range(options, mini, tmp_path):
    options = {"prompt_len": 32, "gen_len": 2} | options
    settings = run("0 0 100 0 100 0", model="opt-mini", device="emulated", repeats=1, **options)
    peak = peak_gpu_memory(settings, cublas_workspace_bytes=0)
    assert 0.999 * peak.low_bytes <= peak_of_flexgen(settings, mini, tmp_path) <= 1.001 * peak.high_bytes


@st.composite
def any_run(draw, model="opt-1.3b"):
    gpu = draw(st.integers(0, 100))
    cpu = draw(st.integers(0, 100 - gpu))
    cache = draw(st.sampled_from(["100 0", "0 100", "0 0", "50 50", "30 40"]))
    activations = draw(st.sampled_from(["100 0", "0 100"]))
    compress_cache = cache in ("100 0", "0 100", "0 0") and draw(st.booleans())
    return run(
        f"{gpu} {cpu} {cache} {activations}",
        batch=draw(st.integers(1, 32)),
        batches=draw(st.integers(1, 4)),
        prompt_len=draw(st.sampled_from([7, 32, 128, 511])),
        gen_len=draw(st.sampled_from([1, 2, 3, 16, 100])),
        model=model,
        compress_weight=draw(st.booleans()),
        compress_cache=compress_cache,
        overlap=draw(st.booleans()),
        cpu_cache_compute=draw(st.booleans()),
        pin_weight=draw(st.booleans()),
    )


@given(any_run())
@budget(max_examples=60, deadline=None)
def test_a_peak_is_the_sum_of_its_parts(settings):
    peak = peak_gpu_memory(settings, T4_WORKSPACE)
    split, work, model = settings.split, settings.workload, settings.opt_model
    resident = place(model, split.weights_gpu, split.weights_cpu, settings.compress_weight).bytes_by_tier["gpu"]
    if split.cache_gpu == 100 and not settings.compress_cache:
        resident += model.kv_cache_bytes(work.effective_batch, work.prompt_len, work.gen_len)
    assert resident < peak.low_bytes <= peak.likeliest_bytes <= peak.high_bytes
    assert sum(peak.parts.values()) == peak.likeliest_bytes
    assert set(peak.parts) == set(PARTS)
    assert (
        peak.parts["weights"]
        >= place(model, split.weights_gpu, split.weights_cpu, settings.compress_weight).bytes_by_tier["gpu"]
    )


@given(any_run(), st.integers(1, 40))
@budget(max_examples=60, deadline=None)
def test_a_larger_batch_takes_no_less(settings, more):
    workload = settings.workload.model_copy(update={"gpu_batch_size": settings.workload.gpu_batch_size + more})
    # A mixed cache is split by whole sequences: what one more adds to the GPU may be taken from it again.
    if not settings.split.cache_is_mixed:
        larger = settings.model_copy(update={"workload": workload})
        assert peak_gpu_memory(larger, 0).low_bytes >= peak_gpu_memory(settings, 0).low_bytes
        assert host_memory(larger).total_bytes >= host_memory(settings).total_bytes


@given(any_run().filter(lambda settings: not settings.split.cache_is_mixed))
@budget(max_examples=60, deadline=None)
def test_the_bound_on_the_batch_is_above_what_fits(settings):
    """What fits to the byte must not be ruled out by the quick bound."""
    gpu = peak_gpu_memory(settings, 0).high_bytes
    host = host_memory(settings).total_bytes
    work, split = settings.workload, settings.split
    splits = ((split.weights_gpu, split.weights_cpu),)
    bounds = largest_batch_bounds(settings, splits, (work.num_gpu_batches,), gpu, host)
    assert bounds.item() >= work.gpu_batch_size


def test_one_placement_is_one_prediction():
    model = models.resolve("opt-1.3b")
    found = {representative_split(model, gpu, cpu) for gpu in range(101) for cpu in range(101 - gpu)}
    assert len(found) == 91  # counted on FlexGen's own init_weight_list
    for gpu, cpu in ((90, 10), (37, 20), (3, 90)):
        assert place(model, gpu, cpu, False) == place(model, *representative_split(model, gpu, cpu), False)


def test_host_memory_of_weights_on_the_cpu():
    """torch's pinned allocator takes powers of two: 10.8 GiB, as measured for opt-1.3b all on the CPU."""
    pinned = host_memory(run("0 100 100 0 100 0"))
    assert pinned.total_gib == pytest.approx(10.8, abs=0.05)
    assert pinned.pinned_bytes == pinned.total_bytes
    pageable = host_memory(run("0 100 100 0 100 0", pin_weight=False))
    model = models.resolve("opt-1.3b")
    assert pageable.parts["weights, not pinned"] == pytest.approx(model.weight_bytes, rel=0.001)
    assert pageable.pinned_bytes < pinned.pinned_bytes


def test_host_memory_grows_with_what_is_kept_there():
    model = models.resolve("opt-1.3b")
    on_cpu = host_memory(run("100 0 0 100 0 100", batches=2, cpu_cache_compute=True))
    assert on_cpu.parts["kv cache"] == model.kv_cache_bytes(8, 128, 16)
    # fp32 keys and values of one layer and micro-batch
    assert on_cpu.parts["attention workspace"] == 2 * model.kv_cache_bytes(4, 128, 16) // model.num_layers
    assert on_cpu.parts["activations"] == 2 * 4 * 128 * 2048 * 2
    assert host_memory(run("100 0 100 0 100 0")).parts == {"copy buffers": 8 * GIB}


@given(st.integers(1, 2**34))
def test_blocks_are_no_smaller_than_asked_for(requested):
    assert requested <= block_bytes(requested) < requested + 512 + MIB
    assert requested <= pinned_block_bytes(requested) < 2 * requested + 1
