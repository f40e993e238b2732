"""`--copy-buffer fit`: large enough for whatever FlexGen's copy threads pass on, and no larger; proposed where 8 GiB
do not fit."""

import pytest
from hypothesis import given, settings as budget, strategies as st

from factories import MACHINE, done, mini, run_one
from helpers import lab
from helpers.engine import launcher
from helpers.errors import Refused
from helpers.machine import limits
from helpers.machine.limits import MemoryAllowance
from helpers.models import EMULATED_MODEL
from helpers.predict import memory_check
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import copy_buffer_elements, host_memory
from helpers.predict.tensors import COPY_THREADS
from helpers.settings import OffloadSplit, RunSettings, Workload

GIB = 2**30
SHORT = Workload(gpu_batch_size=2, prompt_len=40, gen_len=2)
LONG_CACHE = Workload(gpu_batch_size=10, num_gpu_batches=1, prompt_len=112, gen_len=2)  # larger than any weight here


@pytest.mark.parametrize(
    "percent, workload, options",
    [
        ("0 0 100 0 100 0", SHORT, {}),
        ("0 0 100 0 100 0", SHORT, {"compress_weight": True}),
        ("100 0 0 0 100 0", LONG_CACHE, {}),
        ("100 0 0 100 100 0", LONG_CACHE, {}),
        ("100 0 0 0 100 0", LONG_CACHE, {"compress_cache": True}),
        ("100 0 20 30 100 0", LONG_CACHE, {}),
        ("100 0 0 100 100 0", LONG_CACHE, {"cpu_cache_compute": True}),
        ("100 0 100 0 100 0", LONG_CACHE, {"cpu_cache_compute": True}),
        ("100 0 0 0 100 0", SHORT, {"attn_sparsity": 0.5}),
        ("100 0 0 0 0 100", Workload(gpu_batch_size=2, num_gpu_batches=2, prompt_len=8, gen_len=2), {}),
    ],
)
def test_fitted_buffers_give_the_same_tokens(percent, workload, options, tmp_path):
    """A buffer that is too small ends the run: FlexGen cannot give it the tensor's shape."""
    stock = done(run_one(mini(percent, workload, **options), tmp_path))
    fitted = done(run_one(mini(percent, workload, copy_buffer="fit", **options), tmp_path))
    assert fitted.generated_tokens == stock.generated_tokens


@pytest.mark.parametrize(
    "percent, options",
    [
        ("100 0 100 0 100 0", {}),
        ("50 50 100 0 0 100", {}),
        ("0 100 100 0 100 0", {"compress_weight": True, "pin_weight": False}),
        ("100 0 100 0 100 0", {"compress_cache": True, "overlap": False}),
        ("0 0 100 0 100 0", {"disk_reader": "direct"}),
    ],
)
def test_flexgen_leaves_out_buffers_that_nothing_uses(percent, options, tmp_path):
    """It would end at the first tensor for which there is no room."""
    settings = mini(percent, SHORT, **options)
    assert copy_buffer_elements(settings) == 0
    tokens = done(run_one(settings, tmp_path)).generated_tokens
    assert len(tokens) == SHORT.effective_batch and all(map(any, tokens))


def cuda(percent, model="opt-1.3b", **options):
    return RunSettings(model=model, split=OffloadSplit.parse(percent), device="cuda", **options)


def test_the_long_cache_is_larger_than_any_weight():
    assert copy_buffer_elements(mini("100 0 0 0 100 0", LONG_CACHE)) > 1024 * 256


def test_the_largest_tensor_is_what_is_passed_on():
    embedding = 50272 * 2048
    assert copy_buffer_elements(cuda("0 0 100 0 100 0")) == embedding
    assert copy_buffer_elements(cuda("0 0 100 0 100 0", compress_weight=True)) == 50304 * 2048 // 2  # two in a byte
    assert copy_buffer_elements(cuda("50 50 100 0 100 0")) == 0
    assert copy_buffer_elements(cuda("0 0 100 0 100 0", disk_reader="direct")) == 0
    assert copy_buffer_elements(cuda("100 0 0 100 100 0")) == 143 * 4 * 2048  # a layer's keys


@st.composite
def any_run(draw):
    gpu = draw(st.integers(0, 100))
    cpu = draw(st.integers(0, 100 - gpu))
    cache = draw(st.sampled_from(["100 0", "0 100", "0 0", "50 50", "30 40"]))
    return cuda(
        f"{gpu} {cpu} {cache} 100 0",
        compress_weight=draw(st.booleans()),
        disk_reader=draw(st.sampled_from(["stock", "direct"])),
        workload=Workload(gpu_batch_size=draw(st.integers(1, 64)), prompt_len=draw(st.sampled_from([7, 128, 1024]))),
    )


