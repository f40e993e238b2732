"""The fastest setting for a model on a machine: every distinct placement, tier, batch, compression and reader."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product

import numpy as np

from helpers import models
from helpers.errors import Refused
from helpers.machine.profiles import MachineProfile
from helpers.models import OptModel
from helpers.placement import place
from helpers.predict.batch_bound import largest_batch_bounds
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.tensors import representative_split
from helpers.predict.time_model import Prediction, fastest_latencies, latencies, predict
from helpers.settings import OffloadSplit, RunSettings, Workload

BATCH_SIZES = tuple(2**n for n in range(11))
BATCH_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
RUNNERS_UP = 5
# Of the largest micro-batch that may fit: a smaller one leaves more room for page cache.
_SHARES_OF_LARGEST = (1.0, 0.5, 0.2)
_LATENCY_STEPS = 24  # micro-batch sizes that are compared under a limit of latency

# GPU and CPU percent of the KV cache, and whether attention is computed on the CPU.
_CACHE_HOMES = ((100, 0, False), (0, 100, False), (0, 100, True), (0, 0, False), (0, 0, True))
_ACTIVATION_HOMES = ((100, 0), (0, 100))
_SWITCHES = tuple(product((False, True), repeat=3))


@dataclass(frozen=True)
class Choice:
    """A setting that fits the machine, with its prediction."""

    settings: RunSettings
    prediction: Prediction

    @property
    def command(self) -> str:
        """FlexGen's command line for it."""
        return self.settings.flexgen_command


@dataclass(frozen=True)
class SearchResult:
    """The fastest setting that fits, the next ones, how many were compared, and what limits the best one."""

    best: Choice
    runners_up: tuple[Choice, ...]
    compared: int
    limit: str

    @property
    def lead(self) -> float | None:
        """By what share the best is faster than the runner-up; None without one."""
        if not self.runners_up:
            return None
        first, second = (one.prediction.total_throughput_tok_s for one in (self.best, self.runners_up[0]))
        return first / second - 1


@lru_cache
def all_placements(model: OptModel) -> tuple[tuple[int, int], ...]:
    """A split (GPU and CPU percent of the weights) for each placement that FlexGen can make, those with most on the GPU
    first."""
    splits = dict.fromkeys(
        representative_split(model, gpu, cpu) for gpu in range(100, -1, -1) for cpu in range(100 - gpu, -1, -1)
    )
    return tuple(splits)


def distinct_placements(model: OptModel, start: OffloadSplit, end: OffloadSplit) -> tuple[OffloadSplit, ...]:
    """The splits on the straight line from `start` to `end`, ends included, at which the placement changes."""
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
    model: str,
    profile: MachineProfile,
    prompt_len: int,
    gen_len: int,
    batch_limit: int | None = None,
    latency_limit_s: float | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> SearchResult:
    """The setting with the highest predicted throughput among those that fit the machine.

    Compared: every distinct placement of the weights; the cache on GPU, CPU or disk and attention on GPU or CPU; the
    activations on GPU or CPU; fp16 and 4-bit weights and cache; weights pinned or not; FlexGen's disk reader and the
    direct one, with fitted copy buffers where FlexGen's don't fit or are slower; 1 to 16 micro-batches of the largest
    size that fits, and smaller ones. `batch_limit` is in sequences generated together, `latency_limit_s` for the whole
    generation. `on_progress` is told the share done. Raises Refused if FlexGen has no such model, or nothing fits.
    """
    ranked: list[_Candidate] = []
    compared = 0
    splits = all_placements(models.resolve(model))
    kinds = list(_kinds(model, prompt_len, gen_len))
    for done, kind in enumerate(kinds):
        on_progress(0.9 * done / len(kinds))
        found, count_of_kind = _candidates(kind, profile, splits, batch_limit, latency_limit_s)
        ranked += found
        compared += count_of_kind
    choices = _fastest(ranked, profile, latency_limit_s)
    if not choices:
        limits = [
            f"{batch_limit} sequences" if batch_limit else "",
            f"{latency_limit_s:g} s" if latency_limit_s else "",
        ]
        within = f" within {' and '.join(filter(None, limits))}" if any(limits) else ""
        raise Refused(
            f"{model} with {prompt_len} + {gen_len} tokens does not fit {profile.name} in any setting{within}: "
            f"{profile.gpu_mem_gib:g} GiB on the GPU, {profile.host_ram_gib:g} GiB of RAM"
        )
    on_progress(1.0)
    limit = _limit(choices[0], profile)
    choices = [Choice(_asked_as_achieved(choice.settings), choice.prediction) for choice in choices]
    return SearchResult(choices[0], tuple(choices[1:]), compared, limit)


