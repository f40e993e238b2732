"""The best setting for a model on a machine: every distinct placement, cache tier, batch and compression, compared."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np

from helpers import models
from helpers.errors import Refused
from helpers.machine.profiles import MachineProfile
from helpers.models import OptModel
from helpers.placement import place
from helpers.predict.batch_bound import largest_batch_bound
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.tensors import representative_split
from helpers.predict.time_model import Prediction, fastest_latencies, predict
from helpers.settings import OffloadSplit, RunSettings, Workload

BATCH_SIZES = tuple(2**n for n in range(11))
BATCH_COUNTS = (1, 2, 4, 8)
RUNNERS_UP = 5

# Where the KV cache and the activations live, and where attention is computed. Activations follow the cache.
_CACHE_HOMES = (
    ((100, 0, 100, 0), False),
    ((0, 100, 0, 100), False),
    ((0, 100, 0, 100), True),
    ((0, 0, 0, 100), False),
    ((0, 0, 0, 100), True),
)


@dataclass(frozen=True)
class Choice:
    """A setting that fits the machine, and what it would do there."""

    settings: RunSettings
    prediction: Prediction

    @property
    def command(self) -> str:
        """FlexGen's command line for it."""
        return self.settings.flexgen_command


@dataclass(frozen=True)
class SearchResult:
    """The fastest setting that fits, the next ones, how many were compared, and what keeps the best from more."""

    best: Choice
    runners_up: tuple[Choice, ...]
    compared: int
    limit: str


@lru_cache
def all_placements(model: OptModel) -> tuple[tuple[int, int], ...]:
    """A split (GPU and CPU percent of the weights) for each placement that FlexGen can make of the model: of those that
    are as fast, which differ in vectors alone, the one with most on the GPU comes first."""
    splits = dict.fromkeys(
        representative_split(model, gpu, cpu) for gpu in range(100, -1, -1) for cpu in range(100 - gpu, -1, -1)
    )
    return tuple(splits)


def distinct_placements(model: OptModel, start: OffloadSplit, end: OffloadSplit) -> tuple[OffloadSplit, ...]:
    """The splits on the straight line from `start` to `end`, ends included, at which the placement changes: of
    each run of whole percentages with one placement the first."""
    steps = max(
        abs(end.weights_gpu - start.weights_gpu),
        abs(end.weights_cpu - start.weights_cpu),
        abs(end.weights_disk - start.weights_disk),
    )
    found: dict[tuple[int, int], OffloadSplit] = {}
    for step in range(steps + 1):
        done = step / steps if steps else 0.0
        gpu = round(start.weights_gpu + done * (end.weights_gpu - start.weights_gpu))
        cpu = min(round(start.weights_cpu + done * (end.weights_cpu - start.weights_cpu)), 100 - gpu)
        split = start.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
        found.setdefault(representative_split(model, gpu, cpu), split)
    return tuple(found.values())


def fits(settings: RunSettings, profile: MachineProfile) -> bool:
    """Whether the run fits the machine's GPU, at the top of its range, and the host's RAM."""
    return (
        host_memory(settings).total_bytes <= profile.usable_host_bytes
        and peak_gpu_memory(settings, profile.cublas_workspace_bytes).high_bytes <= profile.usable_gpu_bytes
    )


def with_batch(settings: RunSettings, batch_size: int, batch_count: int) -> RunSettings:
    workload = settings.workload.model_copy(update={"gpu_batch_size": batch_size, "num_gpu_batches": batch_count})
    return settings.model_copy(update={"workload": workload})


