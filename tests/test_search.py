"""The best setting fits, and no other that fits is faster."""

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
from helpers.predict.batch_bound import largest_batch_bounds
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.search import all_placements, best, distinct_placements, fits, with_batch
from helpers.predict.time_model import latencies, predict
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
def test_proposals_fit_at_the_top_of_their_range(case):
    _, profile, *_ = CASES[case]
    found = result(case)
    for choice in (found.best, *found.runners_up):
        peak = peak_gpu_memory(choice.settings, profile.cublas_workspace_bytes)
        assert peak.range_gib[1] <= profile.gpu_mem_gib - profile.gpu_overhead_gib
        assert host_memory(choice.settings).total_gib <= profile.host_ram_gib - profile.host_overhead_gib
        assert choice.prediction == predict(choice.settings, profile)
        assert choice.prediction.fits


@pytest.mark.parametrize("case", ["everything fits the GPU", "the GPU is small"])
def test_the_proposed_split_is_nearest_to_the_achieved_one(case):
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


def any_settings(chance, case):
    """Settings of any kind that the search may propose, with a micro-batch up to about the largest that fits."""
    model, profile, prompt_len, gen_len = CASES[case]
    gpu = chance.randint(0, 100)
    cpu = chance.randint(0, 100 - gpu)
    cache_home = chance.choice(["100 0", "0 100", "0 0"])
    settings = RunSettings(
        model=model,
        split=OffloadSplit.parse(f"{gpu} {cpu} {cache_home} {chance.choice(['100 0', '0 100'])}"),
        device="cuda",
        workload=Workload(
            gpu_batch_size=1, num_gpu_batches=chance.randint(1, 16), prompt_len=prompt_len, gen_len=gen_len
        ),
        compress_weight=chance.random() < 0.5,
        compress_cache=chance.random() < 0.5,
        cpu_cache_compute=cache_home != "100 0" and chance.random() < 0.5,
        pin_weight=chance.random() < 0.5,
        disk_reader=chance.choice(["stock", "direct"]),
        copy_buffer=chance.choice(["stock", "fit"]),
    )
    count = settings.workload.num_gpu_batches
    gpu_bytes = profile.usable_gpu_bytes - profile.cublas_workspace_bytes
    bounds = largest_batch_bounds(settings, ((gpu, cpu),), (count,), gpu_bytes, profile.usable_host_bytes)
    return with_batch(settings, max(int(bounds.item() * chance.random() ** 0.25), 1), count)


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_fits_is_over_1_percent_faster(case):
    profile = CASES[case][1]
    fastest = result(case).best.prediction.total_throughput_tok_s
    chance = random.Random(case)
    for _ in range(1000):
        settings = any_settings(chance, case)
        tok_s = settings.workload.generated_tokens / latencies(settings, profile)[0].sum()
        assert tok_s <= 1.01 * fastest or not fits(settings, profile), settings


def test_limits_of_batch_and_latency_are_kept():
    model, profile, *lengths = CASES["the GPU is small"]
    free = result("the GPU is small").best
    small = best(model, profile, *lengths, batch_limit=30).best
    quick = best(model, profile, *lengths, latency_limit_s=free.prediction.total_latency_s / 4).best
    assert small.settings.workload.effective_batch <= 30
    assert quick.prediction.total_latency_s <= free.prediction.total_latency_s / 4
    for limited in (small, quick):
        assert limited.prediction.total_throughput_tok_s < free.prediction.total_throughput_tok_s
    with pytest.raises(Refused, match="within 0.001 s"):
        best(model, profile, *lengths, latency_limit_s=0.001)


def test_progress_reaches_the_end_and_the_lead_is_over_the_next():
    shares = []
    found = best("opt-125m", T4_COLAB, 32, 8, on_progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1
    first, second = (one.prediction.total_throughput_tok_s for one in (found.best, found.runners_up[0]))
    assert found.lead == pytest.approx(first / second - 1)


@pytest.mark.parametrize("case", CASES)
def test_the_limit_says_whether_a_larger_batch_fits(case):
    _, profile, *_ = CASES[case]
    choice = result(case).best
    work = choice.settings.workload
    larger = choice.settings.model_copy(
        update={"workload": work.model_copy(update={"gpu_batch_size": work.gpu_batch_size + 1})}
    )
    assert ("does not fit" in result(case).limit) != fits(larger, profile)
    assert choice.prediction.bottleneck in result(case).limit


@pytest.mark.parametrize("case", CASES)
def test_runners_up_are_other_choices_in_order(case):
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
    little_ram = T4_COLAB.model_copy(update={"host_ram_gib": 8.0})  # less than FlexGen's own copy buffers and process
    assert best("opt-125m", little_ram, 32, 8).best.settings.copy_buffer == "fit"
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
