"""Throughput and fit at every split of the weights, sharing what many splits have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from helpers.machine.profiles import MachineProfile
from helpers.models import OptModel
from helpers.placement import place
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.search import all_placements
from helpers.predict.tensors import (
    COPY_THREADS,
    LARGE_BLOCK,
    WARMUP_PROMPT_LEN,
    CacheShape,
    block_bytes,
    buffers,
    representative_split,
)
from helpers.predict.time_model import fastest_latencies
from helpers.settings import RunSettings


@dataclass(frozen=True, eq=False)
class SplitMap:
    """Predicted token/s at every split of the weights, all else equal, and whether it fits the machine.

    Arrays [GPU percent, CPU percent]; NaN and False where the two add up to more than 100.
    """

    tok_s: NDArray[np.float64]
    fits: NDArray[np.bool_]

    @property
    def range_tok_s(self) -> tuple[float, float]:
        return float(np.nanmin(self.tok_s)), float(np.nanmax(self.tok_s))

    @property
    def fastest(self) -> tuple[int, int] | None:
        """GPU and CPU percent of the fastest split that fits; of those alike, the one with most on the GPU."""
        if not self.fits.any():
            return None
        tok_s = np.where(self.fits, self.tok_s, 0.0)[::-1]
        gpu, cpu = np.unravel_index(tok_s.argmax(), tok_s.shape)
        return 100 - int(gpu), int(cpu)


@lru_cache(maxsize=32)
def split_map(settings: RunSettings, profile: MachineProfile) -> SplitMap:
    """Throughput and fit at all 5,151 splits of the weights: one prediction for each distinct placement."""
    model, work = settings.opt_model, settings.workload
    splits = all_placements(model)
    sizes = np.full((len(splits), 1, 1), work.gpu_batch_size)
    latencies_s = fastest_latencies(settings, profile, splits, sizes, (work.num_gpu_batches,))[:, 0, 0]
    tok_s = work.generated_tokens / latencies_s
    fitting = fit(settings, profile)
    which = _placement_of_split(model)
    there = which >= 0
    return SplitMap(np.where(there, tok_s[which], np.nan), there & fitting[which])


@lru_cache(maxsize=32)
def _placement_of_split(model: OptModel) -> NDArray[np.int64]:
    """For each [GPU percent, CPU percent] the index of its placement in `all_placements`; -1 over 100."""
    index = {split: i for i, split in enumerate(all_placements(model))}
    which = np.full((101, 101), -1)
    for gpu in range(101):
        for cpu in range(101 - gpu):
            which[gpu, cpu] = index[representative_split(model, gpu, cpu)]
    return which


# ---- what fits ------------------------------------------------------------------------------------------------------


def fit(settings: RunSettings, profile: MachineProfile) -> NDArray[np.bool_]:
    """`search.fits` for each of `all_placements`.

    The peak with all weights on the GPU bounds the others: they differ in the weights that live there, in copies of
    those that don't, and in what copy threads hold. Only a placement that these bounds leave open is followed through
    the schedule.
    """
    usable, workspace = profile.usable_gpu_bytes, profile.cublas_workspace_bytes
    weights = _weights(settings.opt_model, settings.compress_weight)
    peak = peak_gpu_memory(with_split(settings, 100, 0), workspace)
    fewer = weights.on_gpu.max() - weights.on_gpu
    held = COPY_THREADS * np.maximum(weights.largest_read, _largest_of_cache(settings))
    fitting = peak.high_bytes - fewer + weights.loaded + held <= usable
    possible = peak.low_bytes - fewer <= usable
    placements = [with_split(settings, *split) for split in all_placements(settings.opt_model)]
    in_ram = np.array([host_memory(one).total_bytes <= profile.usable_host_bytes for one in placements])
    for i in np.flatnonzero(in_ram & possible & ~fitting):
        fitting[i] = peak_gpu_memory(placements[i], workspace).high_bytes <= usable
    return fitting & in_ram


def with_split(settings: RunSettings, gpu: int, cpu: int) -> RunSettings:
    split = settings.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
    return settings.model_copy(update={"split": split})


def _largest_of_cache(settings: RunSettings) -> int:
    """Bytes of the largest keys or values that a copy thread moves."""
    if settings.split.cache_gpu == 100:
        return 0
    work = settings.workload
    positions = max(work.prompt_len + work.gen_len, WARMUP_PROMPT_LEN)
    cache = CacheShape(settings.opt_model, work.gpu_batch_size, positions, settings.compress_cache)
    return max(map(block_bytes, cache.buffers))


@dataclass(frozen=True, eq=False)
class _Weights:
    """Bytes of the weights at each of `all_placements`: those that live on the GPU; the most that copies of two
    layers in a row take there, with what torch's allocator does not split off; the largest that a thread copies."""

    on_gpu: NDArray[np.int64]
    loaded: NDArray[np.int64]
    largest_read: NDArray[np.int64]


@lru_cache(maxsize=32)
def _weights(model: OptModel, compress: bool) -> _Weights:
    lines = []
    for gpu, cpu in all_placements(model):
        layers = place(model, gpu, cpu, compress).layers
        on_gpu = largest_read = 0
        loaded = []
        for j, times in ((0, 1), (1, model.num_layers), (2, model.num_layers), (-1, 1)):
            blocks = [(tensor.tier, block_bytes(size)) for tensor in layers[j] for size in buffers(tensor)]
            on_gpu += times * sum(size for tier, size in blocks if tier == "gpu")
            loaded.append(sum(size + LARGE_BLOCK for tier, size in blocks if tier != "gpu"))
            largest_read = max([largest_read, *(size for tier, size in blocks if tier == "disk")])
        first, attention, mlp, last = loaded
        of_two = max(first + attention, attention + mlp, mlp + last, last + first)
        lines.append((on_gpu, of_two, largest_read))
    return _Weights(*np.array(lines, dtype=np.int64).T)