def best(
    model: str, profile: MachineProfile, prompt_len: int, gen_len: int, batch_limit: int | None = None
) -> SearchResult:
    """The setting with the highest total throughput among those that fit the machine, with at most `batch_limit`
    sequences at a time.

    Compared: every distinct placement of the weights, fp16 and 4-bit weights and cache, the cache on GPU, CPU or
    disk, attention on GPU or CPU, weights pinned or not, 1 to 8 micro-batches of powers of two and of the largest
    that fits. Raises Refused if FlexGen has no such model, or nothing fits.
    """
    ranked: list[tuple] = []
    order = count()
    compared = 0
    gpu_bytes = profile.usable_gpu_bytes - profile.cublas_workspace_bytes
    splits = all_placements(models.resolve(model))
    for kind in _kinds(model, prompt_len, gen_len):
        families = [
            kind.model_copy(update={"split": kind.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})})
            for gpu, cpu in splits
        ]
        largest = np.array(
            [
                [largest_batch_bound(family, n, gpu_bytes, profile.usable_host_bytes) for n in BATCH_COUNTS]
                for family in families
            ]
        )
        if batch_limit:
            largest = np.minimum(largest, batch_limit // np.array(BATCH_COUNTS))
        sizes = np.empty((len(splits), len(BATCH_SIZES) + 1, len(BATCH_COUNTS)), dtype=np.int64)
        sizes[:, :-1, :] = np.array(BATCH_SIZES).reshape(1, -1, 1)
        sizes[:, -1, :] = np.maximum(largest, 1)
        possible = sizes <= largest[:, None, :]
        possible[:, -1, :] &= ~np.isin(largest, BATCH_SIZES)
        compared += int(possible.sum())
        seconds = fastest_latencies(kind, profile, splits, sizes, BATCH_COUNTS)
        at_most = sizes * np.array(BATCH_COUNTS) * gen_len / seconds
        for placement, row, column in np.argwhere(possible).tolist():
            ranked.append(
                (
                    -float(at_most[placement, row, column]),
                    next(order),
                    families[placement],
                    int(sizes[placement, row, column]),
                    BATCH_COUNTS[column],
                    None,
                )
            )
    heapq.heapify(ranked)

    found: list[Choice] = []
    while ranked and len(found) <= RUNNERS_UP:
        _, _, family, size, batch_count, prediction = heapq.heappop(ranked)
        settings = with_batch(family, size, batch_count)
        if prediction is not None:
            choice = Choice(settings, prediction)
            if not any(_hardly_differ(choice, other) for other in found):
                found.append(choice)
            continue
        if not fits(settings, profile):
            if size in BATCH_SIZES:
                continue
            size = _largest_that_fits(family, size, batch_count, profile)
            if not size or size in BATCH_SIZES:  # compared already
                continue
            settings = with_batch(family, size, batch_count)
        prediction = predict(settings, profile)
        heapq.heappush(ranked, (-prediction.total_throughput_tok_s, next(order), family, size, batch_count, prediction))
    if not found:
        raise Refused(
            f"{model} with {prompt_len} + {gen_len} tokens does not fit {profile.name} in any setting: "
            f"{profile.gpu_mem_gib:g} GiB on the GPU, {profile.host_ram_gib:g} GiB of RAM"
        )
    limit = _limit(found[0], profile)
    found = [Choice(_asked_as_achieved(choice.settings), choice.prediction) for choice in found]
    return SearchResult(found[0], tuple(found[1:]), compared, limit)


def _asked_as_achieved(settings: RunSettings) -> RunSettings:
    """The same placement by the split whose shares are nearest to what comes of it: 100 0 and not 88 0, where both put
    everything on the GPU."""
    model, split = settings.opt_model, settings.split
    placed = representative_split(model, split.weights_gpu, split.weights_cpu)
    bytes_by_tier = place(model, *placed, settings.compress_weight).bytes_by_tier
    gpu, cpu = (100 * bytes_by_tier[tier] / sum(bytes_by_tier.values()) for tier in ("gpu", "cpu"))
    same = [(g, c) for g in range(101) for c in range(101 - g) if representative_split(model, g, c) == placed]
    nearest = min(same, key=lambda asked: abs(asked[0] - gpu) + abs(asked[1] - cpu) + abs(sum(asked) - gpu - cpu))
    split = split.model_copy(update=dict(zip(("weights_gpu", "weights_cpu"), nearest)))
    return settings.model_copy(update={"split": split})


def _kinds(model: str, prompt_len: int, gen_len: int) -> Iterator[RunSettings]:
    """Every setting but for its placement and its batch."""
    first = RunSettings(
        model=model,
        split=OffloadSplit(weights_gpu=100, weights_cpu=0),
        device="cuda",
        workload=Workload(gpu_batch_size=1, num_gpu_batches=1, prompt_len=prompt_len, gen_len=gen_len),
    )
    for home, on_cpu in _CACHE_HOMES:
        cache_gpu, cache_cpu, activations_gpu, activations_cpu = home
        split = first.split.model_copy(
            update={
                "cache_gpu": cache_gpu,
                "cache_cpu": cache_cpu,
                "activations_gpu": activations_gpu,
                "activations_cpu": activations_cpu,
            }
        )
        for compress_weight in (False, True):
            for compress_cache in (False,) if on_cpu else (False, True):
                for pin_weight in (True, False):
                    yield first.model_copy(
                        update={
                            "split": split,
                            "cpu_cache_compute": on_cpu,
                            "compress_weight": compress_weight,
                            "compress_cache": compress_cache,
                            "pin_weight": pin_weight,
                        }
                    )


def _largest_that_fits(family: RunSettings, too_large: int, batch_count: int, profile: MachineProfile) -> int:
    """The largest micro-batch below `too_large` that fits; 0 if none does."""
    fitting = 0
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(with_batch(family, middle, batch_count), profile):
            fitting = middle
        else:
            too_large = middle
    return fitting


def _hardly_differ(one: Choice, other: Choice) -> bool:
    """Whether two choices differ in a placement of little weight alone (vectors), or in pinning what is tiny."""
    alike = {"split": None, "pin_weight": None}
    return (
        one.settings.model_copy(update=alike) == other.settings.model_copy(update=alike)
        and one.settings.split.percent[2:] == other.settings.split.percent[2:]
        and math.isclose(one.prediction.total_throughput_tok_s, other.prediction.total_throughput_tok_s, rel_tol=1e-3)
    )


def _limit(choice: Choice, profile: MachineProfile) -> str:
    work = choice.settings.workload
    longest = choice.prediction.bottleneck
    more = with_batch(choice.settings, work.gpu_batch_size + 1, work.num_gpu_batches)
    tight = []
    if peak_gpu_memory(more, profile.cublas_workspace_bytes).high_bytes > profile.usable_gpu_bytes:
        tight.append("GPU memory")
    if host_memory(more).total_bytes > profile.usable_host_bytes:
        tight.append("host RAM")
    if not tight:
        return f"{longest} takes longest"
    return f"{longest} takes longest; a larger micro-batch does not fit the {' and the '.join(tight)}"