@dataclass(frozen=True)
class _Candidate:
    """A family of settings that differ in the micro-batch alone, and an upper bound of its throughput."""

    at_most_tok_s: float
    kind: RunSettings
    split: tuple[int, int]
    size: int
    batch_count: int

    def settings(self, size: int) -> RunSettings:
        gpu, cpu = self.split
        split = self.kind.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
        return with_batch(self.kind.model_copy(update={"split": split}), size, self.batch_count)


def _candidates(
    kind: RunSettings,
    profile: MachineProfile,
    splits: tuple[tuple[int, int], ...],
    batch_limit: int | None,
    latency_limit_s: float | None,
) -> tuple[list[_Candidate], int]:
    """The fastest candidates of a kind, one per placement and number of micro-batches, and how many were compared."""
    if kind.disk_reader == "direct":
        splits = tuple(split for split in splits if sum(split) < 100)
    gpu_bytes = profile.usable_gpu_bytes - profile.cublas_workspace_bytes
    largest = largest_batch_bounds(kind, splits, BATCH_COUNTS, gpu_bytes, profile.usable_host_bytes)
    if not kind.pin_weight:  # which is only worth its cost where pinned weights leave less room
        pinned = kind.model_copy(update={"pin_weight": True})
        room = largest_batch_bounds(pinned, splits, BATCH_COUNTS, gpu_bytes, profile.usable_host_bytes)
        largest = np.where(largest > room, largest, 0)
    if batch_limit:
        largest = np.minimum(largest, batch_limit // np.array(BATCH_COUNTS))
    if latency_limit_s:
        shares = np.geomspace(1, 1e-3, _LATENCY_STEPS)
    else:
        shares = np.array(_SHARES_OF_LARGEST if kind.disk_reader == "stock" or kind.split.cache_disk else (1.0,))
    sizes = np.maximum((largest[:, None, :] * shares[None, :, None]).astype(np.int64), 1)
    possible = np.broadcast_to(largest[:, None, :] > 0, sizes.shape)
    if not possible.any():
        return [], 0
    rows = np.flatnonzero(possible.any(axis=(1, 2)))
    sizes, possible, splits = sizes[rows], possible[rows], tuple(splits[row] for row in rows)
    seconds = fastest_latencies(kind, profile, splits, sizes, BATCH_COUNTS)
    tok_s = sizes * np.array(BATCH_COUNTS) * kind.workload.gen_len / seconds
    tok_s = np.where(possible & (seconds <= (latency_limit_s or np.inf)), tok_s, 0.0)
    fastest = tok_s.argmax(axis=1)
    found = []
    for row, column in np.argwhere(tok_s.max(axis=1) > 0).tolist():
        at = fastest[row, column]
        bound, size = float(tok_s[row, at, column]), int(sizes[row, at, column])
        found.append(_Candidate(bound, kind, splits[row], size, BATCH_COUNTS[column]))
    return found, int(possible.sum())


def _fastest(ranked: list[_Candidate], profile: MachineProfile, latency_limit_s: float | None) -> list[Choice]:
    """The best choices, fastest first. A candidate that doesn't fit gives way to the largest micro-batch that does."""
    order = count()
    heap: list[tuple[float, int, _Candidate, RunSettings | None]] = [
        (-candidate.at_most_tok_s, next(order), candidate, None) for candidate in ranked
    ]
    heapq.heapify(heap)
    found: list[Choice] = []
    while heap and len(found) <= RUNNERS_UP:
        _, _, candidate, settings = heapq.heappop(heap)
        if settings is None:
            size = _largest_that_fits(candidate, profile)
            if size:
                settings = candidate.settings(size)
                seconds = float(latencies(settings, profile)[0].sum())
                if seconds <= (latency_limit_s or math.inf):
                    tok_s = settings.workload.generated_tokens / seconds
                    heapq.heappush(heap, (-tok_s, next(order), candidate, settings))
            continue
        plain = _plainest(settings, profile)
        choice = Choice(plain, predict(plain, profile))
        if not any(_hardly_differ(choice, other) for other in found):
            found.append(choice)
    return found


def _plainest(settings: RunSettings, profile: MachineProfile) -> RunSettings:
    """The same without options that make no difference here: FlexGen's own reader and buffers, pinned weights."""
    seconds = float(latencies(settings, profile)[0].sum())
    for plain in ({"disk_reader": "stock"}, {"copy_buffer": "stock"}, {"pin_weight": True}):
        tried = settings.model_copy(update=plain)
        if tried != settings and float(latencies(tried, profile)[0].sum()) <= 1.0005 * seconds and fits(tried, profile):
            settings = tried
    return settings


def _largest_that_fits(candidate: _Candidate, profile: MachineProfile) -> int:
    """The largest micro-batch that fits, of those up to the candidate's; 0 if none does.

    Memory grows about linearly with the batch, so a few steps of interpolation are closer than halves.
    """
    fitting, too_large = 0, candidate.size + 1
    tried = candidate.size
    while too_large - fitting > 1:
        over = _overcommitted(candidate.settings(tried), profile)
        if over <= 1:
            fitting = tried
        else:
            too_large = tried
        guess = int(tried / over) if over > 1 else (fitting + too_large) // 2
        tried = min(max(guess, fitting + 1), too_large - 1)
    return fitting


def _overcommitted(settings: RunSettings, profile: MachineProfile) -> float:
    """The larger of the shares of GPU and host memory that a run takes: over 1, it does not fit."""
    host = host_memory(settings).total_bytes / profile.usable_host_bytes
    if host > 1:
        return host
    return max(host, peak_gpu_memory(settings, profile.cublas_workspace_bytes).high_bytes / profile.usable_gpu_bytes)


def _asked_as_achieved(settings: RunSettings) -> RunSettings:
    """The same placement by the split nearest to its achieved shares: 100 0, not 88 0, if both put all on the GPU."""
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
        copy_buffer="fit",
        workload=Workload(gpu_batch_size=1, num_gpu_batches=1, prompt_len=prompt_len, gen_len=gen_len),
    )
    choices = product(_CACHE_HOMES, _ACTIVATION_HOMES, _SWITCHES, ("stock", "direct"))
    for (cache_gpu, cache_cpu, on_cpu), activations, (compress_weight, compress_cache, pageable), reader in choices:
        split = {
            "cache_gpu": cache_gpu,
            "cache_cpu": cache_cpu,
            "activations_gpu": activations[0],
            "activations_cpu": activations[1],
        }
        yield first.model_copy(
            update={
                "split": first.split.model_copy(update=split),
                "cpu_cache_compute": on_cpu,
                "compress_weight": compress_weight,
                "compress_cache": compress_cache,
                "pin_weight": not pageable,
                "disk_reader": reader,
            }
        )


def _hardly_differ(one: Choice, other: Choice) -> bool:
    """Whether two choices differ only in the placement of vectors, or in pinning next to nothing."""
    alike = {"split": None, "pin_weight": None, "copy_buffer": None, "disk_reader": None}
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
