"""Memory of a run before it starts: FlexGen's allocations, followed through its schedule; nothing is fitted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from helpers.models import FP16_BYTES, OptModel
from helpers.placement import GROUP_SIZE, PlacedTensor, place, tiers_of_layer
from helpers.settings import RunSettings
from helpers.units import GIB, MIB

WARMUP_PROMPT_LEN = 32  # flex_opt.run_flexgen generates one token from 32 before it measures
COPY_THREADS = 4  # pytorch_backend.TorchDisk
COPY_BUFFER_BYTES = 2 * GIB  # of each copy thread, pinned whatever the split
DEBUG_LAYER_STEPS = 20  # decode layer-steps of flex_opt's debug loops
SHOWN_BLOCKS = 3  # transformer blocks followed; by the third the copy threads are in step
LARGE_BLOCK = MIB  # torch's allocator splits a larger block only if more than this is left
INT32_BYTES, INT64_BYTES, FP32_BYTES = 4, 8, 4

# What a peak is made of, in the order in which it is shown.
PARTS = (
    "weights",
    "kv cache",
    "loaded weights",
    "prefetched weights",
    "loaded kv cache",
    "held by copy threads",
    "activations",
    "logits",
    "decompression",
    "workspace",
)


@dataclass(frozen=True)
class PeakGpuMemory:
    """The statistic torch.cuda.max_memory_allocated, from the start to the end of FlexGen's own command.

    FlexGen's copy threads keep the last tensor that they moved until they take the next: which ones are held
    at the peak is chance. `low_bytes` has none of them; `likeliest_bytes` those that the threads' queue order
    gives; `high_bytes` the most, with a rest of 1 MiB that torch's allocator did not split off in each large
    block that comes and goes. `parts` add up to the likeliest; `step` is where it is reached.
    """

    likeliest_bytes: int
    low_bytes: int
    high_bytes: int
    parts: dict[str, int]
    step: str

    @property
    def likeliest_gib(self) -> float:
        return self.likeliest_bytes / GIB

    @property
    def range_gib(self) -> tuple[float, float]:
        return self.low_bytes / GIB, self.high_bytes / GIB


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host RAM that a run's tensors and copy buffers take; Python and CUDA themselves come on top."""

    parts: dict[str, int]
    pinned_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def total_gib(self) -> float:
        return self.total_bytes / GIB


def block_bytes(requested: int) -> int:
    """Bytes that torch's CUDA caching allocator counts for a request: whole 512-byte units; a request of 10 MiB
    or more gets its own segment of whole 2 MiB, and keeps a rest of up to 1 MiB (CUDACachingAllocator.cpp)."""
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
    """A split with the same placement, the same one for all that have it: what is known of one is known of all."""
    tiers = tuple(
        tiers_of_layer(elements, weights_gpu, weights_cpu) for elements in _elements_of_distinct_layers(model)
    )
    return _FIRST_SEEN.setdefault((model, tiers), (weights_gpu, weights_cpu))


_FIRST_SEEN: dict[tuple, tuple[int, int]] = {}


@lru_cache
def _elements_of_distinct_layers(model: OptModel) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.elements for t in model.layers[j].tensors) for j in (0, 1, 2, -1))


# --- tensors ------------------------------------------------------------------------------------------------


