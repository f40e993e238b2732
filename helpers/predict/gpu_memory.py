"""Peak GPU memory before a run: FlexGen's allocations, followed through its schedule. Nothing is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from helpers.models import FP16_BYTES, OptModel
from helpers.placement import place
from helpers.predict.copy_threads import Buffer, CopyThreads, Owner, owned
from helpers.predict.temporaries import Temporaries, temporaries
from helpers.predict.tensors import (
    COPY_THREADS,
    LARGE_BLOCK,
    WARMUP_PROMPT_LEN,
    CacheShape,
    block_bytes,
    buffers,
    cache_segments,
    decompressed_bytes,
    representative_split,
)
from helpers.settings import RunSettings
from helpers.units import GIB

DEBUG_LAYER_STEPS = 20  # decode layer-steps of flex_opt's debug loops
FOLLOWED_BLOCKS = 3  # transformer blocks followed; by the third the copy threads repeat themselves

# The parts of a peak, in display order.
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
    """torch.cuda.max_memory_allocated, from the start to the end of FlexGen's own command.

    FlexGen's copy threads keep the last tensor that they moved until they take the next one, so chance decides which
    ones they hold at the peak. `low_bytes` counts none of them, `likeliest_bytes` those that the threads' queue order
    gives, and `high_bytes` the most, plus 1 MiB in each large temporary block that torch's allocator may not have split
    off. `parts` add up to `likeliest_bytes`; `step` names the step that reaches it.
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
class _Pass:
    """One forward pass: `tokens` new ones per sequence, attending to `context` positions."""

    name: str
    index: int  # FlexGen's i: 0 is prefill
    tokens: int
    context: int
    cache_positions: int
    loads_next_pass: bool


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights, other than those resident on the GPU."""

    kind: str
    loaded_bytes: int  # copies from CPU and disk, while the layer is in use
    large_blocks: int  # of these copies
    disk_buffers: tuple[int, ...]  # bytes requested for those that the copy threads bring
    decompress: tuple[tuple[int, int], ...]  # bytes of values and of fp16 for each 4-bit weight


@lru_cache(maxsize=20_000)
def weights_by_layer(
    model: OptModel, weights_gpu: int, weights_cpu: int, compress: bool
) -> tuple[int, tuple[LayerWeights, ...]]:
    """Bytes of the weights resident on the GPU, and the layers of a pass: the first, a few blocks (they are all alike)
    and the last."""
    placement = place(model, weights_gpu, weights_cpu, compress)
    on_gpu = sum(
        block_bytes(size) for layer in placement.layers for t in layer if t.tier == "gpu" for size in buffers(t)
    )
    layers = []
    for j in (*range(1 + 2 * min(model.num_layers, FOLLOWED_BLOCKS)), -1):
        tensors = placement.layers[j]
        loaded = [block_bytes(size) for t in tensors if t.tier != "gpu" for size in buffers(t)]
        layers.append(
            LayerWeights(
                kind=model.layers[j].kind,
                loaded_bytes=sum(loaded),
                large_blocks=sum(counted > LARGE_BLOCK for counted in loaded),
                disk_buffers=tuple(size for t in tensors if t.tier == "disk" for size in buffers(t)),
                decompress=tuple((buffers(t)[0], decompressed_bytes(t)) for t in tensors if t.compressed),
            )
        )
    return on_gpu, tuple(layers)


def _passes(settings: RunSettings) -> list[_Pass]:
    """The passes that can reach the peak: warm-up, prefill, and the last decode passes, whose context is longest."""
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
    """Tensors alive around each layer's computation."""

    def __init__(self, settings: RunSettings) -> None:
        split, self.work, self.model = settings.split, settings.workload, settings.opt_model
        self.settings = settings
        self.overlap = settings.overlap and settings.debug_mode != "breakdown"
        self.weights_on_gpu, self.layers = weights_by_layer(
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

    def compute(self, a_pass: _Pass, layer: LayerWeights) -> Temporaries:
        return temporaries(
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
        """Keys and values of all layers and micro-batches resident on the GPU."""
        on_gpu = self.cache_shares[0]
        shape = CacheShape(
            self.model, round(on_gpu * self.work.gpu_batch_size), a_pass.cache_positions, self.settings.compress_cache
        )
        return 2 * self.model.num_layers * self.work.num_gpu_batches * shape.counted

    def loaded_cache(self, a_pass: _Pass) -> tuple[int, ...]:
        """Bytes requested for each buffer that one micro-batch's cache of one layer is loaded into."""
        if a_pass.index == 0 or not self.loads_cache_to_gpu:
            return ()
        shape = CacheShape(self.model, self.work.gpu_batch_size, a_pass.context, self.settings.compress_cache)
        return shape.buffers * (2 if self.settings.attn_sparsity == 1 else 1)

    def stored_cache(self, a_pass: _Pass) -> tuple[int, ...]:
        """Bytes requested for the new keys and values that copy threads take from the GPU: to the disk and, in prefill,
        to the CPU (the main thread copies a single position)."""
        _, on_cpu, on_disk = self.cache_shares
        if not on_disk and not (on_cpu and a_pass.tokens > 1):
            return ()
        shape = CacheShape(self.model, self.work.gpu_batch_size, a_pass.tokens, self.settings.compress_cache)
        return shape.buffers * 2

    def large_blocks_of_batch(self, a_pass: _Pass) -> int:
        """Large blocks of a micro-batch that are loaded: its cache and its activations."""
        hidden = () if self.settings.split.activations_gpu else (self.hidden_bytes(a_pass),)
        return sum(block_bytes(size) > LARGE_BLOCK for size in (*self.loaded_cache(a_pass), *hidden))

    def around(self, number: int, a_pass: _Pass, j: int) -> tuple[dict[str, int], set[Owner]]:
        """Bytes alive by part when layer j's computation begins, and the owners of those that copy threads moved."""
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
        alive: set[Owner] = {("weights", number, j), ("new cache", number, j - 1 if layer.kind == "mlp" else j)}
        alive |= {("cache", number, j), ("cache", number, j + 1)}
        if following:
            alive.add(("weights", *following[0]))
        return parts, alive

    def following(self, number: int, a_pass: _Pass, j: int) -> tuple[tuple[int, int], LayerWeights] | None:
        """The (pass, layer) whose weights load during layer j's computation, and these weights; None if none do."""
        if not self.overlap:
            return None
        if j + 1 < len(self.layers):
            return (number, j + 1), self.layers[j + 1]
        return ((number + 1, 0), self.layers[0]) if a_pass.loads_next_pass else None

    def copies(self, number: int, a_pass: _Pass, j: int) -> list[Buffer]:
        """A step's copies by the copy threads, in the order in which FlexGen queues them."""
        queued: list[Buffer] = []
        following = self.following(number, a_pass, j) if self.overlap else ((number, j), self.layers[j])
        if following:
            where, layer = following
            queued += owned(("weights", *where), layer.disk_buffers)
            if layer.kind == "attention" and self.cache_shares[2]:
                queued += owned(("cache", *where), self.loaded_cache(a_pass))
        batches = self.work.num_gpu_batches
        stores = {"attention": batches - 1, "mlp": 1} if self.overlap else {"attention": batches}
        stored = self.stored_cache(a_pass) * min(stores.get(self.layers[j].kind, 0), COPY_THREADS)
        # With overlap the last micro-batch's are stored during the MLP.
        after = self.layers[j].kind == "mlp"
        return queued + owned(("new cache", number, j - after), stored, first=COPY_THREADS**2 * after)


def peak_gpu_memory(settings: RunSettings, cublas_workspace_bytes: int) -> PeakGpuMemory:
    """Peak GPU memory of FlexGen's own command for these settings, in bytes of torch's allocator.

    `cublas_workspace_bytes`: cuBLAS's own buffer on this GPU generation (8.125 MiB on a T4, 32 MiB on Hopper).
    Follows generation_loop_overlap_single_batch, _multi_batch, _normal and the debug loops of flex_opt.py. With
    `--overlap false` FlexGen does not wait for its disk reads; this model does, layer by layer.
    """
    schedule = _Schedule(settings)
    usual, racing = CopyThreads(race=False), CopyThreads(race=True)
    low = high = likeliest = 0
    loaded_ahead = False
    for number, a_pass in enumerate(_passes(settings)):
        if schedule.overlap and not loaded_ahead:
            prologue = owned(("weights", number, 0), schedule.layers[0].disk_buffers)
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
            # A step allocates its buffers in every pass, so that sooner or later it meets the copy threads' worst
            # order; its computation peaks in few passes, and meets the usual order.
            held, held_racing = usual.held_bytes(alive), racing.held_bytes(alive)
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


def largest_batch(settings: RunSettings, gpu_bytes: int, cublas_workspace_bytes: int = 0) -> int:
    """The largest micro-batch whose highest possible peak is within `gpu_bytes`; 0 if even one sequence is too many."""

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
