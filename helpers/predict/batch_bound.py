"""Quick upper bounds on the micro-batches that fit, for the search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from helpers.models import FP16_BYTES, OptModel
from helpers.predict.gpu_memory import weights_by_layer
from helpers.predict.host_memory import copy_buffer_bytes, host_weights
from helpers.predict.tensors import COPY_THREADS, FP32_BYTES, CacheShape, cache_segments
from helpers.settings import RunSettings

Splits = tuple[tuple[int, int], ...]


def largest_batch_bounds(
    settings: RunSettings, splits: Splits, counts: Sequence[int], gpu_bytes: int, host_bytes: int
) -> NDArray[np.int64]:
    """For each weights split and number of micro-batches, a micro-batch size above which none fits; 0 if none can.

    They count the largest tensors only, so they are quick and never below the largest size that fits. The KV cache must
    be on one tier. `gpu_bytes` excludes cuBLAS's workspace.
    """
    split, work, model = settings.split, settings.workload, settings.opt_model
    on_gpu, on_cpu, _ = cache_segments(settings)
    batches = np.array(counts)
    positions = work.prompt_len + work.gen_len - 1
    kv = 2 * model.num_layers * batches * sum(CacheShape(model, 1, positions, settings.compress_cache).buffers)
    hidden = FP16_BYTES * work.prompt_len * model.hidden_size
    kept = on_gpu * kv + (batches - 1) * hidden * bool(split.activations_gpu)
    scores = FP16_BYTES * model.num_heads * work.prompt_len**2
    ahead = settings.overlap and settings.debug_mode != "breakdown"
    fixed = _fixed_gpu_bytes(model, splits, settings.compress_weight, ahead, ahead and work.gen_len > 1)
    per_sequence = (FP16_BYTES * work.prompt_len * model.vocab_size + hidden, 2 * scores + 5 * hidden, 6 * hidden)
    room = [(gpu_bytes - fixed[:, i, None]) / (kept + each) for i, each in enumerate(per_sequence)]
    host_room = (
        host_bytes
        - COPY_THREADS * (copy_buffer_bytes(settings) if settings.copy_buffer == "stock" else 0)
        - _host_bytes(model, splits, settings.compress_weight, settings.pin_weight)[:, None]
    )
    host_each = on_cpu * kv + batches * hidden * bool(split.activations_cpu)
    if settings.cpu_cache_compute:
        host_each = host_each + 2 * FP32_BYTES * positions * model.hidden_size
    if np.any(host_each):
        room.append(host_room / host_each)
    found = np.where(host_room >= 0, np.min(np.broadcast_arrays(*room), axis=0), 0)
    return np.maximum(found, 0).astype(np.int64)


@lru_cache
def _fixed_gpu_bytes(
    model: OptModel, splits: Splits, compress: bool, ahead: bool, loads_next_pass: bool
) -> NDArray[np.float64]:
    """Bytes that don't grow with the batch at each split, in the output layer, attention and the MLP."""
    rows = []
    for gpu, cpu in splits:
        resident, layers = weights_by_layer(model, gpu, cpu, compress)
        first, attention, mlp, last = layers[0], layers[1], layers[2], layers[-1]
        loaded = (
            last.loaded_bytes + first.loaded_bytes * loads_next_pass,
            attention.loaded_bytes + mlp.loaded_bytes * ahead,
            mlp.loaded_bytes,
        )
        fp16 = [sum(fp16 for _, fp16 in layer.decompress) for layer in (last, attention, mlp)]
        rows.append([resident + brought + largest for brought, largest in zip(loaded, fp16)])
    return np.array(rows, dtype=float)


@lru_cache
def _host_bytes(model: OptModel, splits: Splits, compress: bool, pin: bool) -> NDArray[np.float64]:
    return np.array([sum(host_weights(model, *split, compress, pin)) for split in splits], dtype=float)