def buffers(tensor: PlacedTensor) -> tuple[int, ...]:
    """Bytes of each buffer of a weight: one of fp16, or 4-bit values and their scales, which FlexGen moves apart."""
    if not tensor.compressed:
        return (tensor.stored_bytes,)
    columns = tensor.stored_bytes // (-(-tensor.shape[0] // GROUP_SIZE) * (GROUP_SIZE // 2 + 2 * FP16_BYTES))
    scales = -(-tensor.shape[0] // GROUP_SIZE) * columns * 2 * FP16_BYTES
    return tensor.stored_bytes - scales, scales


def decompressed_bytes(tensor: PlacedTensor) -> int:
    """fp16 bytes of a 4-bit weight once FlexGen has decompressed it, its rows rounded up to whole groups."""
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
    """The KV cache's share on GPU, CPU and disk: whole sequences (TorchMixedDevice.init_cache_one_gpu_batch)."""
    split, batch = settings.split, settings.workload.gpu_batch_size
    if not split.cache_is_mixed:
        return split.cache_gpu / 100, split.cache_cpu / 100, split.cache_disk / 100
    heads = settings.opt_model.num_heads
    on_gpu = int(batch * heads * split.cache_gpu / 100) // heads
    on_cpu = batch - on_gpu
    if split.cache_disk:
        on_cpu = int(batch * heads * split.cache_cpu / 100) // heads
    return on_gpu / batch, on_cpu / batch, (batch - on_gpu - on_cpu) / batch


# --- what one layer's computation allocates -------------------------------------------------------------------


class _Tape:
    """Bytes alive while a method runs, by part, and what they were at their highest."""

    def __init__(self) -> None:
        self.live = dict.fromkeys(("activations", "logits", "decompression"), 0)
        self.total = self.peak = 0
        self.large_blocks = self.large_blocks_at_peak = 0
        self.at_peak = dict(self.live)

    def take(self, requested: int, part: str = "activations") -> tuple[str, int]:
        counted = block_bytes(requested)
        self.live[part] += counted
        self.total += counted
        self.large_blocks += counted > LARGE_BLOCK
        if self.total > self.peak:
            self.peak, self.at_peak, self.large_blocks_at_peak = self.total, dict(self.live), self.large_blocks
        return part, counted

    def free(self, *taken: tuple[str, int]) -> None:
        for part, counted in taken:
            self.live[part] -= counted
            self.total -= counted
            self.large_blocks -= counted > LARGE_BLOCK

    def decompress(self, values_bytes: int, fp16_bytes: int) -> tuple[str, int]:
        """TorchCompressedDevice.decompress: the fp16 result, and half of the nibbles at a time beside it."""
        result = self.take(fp16_bytes, "decompression")
        self.free(self.take(values_bytes, "decompression"))
        return result

    def compress(self, elements: int, groups: int, fp16: tuple[str, int]) -> tuple[tuple[str, int], ...]:
        """TorchCompressedDevice.compress of an fp16 tensor, which is gone afterwards; returns values and scales."""
        low = self.take(FP16_BYTES * groups)
        high = self.take(FP16_BYTES * groups)
        scale = self.take(FP16_BYTES * groups)
        shifted = self.take(FP16_BYTES * elements)
        nibbles = self.take(elements)
        self.free(shifted)
        left = self.take(elements // 2)
        values = self.take(elements // 2)
        self.free(nibbles, left)
        scales = self.take(2 * FP16_BYTES * groups)
        self.free(low, high, scale, fp16)
        return values, scales


def _layer_norm(tape: _Tape, tokens: int, hidden_bytes: int) -> tuple[str, int]:
    result = tape.take(hidden_bytes)
    statistics = tape.take(FP32_BYTES * tokens), tape.take(FP32_BYTES * tokens)
    tape.free(*statistics)
    return result


@dataclass(frozen=True)
class _Pass:
    """One forward pass as the allocations see it: `tokens` new ones of `context` positions, a sequence each."""

    name: str
    index: int  # FlexGen's i: 0 is prefill
    tokens: int
    context: int
    cache_positions: int
    loads_next_pass: bool


@dataclass(frozen=True)
class _Compute:
    """What a layer's computation adds while it runs (its input among it), and the new key and value it leaves."""

    at_peak: dict[str, int]
    large_blocks: int
    new_cache_bytes: int


@lru_cache(maxsize=50_000)
def _compute(
    kind: str,
    model: OptModel,
    batch: int,
    tokens: int,
    context: int,
    prefill: bool,
    decompress: tuple[tuple[int, int], ...],
    cache_compressed: bool,
    cache_on_gpu: float,
    sparsity: float,
) -> _Compute:
    """The temporaries of TorchDevice.opt_input_embed, mha, mha_gen, mlp and opt_output_embed, in their order.

    `decompress`: values' bytes and fp16 bytes of each 4-bit weight; `cache_on_gpu`: the share of the sequences
    whose attention the GPU computes in decode.
    """
    tape = _Tape()
    hidden = FP16_BYTES * batch * tokens * model.hidden_size
    if kind == "input_embed":
        tape.take(INT32_BYTES * batch * tokens)
    else:
        inputs = tape.take(hidden)
    for values_bytes, fp16_bytes in decompress:
        tape.decompress(values_bytes, fp16_bytes)
    new_cache = 0

    if kind == "input_embed":
        tape.take(hidden)
        cumulated = tape.take(INT64_BYTES * batch * context)
        tape.free(cumulated)
        tape.take(INT32_BYTES * batch * context)
        tape.take(hidden)
        tape.take(hidden)
    elif kind == "output_embed":
        _layer_norm(tape, batch * tokens, hidden)
        tape.free(inputs)
        tape.take(FP16_BYTES * batch * tokens * model.vocab_size, "logits")
        tape.take(INT64_BYTES * batch)
    elif kind == "mlp":
        normed = _layer_norm(tape, batch * tokens, hidden)
        tape.take(4 * hidden)
        tape.free(normed)
        tape.take(hidden)
    elif prefill:
        new_cache = _prefill_attention(tape, inputs, model, batch, tokens, cache_compressed)
    else:
        new_cache = _decode_attention(tape, inputs, model, batch, context, cache_compressed, cache_on_gpu, sparsity)
    return _Compute(tape.at_peak, tape.large_blocks_at_peak, new_cache)


def _prefill_attention(
    tape: _Tape, inputs: tuple[str, int], model: OptModel, batch: int, s: int, compress: bool
) -> int:
    hidden = FP16_BYTES * batch * s * model.hidden_size
    scores_bytes = FP16_BYTES * batch * model.num_heads * s * s
    _layer_norm(tape, batch * s, hidden)
    unscaled = tape.take(hidden)
    q = tape.take(hidden)
    tape.free(unscaled)
    k, v = tape.take(hidden), tape.take(hidden)
    if batch > 1:  # one sequence is reshaped without a copy
        for old in (q, k, v):
            tape.take(hidden)
            tape.free(old)
    scores = tape.take(scores_bytes)
    tape.take(INT64_BYTES * s)
    tape.take(s * s)
    tape.take(batch * s * s)
    masked = tape.take(scores_bytes)
    tape.free(scores)
    tape.take(scores_bytes)
    tape.free(masked)
    value = tape.take(hidden)
    joined = tape.take(hidden)
    tape.free(value)
    tape.take(hidden)
    tape.free(joined)
    tape.free(inputs)
    return _new_cache(tape, k, v, CacheShape(model, batch, s, compress))


def _new_cache(tape: _Tape, k: tuple[str, int], v: tuple[str, int], shape: CacheShape) -> int:
    """Bytes of the new keys and values, compressed here if the cache is."""
    if not shape.compressed:
        return k[1] + v[1]
    vectors = shape.positions * shape.batch * shape.model.num_heads * shape.groups
    kept = 0
    for fp16 in (k, v):
        kept += sum(counted for _, counted in tape.compress(vectors * GROUP_SIZE, vectors, fp16))
    return kept


def _decode_attention(
    tape: _Tape,
    inputs: tuple[str, int],
    model: OptModel,
    batch: int,
    context: int,
    compress: bool,
    on_gpu: float,
    sparsity: float,
) -> int:
    hidden = FP16_BYTES * batch * model.hidden_size
    _layer_norm(tape, batch, hidden)
    unscaled = tape.take(hidden)
    tape.take(hidden)
    tape.free(unscaled)
    k, v = tape.take(hidden), tape.take(hidden)
    if on_gpu < 1:
        tape.take(2 * hidden)  # the query, as fp32, on its way to the CPU
        tape.take(2 * hidden)  # and the attention's value on its way back
    if on_gpu:
        cache = CacheShape(model, batch, context, compress)
        if compress:
            for _ in range(2):
                tape.decompress(cache.buffers[0], cache.decompressed_bytes)
        scores_bytes = int(on_gpu * FP16_BYTES * batch * model.num_heads * context)
        scores = tape.take(scores_bytes)
        masked = tape.take(scores_bytes)
        tape.free(scores)
        tape.take(scores_bytes)
        tape.free(masked)
        if sparsity < 1:
            top = int(sparsity * (context - 1))
            tape.take(FP16_BYTES * batch * model.num_heads * top)
            tape.take(INT64_BYTES * batch * model.num_heads * top)
            tape.take(hidden * (top + 1))
            tape.take(hidden * (top + 1))
    tape.take(hidden)
    tape.take(hidden)
    tape.free(inputs)
    return _new_cache(tape, k, v, CacheShape(model, batch, 1, compress))


# --- the copy threads -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Buffer:
    """A GPU tensor that a copy thread writes or reads: `owner` is (what it is, pass, layer)."""

    owner: tuple[str, int, int]
    number: int
    requested: int


def _owned(owner: tuple[str, int, int], sizes: tuple[int, ...], first: int = 0) -> list[_Buffer]:
    return [_Buffer(owner, number, size) for number, size in enumerate(sizes, start=first)]


class _CopyThreads:
    """Which tensor each of FlexGen's copy threads still refers to (`copy_worker_func`'s `item`, `dst_data`).

    Whoever has waited longest takes the next copy. A thread lets go of its last tensor only after it has opened
    the next one's source: the main thread has then gone on, so at a step's allocations each thread still holds
    what it held when the step began. In a `race` a thread takes two small copies in a row before a waiting one
    wakes up (seen with FlexGen's own threads in about one pass of seven), and one more keeps what it holds.
    """

    SMALL = MIB // 8  # above the largest vector of any OPT, and no larger than the smallest matrix
    OPENING = MIB // 4  # a copy's fixed time, in bytes of reading

    def __init__(self, race: bool) -> None:
        self.race = race
        self.waiting = deque(range(COPY_THREADS))
        self.holds: list[tuple[_Buffer | None, int]] = [(None, 0)] * COPY_THREADS

    def held_beside(self, alive: set) -> int:
        """Bytes held of tensors that nothing else keeps alive; `alive`: the owners of those that something does."""
        held = {buffer: counted for buffer, counted in self.holds if buffer is not None and buffer.owner not in alive}
        return sum(held.values())

    def copy(self, buffers_: list[_Buffer]) -> None:
        """Hand out a step's copies, and wait for them."""
        busy: list[tuple[int, int]] = []
        last_small = None
        for buffer in buffers_:
            size = buffer.requested
            small = size < self.SMALL
            if self.race and small and last_small is not None:
                thread, start = last_small, 0
            elif self.waiting:
                thread, start = self.waiting.popleft(), 0
            else:
                start, thread = heappop(busy)
            self.holds[thread] = (buffer, block_bytes(size))
            if self.race and small and last_small == thread:
                continue
            heappush(busy, (start + size + self.OPENING, thread))
            last_small = thread if small else None
        while busy:
            self.waiting.append(heappop(busy)[1])


# --- the schedule -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LayerWeights:
    """What a layer's weights cost beside those that live on the GPU."""

    kind: str
    loaded_bytes: int  # of its copies from CPU and disk, for the time of its use
    large_blocks: int  # among these copies
    disk_buffers: tuple[int, ...]  # requested bytes of those that the copy threads bring
    decompress: tuple[tuple[int, int], ...]  # values' bytes and fp16 bytes of each 4-bit weight


@lru_cache(maxsize=20_000)
def _weights(
    model: OptModel, weights_gpu: int, weights_cpu: int, compress: bool
) -> tuple[int, tuple[_LayerWeights, ...]]:
    """Bytes of the weights that live on the GPU, and the layers of a pass: the first, a few blocks (all are alike)
    and the last."""
    placement = place(model, weights_gpu, weights_cpu, compress)
    on_gpu = sum(
        block_bytes(size) for layer in placement.layers for t in layer if t.tier == "gpu" for size in buffers(t)
    )
    layers = []
    for j in (*range(1 + 2 * min(model.num_layers, SHOWN_BLOCKS)), -1):
        tensors = placement.layers[j]
        loaded = [block_bytes(size) for t in tensors if t.tier != "gpu" for size in buffers(t)]
        layers.append(
            _LayerWeights(
                kind=model.layers[j].kind,
                loaded_bytes=sum(loaded),
                large_blocks=sum(counted > LARGE_BLOCK for counted in loaded),
                disk_buffers=tuple(size for t in tensors if t.tier == "disk" for size in buffers(t)),
                decompress=tuple((buffers(t)[0], decompressed_bytes(t)) for t in tensors if t.compressed),
            )
        )
    return on_gpu, tuple(layers)


def _passes(settings: RunSettings) -> list[_Pass]:
    """The passes among which the peak is: warm-up, prefill, and the last decode passes, whose context is longest."""
    work = settings.workload
    positions = work.prompt_len + work.gen_len - 1
    last = work.gen_len - 1
    if settings.debug_mode:
        last = min(last, -(-DEBUG_LAYER_STEPS // len(settings.opt_model.layers)))
    passes = [
        _Pass("warm-up", 0, WARMUP_PROMPT_LEN, WARMUP_PROMPT_LEN, WARMUP_PROMPT_LEN, False),
        _Pass("prefill", 0, work.prompt_len, work.prompt_len, positions, last > 0),
    ]
    for i in sorted({max(last - 1, 1), last} if last else ()):
        passes.append(_Pass(f"decode pass {i}", i, 1, work.prompt_len + i, positions, i < last))
    return passes


class _Schedule:
    """What is alive around each layer's computation, as the settings have it."""

    def __init__(self, settings: RunSettings) -> None:
        split, self.work, self.model = settings.split, settings.workload, settings.opt_model
        self.settings = settings
        self.overlap = settings.overlap and settings.debug_mode != "breakdown"
        self.weights_on_gpu, self.layers = _weights(
            self.model,
            *representative_split(self.model, split.weights_gpu, split.weights_cpu),
            settings.compress_weight,
        )
        self.cache_shares = cache_segments(settings)
        on_gpu = self.cache_shares[0]
        if not settings.cpu_cache_compute:
            self.attention_on_gpu = 1.0
        else:
            self.attention_on_gpu = on_gpu if split.cache_is_mixed else 0.0
        self.loads_cache_to_gpu = on_gpu < 1 and not settings.cpu_cache_compute

    def compute(self, a_pass: _Pass, layer: _LayerWeights) -> _Compute:
        return _compute(
            layer.kind,
            self.model,
            self.work.gpu_batch_size,
            a_pass.tokens,
            a_pass.context,
            a_pass.index == 0,
            layer.decompress,
            self.settings.compress_cache,
            self.attention_on_gpu,
            self.settings.attn_sparsity,
        )

    def hidden_bytes(self, a_pass: _Pass) -> int:
        return block_bytes(FP16_BYTES * self.work.gpu_batch_size * a_pass.tokens * self.model.hidden_size)

    def kv_cache_bytes(self, a_pass: _Pass) -> int:
        """Keys and values of all layers and micro-batches that live on the GPU."""
        on_gpu = self.cache_shares[0]
        shape = CacheShape(
            self.model, round(on_gpu * self.work.gpu_batch_size), a_pass.cache_positions, self.settings.compress_cache
        )
        return 2 * self.model.num_layers * self.work.num_gpu_batches * shape.counted

    def loaded_cache(self, a_pass: _Pass) -> tuple[int, ...]:
        """Requested bytes of the buffers that one micro-batch's cache of one layer is loaded into."""
        if a_pass.index == 0 or not self.loads_cache_to_gpu:
            return ()
        shape = CacheShape(self.model, self.work.gpu_batch_size, a_pass.context, self.settings.compress_cache)
        return shape.buffers * (2 if self.settings.attn_sparsity == 1 else 1)

    def stored_cache(self, a_pass: _Pass) -> tuple[int, ...]:
        """Requested bytes of the new keys and values that copy threads take from the GPU: to the disk, and in
        prefill to the CPU (one position needs no thread)."""
        _, on_cpu, on_disk = self.cache_shares
        if not on_disk and not (on_cpu and a_pass.tokens > 1):
            return ()
        shape = CacheShape(self.model, self.work.gpu_batch_size, a_pass.tokens, self.settings.compress_cache)
        return shape.buffers * 2

    def large_blocks_of_batch(self, a_pass: _Pass) -> int:
        """Large blocks among what of a micro-batch comes from elsewhere: its cache, and its activations."""
        hidden = () if self.settings.split.activations_gpu else (self.hidden_bytes(a_pass),)
        return sum(block_bytes(size) > LARGE_BLOCK for size in (*self.loaded_cache(a_pass), *hidden))

    def around(self, number: int, a_pass: _Pass, j: int) -> tuple[dict[str, int], set]:
        """Bytes alive by part while layer j's computation begins, and the owners of those that copy threads moved."""
        layer, several = self.layers[j], self.work.num_gpu_batches > 1
        following = self.following(number, a_pass, j)
        cache = sum(map(block_bytes, self.loaded_cache(a_pass)))
        caches = 0
        if layer.kind == "attention":
            caches = 2 if several and self.overlap else 1
        elif self.overlap and following and following[1].kind == "attention":
            caches = 1
        pending = 0
        if self.overlap and (layer.kind == "mlp" or (layer.kind == "attention" and several)):
            pending = self.compute(a_pass, self.layers[1]).new_cache_bytes
        others = 0
        if several:
            stay = self.settings.split.activations_gpu
            others = self.hidden_bytes(a_pass) * (self.work.num_gpu_batches - 1 if stay else int(self.overlap))
        masks = block_bytes(self.work.gpu_batch_size * a_pass.context)
        if not self.settings.cpu_cache_compute:
            masks *= self.work.num_gpu_batches
        parts = {
            "weights": self.weights_on_gpu,
            "kv cache": self.kv_cache_bytes(a_pass),
            "loaded weights": layer.loaded_bytes,
            "prefetched weights": following[1].loaded_bytes if following else 0,
            "loaded kv cache": caches * cache,
            "activations": pending + others + masks,
        }
        alive = {("weights", number, j), ("new cache", number, j - 1 if layer.kind == "mlp" else j)}
        alive |= {("cache", number, j), ("cache", number, j + 1)}
        if following:
            alive.add(("weights", *following[0]))
        return parts, alive

    def following(self, number: int, a_pass: _Pass, j: int) -> tuple[tuple[int, int], _LayerWeights] | None:
        """The layer whose weights load beside layer j's computation, and its key; None: none does."""
        if not self.overlap:
            return None
        if j + 1 < len(self.layers):
            return (number, j + 1), self.layers[j + 1]
        return ((number + 1, 0), self.layers[0]) if a_pass.loads_next_pass else None

    def copies(self, number: int, a_pass: _Pass, j: int) -> list[_Buffer]:
        """A step's copies by the threads, in the order in which FlexGen queues them."""
        queued: list[_Buffer] = []
        following = self.following(number, a_pass, j) if self.overlap else ((number, j), self.layers[j])
        if following:
            where, layer = following
            queued += _owned(("weights", *where), layer.disk_buffers)
            if layer.kind == "attention" and self.cache_shares[2]:
                queued += _owned(("cache", *where), self.loaded_cache(a_pass))
        batches = self.work.num_gpu_batches
        stores = {"attention": batches - 1, "mlp": 1} if self.overlap else {"attention": batches}
        stored = self.stored_cache(a_pass) * min(stores.get(self.layers[j].kind, 0), COPY_THREADS)
        # With overlap the last micro-batch's are stored beside the MLP.
        after = self.layers[j].kind == "mlp"
        return queued + _owned(("new cache", number, j - after), stored, first=COPY_THREADS**2 * after)


def peak_gpu_memory(settings: RunSettings, cublas_workspace_bytes: int) -> PeakGpuMemory:
    """Peak GPU memory of FlexGen's own command for these settings, in bytes of torch's allocator.

    `cublas_workspace_bytes`: what cuBLAS keeps on this GPU generation (8.125 MiB on a T4, 32 MiB on Hopper).
    Follows generation_loop_overlap_single_batch, _multi_batch, _normal and the debug loops of flex_opt.py. In
    `--overlap false` FlexGen does not wait for its disk reads; here each layer waits for its own.
    """
    schedule = _Schedule(settings)
    usual, racing = _CopyThreads(race=False), _CopyThreads(race=True)
    low = high = likeliest = 0
    loaded_ahead = False
    for number, a_pass in enumerate(_passes(settings)):
        if schedule.overlap and not loaded_ahead:
            prologue = _owned(("weights", number, 0), schedule.layers[0].disk_buffers)
            usual.copy(prologue)
            racing.copy(prologue)
        loaded_ahead = a_pass.loads_next_pass
        for j, layer in enumerate(schedule.layers):
            around, alive = schedule.around(number, a_pass, j)
            around["workspace"] = cublas_workspace_bytes
            computed = schedule.compute(a_pass, layer)
            following = schedule.following(number, a_pass, j)
            rests = LARGE_BLOCK * (
                computed.large_blocks
                + layer.large_blocks
                + (following[1].large_blocks if following else 0)
                + schedule.large_blocks_of_batch(a_pass)
            )
            entering = {} if layer.kind == "input_embed" else {"activations": schedule.hidden_bytes(a_pass)}
            # A step's buffers are allocated in every pass, so that the worst order of the copy threads is met;
            # its computation matters in few passes, with their usual order.
            held, held_racing = usual.held_beside(alive), racing.held_beside(alive)
            for parts, hold in ((entering, held_racing), (computed.at_peak, held)):
                total = sum(around.values()) + sum(parts.values())
                low = max(low, total)
                high = max(high, total + max(held, held_racing) + rests)
                if total + hold > likeliest:
                    likeliest = total + hold
                    made_of = (around, parts, hold, f"{a_pass.name}, {layer.kind.replace('_', ' ')}")
            copies = schedule.copies(number, a_pass, j)
            usual.copy(copies)
            racing.copy(copies)

    around, parts, hold, step = made_of
    by_part = dict.fromkeys(PARTS, 0) | around | {"held by copy threads": hold}
    for part, counted in parts.items():
        by_part[part] += counted
    return PeakGpuMemory(likeliest, low, high, by_part, step)


# --- host memory ------------------------------------------------------------------------------------------------


def copy_buffer_elements(settings: RunSettings) -> int:
    """Elements of the largest tensor that the copy threads pass on through their buffer, an fp16 value for each: a
    weight from disk, unless it is read directly, and a micro-batch's keys or values from or to the disk, and in
    prefill from the GPU to the CPU. 0 where nothing passes through it.
    """
    split, model, work = settings.split, settings.opt_model, settings.workload
    elements = [0]
    if settings.disk_reader == "stock":
        for layer in place(model, split.weights_gpu, split.weights_cpu, settings.compress_weight).layers:
            for tensor in layer:
                if tensor.tier == "disk":
                    elements += _elements(buffers(tensor), tensor.compressed)
    _, on_cpu, on_disk = cache_segments(settings)
    if on_cpu or on_disk or settings.cpu_cache_compute:  # its workspace on the CPU takes the cache from the GPU too
        positions = max(work.prompt_len + work.gen_len - 1, WARMUP_PROMPT_LEN)
        cache = CacheShape(model, work.gpu_batch_size, positions, settings.compress_cache)
        elements += _elements(cache.buffers, cache.compressed)
    return max(elements)


def _elements(buffers_: tuple[int, ...], compressed: bool) -> list[int]:
    """Elements of each buffer: bytes where 4-bit values are packed, else fp16."""
    if compressed:
        values, scales = buffers_
        return [values, scales // FP16_BYTES]
    return [size // FP16_BYTES for size in buffers_]


def copy_buffer_bytes(settings: RunSettings) -> int:
    """Pinned bytes of one copy thread's buffer; none on the emulated GPU, which asks for it and hardly touches it."""
    if settings.device == "emulated":
        return 0
    return FP16_BYTES * copy_buffer_elements(settings) if settings.copy_buffer == "fit" else COPY_BUFFER_BYTES


def host_memory(settings: RunSettings) -> HostMemory:
    """Host RAM that FlexGen takes for these settings, in bytes, page cache not counted.

    The copy threads' buffers are there whatever the split. Vectors are pinned always, matrices with
    `--pin-weight`; the KV cache on the CPU is not; activations on the CPU are.
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
    """Host RAM that a run of the laboratory takes: FlexGen's, but for copy buffers that nothing passes through."""
    if not copy_buffer_elements(settings):
        settings = settings.model_copy(update={"copy_buffer": "fit"})
    return host_memory(settings)


def host_batch(settings: RunSettings, batch: int, batches: int) -> dict[str, int]:
    """Bytes on the host that grow with the batch, for `batches` micro-batches of `batch` sequences."""
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
    """Bytes of the weights on the CPU: pinned, not pinned, and the pinned blocks through which the latter pass
    (torch keeps them; of each size as many as one layer needs)."""
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


def largest_batch(settings: RunSettings, gpu_bytes: int, cublas_workspace_bytes: int = 0) -> int:
    """The largest micro-batch whose peak, at its highest, is within `gpu_bytes`; 0 if none is."""

    def is_within(batch: int) -> bool:
        workload = settings.workload.model_copy(update={"gpu_batch_size": batch})
        run = settings.model_copy(update={"workload": workload})
        return peak_gpu_memory(run, cublas_workspace_bytes).high_bytes <= gpu_bytes

    fits, too_large = 0, 1
    while is_within(too_large):
        fits, too_large = too_large, 2 * too_large
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        fits, too_large = (middle, too_large) if is_within(middle) else (fits, middle)
    return fits


def largest_batch_bound(settings: RunSettings, batches: int, gpu_bytes: int, host_bytes: int) -> int:
    """A micro-batch size above which `batches` of them cannot fit, 0 if none can: from the largest tensors alone,
    so quick, and at or above the largest that does fit. For a KV cache on one tier. `gpu_bytes`: without cuBLAS'
    workspace."""
    split, work, model = settings.split, settings.workload, settings.opt_model
    gpu, cpu = representative_split(model, split.weights_gpu, split.weights_cpu)
    weights_on_gpu, layers = _weights(model, gpu, cpu, settings.compress_weight)
    first, attention, mlp, last = layers[0], layers[1], layers[2], layers[-1]
    on_gpu, on_cpu, _ = cache_segments(settings)
    positions = work.prompt_len + work.gen_len - 1
    kv = 2 * model.num_layers * batches * sum(CacheShape(model, 1, positions, settings.compress_cache).buffers)
    hidden = FP16_BYTES * work.prompt_len * model.hidden_size
    kept = on_gpu * kv + (batches - 1) * hidden * bool(split.activations_gpu)
    scores = FP16_BYTES * model.num_heads * work.prompt_len**2
    ahead = settings.overlap and settings.debug_mode != "breakdown"
    steps = (  # bytes whatever the batch, bytes a sequence
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
