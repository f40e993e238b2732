"""A quick upper bound on the micro-batch that fits, for the search."""

from __future__ import annotations

from helpers.models import FP16_BYTES
from helpers.predict.gpu_memory import weights_by_layer
from helpers.predict.host_memory import copy_buffer_bytes, host_weights
from helpers.predict.tensors import COPY_THREADS, FP32_BYTES, CacheShape, cache_segments, representative_split
from helpers.settings import RunSettings


def largest_batch_bound(settings: RunSettings, batches: int, gpu_bytes: int, host_bytes: int) -> int:
    """A micro-batch size above which `batches` of them cannot fit; 0 if none can.

    It counts the largest tensors only, so it is quick and never below the largest size that fits. The KV cache must be
    on one tier. `gpu_bytes` excludes cuBLAS's workspace.
    """
    split, work, model = settings.split, settings.workload, settings.opt_model
    gpu, cpu = representative_split(model, split.weights_gpu, split.weights_cpu)
    weights_on_gpu, layers = weights_by_layer(model, gpu, cpu, settings.compress_weight)
    first, attention, mlp, last = layers[0], layers[1], layers[2], layers[-1]
    on_gpu, on_cpu, _ = cache_segments(settings)
    positions = work.prompt_len + work.gen_len - 1
    kv = 2 * model.num_layers * batches * sum(CacheShape(model, 1, positions, settings.compress_cache).buffers)
    hidden = FP16_BYTES * work.prompt_len * model.hidden_size
    kept = on_gpu * kv + (batches - 1) * hidden * bool(split.activations_gpu)
    scores = FP16_BYTES * model.num_heads * work.prompt_len**2
    ahead = settings.overlap and settings.debug_mode != "breakdown"
    steps = (  # fixed bytes, values to decompress, bytes per sequence
        (
            last.loaded_bytes + first.loaded_bytes * (ahead and work.gen_len > 1),
            last.decompress,
            FP16_BYTES * work.prompt_len * model.vocab_size + hidden,
        ),
        (attention.loaded_bytes + mlp.loaded_bytes * ahead, attention.decompress, 2 * scores + 5 * hidden),
        (mlp.loaded_bytes, mlp.decompress, 6 * hidden),
    )
    room = [
        (gpu_bytes - weights_on_gpu - loaded - sum(fp16 for _, fp16 in decompress)) / (kept + each)
        for loaded, decompress, each in steps
    ]
    host_room = (
        host_bytes
        - COPY_THREADS * copy_buffer_bytes(settings)
        - sum(host_weights(model, gpu, cpu, settings.compress_weight, settings.pin_weight))
    )
    host_each = on_cpu * kv + batches * hidden * bool(split.activations_cpu)
    if settings.cpu_cache_compute:
        host_each += 2 * FP32_BYTES * positions * model.hidden_size
    if host_each:
        room.append(host_room / host_each)
    return max(int(min(room)), 0) if host_room >= 0 else 0