@given(any_run())
@budget(max_examples=60, deadline=None)
def test_fitted_buffers_take_no_more_and_change_nothing_else(settings):
    fitted = settings.model_copy(update={"copy_buffer": "fit"})
    stock, fit = host_memory(settings).parts, host_memory(fitted).parts
    assert stock.pop("copy buffers") == 8 * GIB
    assert 2 * COPY_THREADS * copy_buffer_elements(settings) <= fit.pop("copy buffers", 0) <= 8 * GIB
    assert stock == fit
    assert peak_gpu_memory(settings, 0) == peak_gpu_memory(fitted, 0)


# ---- the memory check


def allowance(free_gib):
    return MemoryAllowance(int(16 * GIB), int(free_gib * GIB), "RAM of this machine", "cgroup v2 limit /x/memory.max")


def test_refusal_names_both_figures_and_a_way_out():
    with pytest.raises(Refused) as refusal:
        memory_check.check_host(cuda("0 0 100 0 100 0"), allowance(7.5))
    text = str(refusal.value)
    for what in ("8.0 GiB", "7.5 GiB", "copy buffers", "/x/memory.max", "--copy-buffer fit needs 0.8 GiB"):
        assert what in text, text
    assert memory_check.check_host(cuda("0 0 100 0 100 0", copy_buffer="fit"), allowance(7.5)) == []


def test_buffers_left_out_need_no_memory():
    """`test_flexgen_leaves_out_buffers_that_nothing_uses` is such a run."""
    for percent in ("100 0 100 0 100 0", "50 50 100 0 100 0"):
        assert copy_buffer_elements(cuda(percent)) == 0
        assert memory_check.check_host(cuda(percent), allowance(4)) == []
    with pytest.raises(Refused, match="weights, pinned") as refusal:
        memory_check.check_host(cuda("0 100 100 0 100 0"), allowance(2))
    assert "copy buffer" not in str(refusal.value)


def test_fitted_buffers_are_not_proposed_where_they_would_not_do():
    with pytest.raises(Refused) as refusal:
        memory_check.check_host(cuda("0 100 100 0 100 0", model="opt-13b"), allowance(12))
    assert "--copy-buffer" not in str(refusal.value) and "CPU" in str(refusal.value)


def test_what_is_tight_runs_with_a_note():
    (note,) = memory_check.check_host(cuda("0 0 100 0 100 0"), allowance(9))
    assert "tight" in note and "8.0 GiB" in note and "9.0 GiB" in note
    assert memory_check.check_host(cuda("0 0 100 0 100 0"), allowance(12)) == []


@pytest.mark.parametrize(
    "free_gib, copy_buffer, status", [(4, "stock", "refused"), (4, "fit", None), (9, "stock", None)]
)
def test_a_real_run_is_checked_before_it_starts(free_gib, copy_buffer, status, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "describe_machine", lambda device: MACHINE)
    monkeypatch.setattr(limits, "memory_allowance", lambda: allowance(free_gib))
    monkeypatch.setattr(launcher, "warm_server", lambda: None)
    started = []

    def start(*arguments, **more):
        started.append(arguments)
        return launcher.Outcome.now()

    monkeypatch.setattr(launcher, "run", start)
    settings = mini("0 0 100 0 100 0", copy_buffer=copy_buffer).model_copy(update={"device": "cuda"})
    record = run_one(settings, tmp_path)
    assert bool(started) == (status is None)
    assert (record.failure.kind == "refused") == (status == "refused")
    assert bool(record.notes) == (free_gib == 9)


def test_the_emulated_gpu_pins_nothing_and_is_not_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "memory_allowance", lambda: allowance(1))
    assert done(run_one(mini(workload=SHORT), tmp_path)).notes == ()


@pytest.mark.parametrize("capability, fits", [((7, 5), True), (None, True), ((9, 0), False), ((10, 0), False)])
def test_cublas_workspace_is_that_of_the_gpus_generation(capability, fits):
    settings = cuda("100 0 100 0 100 0", model=EMULATED_MODEL.name)
    low = peak_gpu_memory(settings, memory_check.WORKSPACE_BYTES).range_gib[0]
    where = MACHINE.model_copy(update={"gpu_mem_gib": low})
    if fits:
        memory_check.check_gpu(settings, where, capability)
    else:
        with pytest.raises(Refused, match="smaller batch"):
            memory_check.check_gpu(settings, where, capability)
