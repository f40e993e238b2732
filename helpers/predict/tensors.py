"""Sizes of the tensors that FlexGen allocates: weights, KV cache, and how torch's allocators round them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from helpers.models import FP16_BYTES, OptModel
from helpers.placement import GROUP_SIZE, PlacedTensor, tiers_of_layer
from helpers.settings import RunSettings
from helpers.units import GIB, MIB

INT32_BYTES, INT64_BYTES, FP32_BYTES = 4, 8, 4
WARMUP_PROMPT_LEN = 32  # flex_opt.run_flexgen generates one token from 32 before it measures
COPY_THREADS = 4  # pytorch_backend.TorchDisk
COPY_BUFFER_BYTES = 2 * GIB  # per copy thread, pinned whatever the split
LARGE_BLOCK = MIB  # torch's allocator splits a larger block only if more than this is left


def block_bytes(requested: int) -> int:
    """Bytes that torch's CUDA caching allocator counts for a request: whole 512-byte units. A request of 10 MiB or
    more gets a segment of whole 2 MiB, and keeps up to 1 MiB of its rest (CUDACachingAllocator.cpp)."""
    block = -(-requested // 512) * 512
    if block >= 10 * MIB:
        segment = -(-block // (2 * MIB)) * (2 * MIB)
        if segment - block <= MIB:
            return segment
    return block


def pinned_block_bytes(requested: int) -> int:
    """Bytes of a block of torch's pinned host allocator: the next power of two."""
    return 1 << max(requested - 1, 0).bit_length()


@lru_cache(maxsize=200_000)
def representative_split(model: OptModel, weights_gpu: int, weights_cpu: int) -> tuple[int, int]:
    """One split (GPU and CPU percent) for all that share its placement, so that results can be cached by placement."""
    tiers = tuple(
        tiers_of_layer(elements, weights_gpu, weights_cpu) for elements in _elements_of_distinct_layers(model)
    )
    return _FIRST_SEEN.setdefault((model, tiers), (weights_gpu, weights_cpu))


_FIRST_SEEN: dict[tuple, tuple[int, int]] = {}


@lru_cache
def _elements_of_distinct_layers(model: OptModel) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.elements for t in model.layers[j].tensors) for j in (0, 1, 2, -1))


def buffers(tensor: PlacedTensor) -> tuple[int, ...]:
    """Bytes of each buffer of a weight: one of fp16, or 4-bit values and their scales, which FlexGen moves apart."""
    if not tensor.compressed:
        return (tensor.stored_bytes,)
    columns = tensor.stored_bytes // (-(-tensor.shape[0] // GROUP_SIZE) * (GROUP_SIZE // 2 + 2 * FP16_BYTES))
    scales = -(-tensor.shape[0] // GROUP_SIZE) * columns * 2 * FP16_BYTES
    return tensor.stored_bytes - scales, scales


def decompressed_bytes(tensor: PlacedTensor) -> int:
    """fp16 bytes of a 4-bit weight after decompression, its rows rounded up to whole groups."""
    rows = tensor.shape[0]
    elements = 1
    for length in tensor.shape:
        elements *= length
    return FP16_BYTES * elements // rows * (-(-rows // GROUP_SIZE) * GROUP_SIZE)


@dataclass(frozen=True)
class CacheShape:
    """One micro-batch's key or value cache of one layer, `positions` long."""

    model: OptModel
    batch: int
    positions: int
    compressed: bool

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of each buffer: fp16, or (grouped along the head) 4-bit values and their scales."""
        vectors = self.positions * self.batch * self.model.num_heads
        if not self.compressed:
            return (FP16_BYTES * vectors * self.head_size,)
        return vectors * self.groups * GROUP_SIZE // 2, vectors * self.groups * 2 * FP16_BYTES

    @property
    def head_size(self) -> int:
        return self.model.hidden_size // self.model.num_heads

    @property
    def groups(self) -> int:
        return -(-self.head_size // GROUP_SIZE)

    @property
    def decompressed_bytes(self) -> int:
        return FP16_BYTES * self.positions * self.batch * self.model.num_heads * self.groups * GROUP_SIZE

    @property
    def counted(self) -> int:
        return sum(map(block_bytes, self.buffers))


def cache_segments(settings: RunSettings) -> tuple[float, float, float]:
    """The KV cache's share on GPU, CPU and disk, in whole sequences (TorchMixedDevice.init_cache_one_gpu_batch)."""
    split, batch = settings.split, settings.workload.gpu_batch_size
    if not split.cache_is_mixed:
        return split.cache_gpu / 100, split.cache_cpu / 100, split.cache_disk / 100
    heads = settings.opt_model.num_heads
    on_gpu = int(batch * heads * split.cache_gpu / 100) // heads
    on_cpu = batch - on_gpu
    if split.cache_disk:
        on_cpu = int(batch * heads * split.cache_cpu / 100) // heads
    return on_gpu / batch, on_cpu / batch, (batch - on_gpu - on_cpu) / batch
