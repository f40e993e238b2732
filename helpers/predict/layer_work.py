"""Work of each kind of layer: operations, bytes that the GPU reads, and bytes to bring to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from helpers.models import FP16_BYTES, OptModel
from helpers.placement import place
from helpers.predict.tensors import COPY_THREADS, decompressed_bytes
from helpers.units import MIB

Numbers = NDArray[np.float64]
CPU_CACHE_BYTES = 64 * MIB  # copying a larger matrix goes through main memory


@dataclass(frozen=True)
class LayerWork:
    """Weights of one kind of layer at some placements, one along the first of four axes."""

    kind: str
    flop_per_token: Numbers
    read_bytes: Numbers  # by the GPU
    dequantized_bytes: Numbers  # fp16
    dequantized_tensors: Numbers
    cpu_bytes: Numbers
    cpu_copies: Numbers  # a 4-bit weight takes two: values and scales
    disk_bytes: Numbers
    disk_files: Numbers  # of matrices (4-bit values and scales are two); vectors take next to nothing
    disk_threads: Numbers  # share of the copy threads that have a matrix on disk to bring
    relayed_bytes: Numbers  # of 4-bit weights on disk: the most that one copy thread brings
    large_bytes: Numbers  # of matrices on disk that no CPU cache holds: the most that one copy thread brings

    @classmethod
    def side_by_side(cls, layers: Sequence[LayerWork]) -> LayerWork:
        """The same kind of layer at several placements."""
        columns = (np.concatenate([getattr(layer, field.name) for layer in layers]) for field in fields(cls)[1:])
        return cls(layers[0].kind, *columns)


@lru_cache(maxsize=20_000)
def layer_work(model: OptModel, weights_gpu: int, weights_cpu: int, compress: bool) -> tuple[LayerWork, ...]:
    """The four kinds of layer: input embedding, attention, MLP, output embedding."""
    placement = place(model, weights_gpu, weights_cpu, compress)
    work = []
    for j in (0, 1, 2, -1):
        kind, tensors = model.layers[j].kind, placement.layers[j]
        matrices = [t for t in tensors if len(t.shape) > 1]
        on_cpu = [t for t in tensors if t.tier == "cpu"]
        on_disk = [t for t in tensors if t.tier == "disk"]
        gathers = kind == "input_embed"  # takes one row per token, multiplies nothing
        elements = 0 if gathers else sum(t.shape[0] * t.shape[1] for t in matrices)
        numbers: tuple[float, ...] = (
            2.0 * elements,
            FP16_BYTES * elements,
            sum(decompressed_bytes(t) for t in matrices if t.compressed),
            sum(t.compressed for t in matrices),
            sum(t.stored_bytes for t in on_cpu),
            sum(1 + t.compressed for t in on_cpu),
            sum(t.stored_bytes for t in on_disk),
            sum(1 + t.compressed for t in on_disk if len(t.shape) > 1),
            min(1.0, sum(t.tier == "disk" for t in matrices) / COPY_THREADS),
            _most_of_a_thread([t.stored_bytes for t in on_disk if t.compressed]),
            _most_of_a_thread([t.stored_bytes for t in on_disk if t.stored_bytes > CPU_CACHE_BYTES]),
        )
        work.append(LayerWork(kind, *(np.full((1, 1, 1, 1), float(number)) for number in numbers)))
    return tuple(work)


def _most_of_a_thread(tensors_bytes: Sequence[int]) -> float:
    """Bytes that the busiest copy thread brings: each tensor goes through one thread."""
    return max(float(max(tensors_bytes, default=0)), sum(tensors_bytes) / COPY_THREADS)
