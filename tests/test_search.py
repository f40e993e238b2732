"""The best setting: it fits, and nothing that fits is faster."""

import itertools
import random
import shlex
from functools import cache

import pytest
from hypothesis import given, settings as budget, strategies as st

from helpers import models
from helpers.errors import Refused
from helpers.machine.profiles import T4_COLAB, T4_GCP
from helpers.placement import place
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.search import BATCH_COUNTS, BATCH_SIZES, all_placements, best, distinct_placements, fits
from helpers.predict.time_model import predict
from helpers.settings import OffloadSplit, RunSettings, Workload

SMALL_GPU = T4_COLAB.model_copy(update={"name": "small GPU", "gpu_mem_gib": 2.0})
CASES = {
    "everything fits the GPU": ("opt-1.3b", T4_COLAB, 128, 16),
    "the GPU is small": ("opt-1.3b", SMALL_GPU, 128, 16),
    "the model is larger than the GPU": ("opt-30b", T4_GCP, 512, 32),
}


@cache
def result(case):
    return best(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_what_is_proposed_fits_with_all_of_its_range(case):
    _, profile, *_ = CASES[case]
    found = result(case)
    for choice in (found.best, *found.runners_up):
        peak = peak_gpu_memory(choice.settings, profile.cublas_workspace_bytes)
        assert peak.range_gib[1] <= profile.gpu_mem_gib - profile.gpu_overhead_gib
        assert host_memory(choice.settings).total_gib <= profile.host_ram_gib - profile.host_overhead_gib
        assert choice.prediction == predict(choice.settings, profile)
        assert choice.prediction.fits


@pytest.mark.parametrize("case", ["everything fits the GPU", "the GPU is small"])
def test_no_split_with_the_same_placement_is_nearer_to_what_comes_of_it(case):
    model, _, *_ = CASES[case]
    layers = {
        (gpu, cpu): place(models.resolve(model), gpu, cpu, False).layers
        for gpu in range(101)
        for cpu in range(101 - gpu)
    }
    for choice in (result(case).best, *result(case).runners_up):
        asked = choice.settings.split.percent[:2]
        of_tier = place(models.resolve(model), *asked, choice.settings.compress_weight).bytes_by_tier
        gpu, cpu = (100 * of_tier[tier] / sum(of_tier.values()) for tier in ("gpu", "cpu"))
        distances = {
            split: abs(split[0] - gpu) + abs(split[1] - cpu) + abs(sum(split) - gpu - cpu)
            for split, its in layers.items()
            if its == layers[asked]
        }
        assert distances[asked] == min(distances.values())


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_fits_is_faster(case):
    """Random settings of all kinds, those that the search does not compare among them."""
    model, profile, prompt_len, gen_len = CASES[case]
    fastest = result(case).best.prediction.total_throughput_tok_s
    chance = random.Random(case)
    tried = 0
    while tried < 200:
        gpu = chance.randint(0, 100)
        cpu = chance.randint(0, 100 - gpu)
        cache_home, activations = chance.choice([("100 0", "100 0"), ("0 100", "0 100"), ("0 0", "0 100")])
        settings = RunSettings(
            model=model,
            split=OffloadSplit.parse(f"{gpu} {cpu} {cache_home} {activations}"),
            device="cuda",
            workload=Workload(
                gpu_batch_size=chance.choice(BATCH_SIZES),
                num_gpu_batches=chance.choice(BATCH_COUNTS),
                prompt_len=prompt_len,
                gen_len=gen_len,
            ),
            compress_weight=chance.random() < 0.5,
            compress_cache=chance.random() < 0.5,
            overlap=chance.random() < 0.8,
            pin_weight=chance.random() < 0.5,
        )
        if fits(settings, profile):
            tried += 1
            assert predict(settings, profile).total_throughput_tok_s <= fastest * (1 + 1e-9), settings


@pytest.mark.parametrize("case", CASES)
def test_a_larger_batch_of_the_best_does_not_fit_or_is_no_faster(case):
    _, profile, *_ = CASES[case]
    choice = result(case).best
    work = choice.settings.workload
    larger = choice.settings.model_copy(
        update={"workload": work.model_copy(update={"gpu_batch_size": work.gpu_batch_size + 1})}
    )
    if fits(larger, profile):
        assert work.gpu_batch_size in BATCH_SIZES
        assert "does not fit" not in result(case).limit
    else:
        assert "does not fit" in result(case).limit
    assert choice.prediction.bottleneck in result(case).limit


@pytest.mark.parametrize("case", CASES)
def test_runners_up_are_other_choices_in_their_order(case):
    found = result(case)
    choices = (found.best, *found.runners_up)
    speeds = [choice.prediction.total_throughput_tok_s for choice in choices]
    assert speeds == sorted(speeds, reverse=True)
    assert len({choice.settings.key for choice in choices}) == len(choices) > 1


def test_the_command_is_flexgens():
    choice = result("everything fits the GPU").best
    words = shlex.split(choice.command)
    assert words[:3] == ["python", "-m", "flexgen.flex_opt"]
    at = words.index("--percent")
    assert " ".join(words[at + 1 : at + 7]) == str(choice.settings.split)


def test_a_small_gpu_makes_for_other_settings():
    everything = result("everything fits the GPU").best
    small = result("the GPU is small").best
    assert small.prediction.total_throughput_tok_s < everything.prediction.total_throughput_tok_s
    assert small.prediction.peak_gpu_mem_gib_range[1] <= 1.6


def test_what_cannot_fit_is_refused():
    tiny = T4_COLAB.model_copy(update={"gpu_mem_gib": 0.45, "name": "tiny"})
    with pytest.raises(Refused, match="does not fit tiny"):
        best("opt-30b", tiny, 512, 32)
    with pytest.raises(Refused, match="does not fit"):  # the copy buffers alone are larger
        best("opt-125m", T4_COLAB.model_copy(update={"host_ram_gib": 8.0}), 32, 8)
    with pytest.raises(Refused, match="opt-350m"):
        best("opt-350m", T4_COLAB, 32, 8)
    with pytest.raises(Refused, match="2048 positions"):
        best("opt-1.3b", T4_COLAB, 2048, 1)


def test_all_placements_are_distinct_and_all():
    model = models.resolve("opt-1.3b")
    found = [place(model, *split, False).layers for split in all_placements(model)]
    assert len(set(found)) == len(found) == 91
    every = {
        place(model, gpu, cpu, False).layers
        for gpu, cpu in itertools.product(range(0, 101, 7), repeat=2)
        if gpu + cpu <= 100
    }
    assert every <= set(found)


percents = st.tuples(st.integers(0, 100), st.integers(0, 100)).filter(lambda pair: sum(pair) <= 100)


@given(percents, percents)
@budget(max_examples=30, deadline=None)
def test_distinct_placements_between_two_splits(start, end):
    model = models.resolve("opt-1.3b")
    first, last = (OffloadSplit(weights_gpu=gpu, weights_cpu=cpu) for gpu, cpu in (start, end))
    splits = distinct_placements(model, first, last)
    layers = [place(model, *split.percent[:2], False).layers for split in splits]
    assert splits[0] == first
    assert len(set(layers)) == len(layers)
    assert place(model, *last.percent[:2], False).layers in layers
    assert all(split.percent[2:] == first.percent[2:] for split in splits)
