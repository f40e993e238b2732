"""Host memory that FlexGen's tensors and copy buffers take, before a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from helpers.models import FP16_BYTES, OptModel
from helpers.placement import GROUP_SIZE, place
from helpers.predict.tensors import (
    COPY_BUFFER_BYTES,
    COPY_THREADS,
    FP32_BYTES,
    WARMUP_PROMPT_LEN,
    CacheShape,
    buffers,
    cache_segments,
    pinned_block_bytes,
    representative_split,
)
from helpers.settings import RunSettings
from helpers.units import GIB


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host RAM for a run's tensors and copy buffers; Python and CUDA themselves come on top."""

    parts: dict[str, int]
    pinned_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def total_gib(self) -> float:
        return self.total_bytes / GIB


def copy_buffer_elements(settings: RunSettings) -> int:
    """Elements of the largest tensor that passes through a copy thread's buffer, one fp16 value each; 0 if none does.

    Through it pass weights from disk (unless they are read directly), a micro-batch's keys or values to and from the
    disk, and in prefill those from the GPU to the CPU.
    """
    split = settings.split
    gpu, cpu = representative_split(settings.opt_model, split.weights_gpu, split.weights_cpu)
    return max(
        largest_weight_elements(settings, gpu, cpu), largest_cache_elements(settings, settings.workload.gpu_batch_size)
    )


def largest_weight_elements(settings: RunSettings, weights_gpu: int, weights_cpu: int) -> int:
    """Elements of the largest weight on disk that passes through a copy thread's buffer; 0 if none does."""
    if settings.disk_reader == "direct":
        return 0
    return _largest_on_disk(settings.opt_model, weights_gpu, weights_cpu, settings.compress_weight)


@lru_cache(maxsize=20_000)
def _largest_on_disk(model: OptModel, weights_gpu: int, weights_cpu: int, compress: bool) -> int:
    layers = place(model, weights_gpu, weights_cpu, compress).layers
    on_disk = (t for layer in layers for t in layer if t.tier == "disk")
    return max((element for t in on_disk for element in _elements(buffers(t), t.compressed)), default=0)


def largest_cache_elements(settings: RunSettings, batch: int) -> int:
    """Elements of a micro-batch's keys or values that pass through a copy thread's buffer; 0 if none do."""
    _, on_cpu, on_disk = cache_segments(settings)
    if not (on_cpu or on_disk or settings.cpu_cache_compute):  # whose CPU workspace takes the cache from the GPU too
        return 0
    work = settings.workload
    positions = max(work.prompt_len + work.gen_len - 1, WARMUP_PROMPT_LEN)
    cache = CacheShape(settings.opt_model, batch, positions, settings.compress_cache)
    return max(_elements(cache.buffers, cache.compressed))


def _elements(buffers_: tuple[int, ...], compressed: bool) -> list[int]:
    """Elements of each buffer: bytes for packed 4-bit values, otherwise fp16 values."""
    if compressed:
        values, scales = buffers_
        return [values, scales // FP16_BYTES]
    return [size // FP16_BYTES for size in buffers_]


def copy_buffer_bytes(settings: RunSettings) -> int:
    """Pinned bytes of one copy thread's buffer; 0 on the emulated GPU, which allocates it but hardly touches it."""
    if settings.device == "emulated":
        return 0
    return FP16_BYTES * copy_buffer_elements(settings) if settings.copy_buffer == "fit" else COPY_BUFFER_BYTES


def host_memory(settings: RunSettings) -> HostMemory:
    """Host RAM that FlexGen takes for these settings, in bytes, not counting page cache.

    Stock copy buffers take the same whatever the split. FlexGen pins vectors always, matrices with `--pin-weight`,
    activations on the CPU always, and the KV cache on the CPU never.
    """
    work = settings.workload
    pinned = {"copy buffers": COPY_THREADS * copy_buffer_bytes(settings)}
    split, model = settings.split, settings.opt_model
    pinned["weights, pinned"], unpinned, pinned["weights, pinned to be copied"] = host_weights(
        model,
        *representative_split(model, split.weights_gpu, split.weights_cpu),
        settings.compress_weight,
        settings.pin_weight,
    )
    of_batch = host_batch(settings, work.gpu_batch_size, work.num_gpu_batches)
    parts = pinned | {"weights, not pinned": unpinned} | of_batch
    return HostMemory(
        parts={part: counted for part, counted in parts.items() if counted},
        pinned_bytes=sum(pinned.values()) + of_batch["kv cache, pinned to be copied"] + of_batch["activations"],
    )


def host_memory_here(settings: RunSettings) -> HostMemory:
    """Host RAM that the lab's run takes: FlexGen's, without copy buffers that nothing passes through."""
    if not copy_buffer_elements(settings):
        settings = settings.model_copy(update={"copy_buffer": "fit"})
    return host_memory(settings)


def host_batch(settings: RunSettings, batch: int, batches: int) -> dict[str, int]:
    """Host bytes that grow with the batch, for `batches` micro-batches of `batch` sequences."""
    split, work, model = settings.split, settings.workload, settings.opt_model
    positions = work.prompt_len + work.gen_len - 1
    on_cpu = cache_segments(settings)[1]
    cache = CacheShape(model, batch, positions, settings.compress_cache)
    relay = workspace = activations = 0
    if on_cpu and not settings.cpu_cache_compute:  # two layers' keys and values on their way to the GPU
        relay = 2 * 2 * sum(map(pinned_block_bytes, cache.buffers))
    if settings.cpu_cache_compute:
        per_vector = cache.groups * GROUP_SIZE if settings.compress_cache else cache.head_size
        workspace = 2 * FP32_BYTES * positions * batch * model.num_heads * per_vector
    if split.activations_cpu:
        hidden = FP16_BYTES * batch * max(work.prompt_len, WARMUP_PROMPT_LEN) * model.hidden_size
        activations = batches * pinned_block_bytes(hidden)
    return {
        "kv cache": int(2 * model.num_layers * batches * sum(cache.buffers) * on_cpu),
        "kv cache, pinned to be copied": relay,
        "attention workspace": workspace,
        "activations": activations,
    }


@lru_cache(maxsize=20_000)
def host_weights(
    model: OptModel, weights_gpu: int, weights_cpu: int, compress: bool, pin: bool
) -> tuple[int, int, int]:
    """Bytes of the weights on the CPU: pinned, not pinned, and the pinned blocks through which the latter are copied
    (torch keeps as many of each size as one layer needs)."""
    pinned = unpinned = 0
    relays: dict[int, int] = {}
    for layer in place(model, weights_gpu, weights_cpu, compress).layers:
        of_layer: dict[int, int] = {}
        for tensor in layer:
            if tensor.tier != "cpu":
                continue
            blocks = [pinned_block_bytes(size) for size in buffers(tensor)]
            if pin or len(tensor.shape) < 2:
                pinned += sum(blocks)
                continue
            unpinned += tensor.stored_bytes
            for block in blocks:
                of_layer[block] = of_layer.get(block, 0) + 1
        for block, count in of_layer.items():
            relays[block] = max(relays.get(block, 0), count)
    return pinned, unpinned, sum(block * count for block, count in relays.items())
