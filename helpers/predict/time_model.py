"""Time of a run before it starts: FlexGen's schedule, each layer's work at the rates that the machine achieves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helpers.errors import Refused
from helpers.machine.profiles import MachineProfile
from helpers.models import FP16_BYTES, OptModel
from helpers.placement import PlacedTensor, place
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_batch, host_memory, host_weights
from helpers.predict.tensors import (
    COPY_BUFFER_BYTES,
    COPY_THREADS,
    CacheShape,
    cache_segments,
    decompressed_bytes,
    representative_split,
)
from helpers.settings import RunSettings

# What a pass is made of: the machine's parts, each with the field of the profile that says how fast it is.
TERMS = {
    "launch overhead": "layer_overhead_us",
    "GPU compute": "gpu_fp16_tflop_s",
    "GPU memory": "gpu_mem_gb_s",
    "dequantisation": "dequantize_gb_s",
    "host to device": "h2d_gb_s",
    "device to host": "d2h_gb_s",
    "cache store": "cache_store_gb_s",
    "host copy": "host_copy_gb_s",
    "cache moves": "cache_overhead_us",
    "CPU attention": "cpu_attention_gb_s",
    "tensor files": "file_overhead_us",
    "page cache": "page_cache_gb_s",
    "relay": "relay_gb_s",
    "disk": "disk_gb_s",
    "disk write": "disk_write_gb_s",
}
KERNEL_LOADING = "kernel loading"  # a term too, but not a rate
G = 1e9
OPERATORS_A_LAYER = 10  # counted; each is launched by the main thread, and so is each copy of a tensor to the GPU
ATTENTION_SCORE_TRAVELS = 7  # times that mha writes or reads its b x heads x s x s scores

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """What a run would do. Throughput and bounds in token/s, memory in GiB, `terms_s` in seconds of the whole run.

    The bounds: were everything at the same time, and nothing. `bottleneck` is the longest term.
    """

    prefill_latency_s: float
    decode_pass_latencies_s: tuple[float, ...]
    total_throughput_tok_s: float
    total_throughput_tok_s_bounds: tuple[float, float]
    bottleneck: str
    terms_s: dict[str, float]
    page_cache_serves_disk: bool
    peak_gpu_mem_gib: float
    peak_gpu_mem_gib_range: tuple[float, float]
    host_mem_gib: float
    fits: bool

    @property
    def decode_latency_s(self) -> float:
        return sum(self.decode_pass_latencies_s)

    @property
    def total_latency_s(self) -> float:
        return self.prefill_latency_s + self.decode_latency_s


@dataclass(frozen=True)
class _LayerWork:
    """A layer's weights: floating-point operations a token, bytes the GPU reads, and bytes to bring there."""

    kind: str
    flop_per_token: float
    read_bytes: float
    dequantized_bytes: float  # fp16
    cpu_bytes: float
    cpu_copies: float  # 4-bit values and their scales are two
    disk_bytes: float
    disk_steps: float  # what is waited for, beside bytes: each matrix's files, and the layer
    disk_threads: float  # share of the copy threads that have a matrix of the disk's
    relayed_bytes: float  # of the disk's, those of 4-bit weights: the most that one copy thread has of them

    @classmethod
    def side_by_side(cls, layers: Sequence[_LayerWork]) -> _LayerWork:
        """The same layer at several placements: each number an array along the first axis."""

        def column(name: str) -> Seconds:
            return np.array([getattr(layer, name) for layer in layers], dtype=float).reshape(-1, 1, 1, 1)

        return cls(layers[0].kind, *(column(field.name) for field in fields(cls)[1:]))


@lru_cache(maxsize=20_000)
def _layers(model: OptModel, weights_gpu: int, weights_cpu: int, compress: bool) -> tuple[_LayerWork, ...]:
    """The four kinds of layer: input embedding, attention, MLP, output embedding."""
    placement = place(model, weights_gpu, weights_cpu, compress)
    work = []
    for j in (0, 1, 2, -1):
        kind, tensors = model.layers[j].kind, placement.layers[j]
        matrices = [t for t in tensors if len(t.shape) > 1]
        gathers = kind == "input_embed"  # takes a row a token, multiplies nothing
        work.append(
            _LayerWork(
                kind=kind,
                flop_per_token=0 if gathers else 2.0 * sum(t.shape[0] * t.shape[1] for t in matrices),
                read_bytes=0 if gathers else FP16_BYTES * float(sum(t.shape[0] * t.shape[1] for t in matrices)),
                dequantized_bytes=float(sum(decompressed_bytes(t) for t in matrices if t.compressed)),
                cpu_bytes=float(sum(t.stored_bytes for t in tensors if t.tier == "cpu")),
                cpu_copies=float(sum(1 + t.compressed for t in tensors if t.tier == "cpu")),
                disk_bytes=float(sum(t.stored_bytes for t in tensors if t.tier == "disk")),
                disk_steps=_disk_steps([t for t in tensors if t.tier == "disk"]),
                disk_threads=min(1.0, sum(t.tier == "disk" for t in matrices) / COPY_THREADS),
                relayed_bytes=_most_of_a_thread([t.stored_bytes for t in tensors if t.tier == "disk" and t.compressed]),
            )
        )
    return tuple(work)


def _disk_steps(tensors: Sequence[PlacedTensor]) -> float:
    """Each matrix's files (4-bit values and their scales are two) and once the layer; vectors take next to nothing."""
    return float(bool(tensors) + sum(1 + t.compressed for t in tensors if len(t.shape) > 1))


def _most_of_a_thread(tensors_bytes: Sequence[int]) -> float:
    """What the busiest copy thread has to do: a tensor is one thread's."""
    return max(float(max(tensors_bytes, default=0)), sum(tensors_bytes) / COPY_THREADS)


Terms = dict[str, Seconds]  # by name of TERMS


class Work(NamedTuple):
    """Seconds of a computation or of a move, and the terms they are made of.

    `main_thread` is the main thread's part, which launches kernels too: a computation's `seconds` contain it, a move's
    come after it. `file_threads` is the share of the copy threads that opens files meanwhile.
    """

    main_thread: Seconds
    seconds: Seconds
    terms: Terms
    file_threads: Seconds | float = 0.0


def _work(
    seconds: Seconds, terms: Terms, main_thread: Seconds | float = 0.0, file_threads: Seconds | float = 0.0
) -> Work:
    return Work(main_thread + 0.0 * seconds, seconds, terms, file_threads)


class _Run:
    """A setting, or many that differ in placement and batch alone, on a machine.

    Arrays have the axes (placement, micro-batch size, number of micro-batches, pass).
    """

    def __init__(
        self,
        settings: RunSettings,
        profile: MachineProfile,
        splits: Sequence[tuple[int, int]],
        batch_sizes: NDArray[np.int64],
        batch_counts: Sequence[int],
    ) -> None:
        self.settings, self.profile, self.model = settings, profile, settings.opt_model
        self.batch = np.asarray(batch_sizes, dtype=float)[..., None]
        self.batches = np.array(batch_counts, dtype=float).reshape(1, 1, -1, 1)
        placed = [_layers(self.model, *split, settings.compress_weight) for split in splits]
        self.input_embed, self.attention, self.mlp, self.output_embed = map(_LayerWork.side_by_side, zip(*placed))
        self.on_gpu, self.on_cpu, self.on_disk = cache_segments(settings)
        self.overlap = settings.overlap and settings.debug_mode != "breakdown"
        # Bytes of one position's key and value of one layer, as stored and as attended to.
        stored = CacheShape(self.model, 1, 1, settings.compress_cache)
        self.kv_stored_bytes = 2.0 * sum(stored.buffers)
        self.kv_fp16_bytes = 2.0 * FP16_BYTES * self.model.hidden_size
        self.cache_steps = (1.0 + 2.0 * len(stored.buffers)) * bool(self.on_disk)  # keys and values
        self.cache_threads = 2.0 / COPY_THREADS * bool(self.on_disk)
        self.cached = self._page_cache_serves_disk(splits, batch_sizes, batch_counts)

    def _page_cache_serves_disk(
        self, splits: Sequence[tuple[int, int]], batch_sizes: NDArray[np.int64], batch_counts: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Whether all that is read from disk in a pass fits in the RAM that is left.

        What is read in a circle and does not fit is evicted before its turn comes again: Linux's page cache
        then serves none of it (tried: 600 MB in a circle under 550 MB of cache, 0.1 % served).
        """
        settings, model = self.settings, self.model
        if settings.page_cache == "cold":
            return np.zeros((1, 1, 1, 1), dtype=bool)
        per_layer = (
            (self.input_embed, 1),
            (self.attention, model.num_layers),
            (self.mlp, model.num_layers),
            (self.output_embed, 1),
        )
        weights = sum(times * layer.disk_bytes for layer, times in per_layer)
        positions = settings.workload.prompt_len + settings.workload.gen_len - 1
        cache = self.on_disk * self.kv_stored_bytes * model.num_layers * positions * self.batch * self.batches
        taken = COPY_THREADS * COPY_BUFFER_BYTES + np.array(
            [sum(host_weights(model, *split, settings.compress_weight, settings.pin_weight)) for split in splits],
            dtype=float,
        ).reshape(-1, 1, 1, 1)
        of_batch = {}
        for n, batches in enumerate(batch_counts):
            for size in np.unique(batch_sizes[:, :, n]).tolist():
                of_batch[size, batches] = sum(host_batch(settings, size, batches).values())
        growing = np.vectorize(lambda size, batches: of_batch[size, batches], otypes=[float])
        taken = taken + growing(batch_sizes, np.array(batch_counts).reshape(1, 1, -1))[..., None]
        return (weights + cache > 0) & (weights + cache <= self.profile.shared_host_bytes - taken)

    # --- what a step does; every value in seconds -----------------------------------------------------------

    def compute(self, layer: _LayerWork, tokens: int, context: Seconds, prefill: bool) -> Work:
        """One micro-batch through one layer: its seconds, and the terms they are made of."""
        p, settings, h = self.profile, self.settings, self.model.hidden_size
        flop = layer.flop_per_token * self.batch * tokens
        gpu_bytes = layer.read_bytes + 0.0 * self.batch
        dequantized = layer.dequantized_bytes + 0.0 * self.batch
        on_cpu_bytes = moved_down = moved_up = 0.0 * self.batch
        if layer.kind == "output_embed":
            gpu_bytes = gpu_bytes + FP16_BYTES * self.batch * tokens * self.model.vocab_size
        if layer.kind == "attention" and prefill:
            flop = flop + 4.0 * self.batch * tokens * context * h
            scores = FP16_BYTES * self.batch * self.model.num_heads * tokens * context
            gpu_bytes = gpu_bytes + ATTENTION_SCORE_TRAVELS * scores
        elif layer.kind == "attention":
            attended = self.kv_fp16_bytes * self.batch * context
            if settings.cpu_cache_compute:
                on_gpu = self.on_gpu if settings.split.cache_is_mixed else 0.0
                on_cpu_bytes = attended * (1 - on_gpu) / _cpu_attention_efficiency(self.batch, h)
                # The query goes to the CPU as fp32, the value comes back as fp32.
                moved_down = moved_up = 2.0 * FP16_BYTES * self.batch * h
            else:
                on_gpu = 1.0
            gpu_bytes = gpu_bytes + on_gpu * attended
            if settings.compress_cache:
                dequantized = dequantized + on_gpu * attended
        if not settings.split.activations_gpu:
            hidden = FP16_BYTES * self.batch * tokens * h
            moved_down, moved_up = moved_down + hidden, moved_up + hidden
        terms = {
            "launch overhead": p.layer_overhead_us / 1e6 + 0.0 * self.batch,
            "GPU compute": flop / (p.gpu_fp16_tflop_s * 1e12),
            "GPU memory": gpu_bytes / (p.gpu_mem_gb_s * G),
            "dequantisation": dequantized / (p.dequantize_gb_s * G),
            "device to host": moved_down / (p.d2h_gb_s * G),
            "host to device": moved_up / (p.h2d_gb_s * G),
            "CPU attention": on_cpu_bytes / (p.cpu_attention_gb_s * G),
        }
        on_the_gpu = (
            np.maximum(terms["GPU compute"], terms["GPU memory"])
            + terms["dequantisation"]
            + terms["device to host"]
            + terms["host to device"]
        )
        seconds = np.maximum(terms["launch overhead"], on_the_gpu) + terms["CPU attention"]
        return _work(seconds, terms, terms["launch overhead"])

    def load_weights(self, layer: _LayerWork) -> Work:
        """Bringing a layer's weights to the GPU, once for all micro-batches.

        The copy threads read a tensor, then move it: four at a time from one disk, they end up together and
        then share the link, so that reading and moving add up. What is on the CPU moves meanwhile: the main thread
        launches a copy a tensor, and the first moves while it launches the others.
        """
        from_cpu = layer.cpu_bytes / (self.profile.h2d_gb_s * G)
        by_host = 0.0 if self.settings.pin_weight else layer.cpu_bytes / (self.profile.host_copy_gb_s * G)
        load = self._load(
            layer.disk_bytes, layer.disk_steps, layer.disk_threads, layer.relayed_bytes, from_cpu, by_host, to_gpu=True
        )
        launched = layer.cpu_copies * self.profile.layer_overhead_us / 1e6 / OPERATORS_A_LAYER
        load.terms["launch overhead"] = launched + 0.0 * load.seconds
        return load._replace(main_thread=load.main_thread + launched, seconds=np.maximum(load.seconds - launched, 0.0))

    def load_cache(self, context: Seconds) -> Work:
        """Bringing one micro-batch's keys and values of one layer to where attention is computed."""
        settings, p = self.settings, self.profile
        share = (1 + settings.attn_sparsity) / 2  # of the values only the most attended
        bytes_ = share * self.kv_stored_bytes * self.batch * context
        to_gpu = not settings.cpu_cache_compute
        # What lives on the CPU and is attended to there is within the rate of CPU attention.
        from_cpu = self.on_cpu * bytes_ / (p.h2d_gb_s * G) if to_gpu else 0.0 * bytes_
        by_host = self.on_cpu * bytes_ / (p.host_copy_gb_s * G) if to_gpu else 0.0
        moved = p.cache_overhead_us / 1e6 * bool(self.on_cpu and to_gpu)
        # Keys and values are a copy thread's each.
        relayed = self.on_disk * bytes_ / 2 if settings.compress_cache and to_gpu else 0.0
        return self._load(
            self.on_disk * bytes_, self.cache_steps, self.cache_threads, relayed, from_cpu, by_host, to_gpu, moved
        )

    def _load(
        self, disk_bytes, disk_steps, disk_threads, relayed_bytes, from_cpu, by_host, to_gpu: bool, moved: float = 0.0
    ) -> Work:
        p = self.profile
        opened = disk_steps * p.file_overhead_us / 1e6
        disk = np.where(self.cached, 0.0, disk_bytes / (p.disk_gb_s * G))
        from_page_cache = np.where(self.cached, disk_bytes / (p.page_cache_gb_s * G), 0.0)
        relay = relayed_bytes / (p.relay_gb_s * G) + 0.0 * disk
        after_disk = disk_bytes / (p.h2d_gb_s * G) if to_gpu else 0.0 * disk
        terms = {
            "disk": disk,
            "page cache": from_page_cache,
            "relay": relay,
            "tensor files": opened + 0.0 * disk,
            "host copy": by_host + 0.0 * disk,
            "cache moves": moved + 0.0 * disk,
            "host to device": from_cpu + after_disk + 0.0 * disk,
        }
        read = opened + np.maximum(np.maximum(disk, from_page_cache), relay)
        return _work(np.maximum(read, from_cpu) + after_disk, terms, by_host + moved, disk_threads)

    def store_cache(self, tokens: int) -> Work:
        """Taking one micro-batch's new keys and values of one layer to their home."""
        p = self.profile
        bytes_ = self.kv_stored_bytes * self.batch * tokens
        through_threads = self.on_disk + (self.on_cpu if tokens > 1 else 0.0)
        terms = {
            "tensor files": self.cache_steps * p.file_overhead_us / 1e6 + 0.0 * bytes_,
            "cache store": through_threads * bytes_ / (p.cache_store_gb_s * G),
            "disk write": self.on_disk * bytes_ / (p.disk_write_gb_s * G),
            "device to host": (self.on_cpu if tokens == 1 else 0.0) * bytes_ / (p.d2h_gb_s * G),
        }
        seconds = np.maximum(terms["cache store"], terms["disk write"]) + terms["tensor files"]
        return _work(seconds + terms["device to host"], terms, file_threads=self.cache_threads)

    # --- the schedule ------------------------------------------------------------------------------------------

    def passes(self, tokens: int, context: Seconds, prefill: bool, last: bool) -> tuple[Seconds, Terms]:
        """Seconds of each pass of a phase; `last`: its last pass is the run's last, and loads no next one."""
        blocks = self.model.num_layers
        load_cache = self.load_cache(context) if not prefill else None
        store = self.store_cache(tokens)
        total: Seconds = np.zeros((*self.batch.shape[:-1], context.size))
        terms: Terms = {name: np.zeros_like(total) for name in TERMS}
        for layer, following, times in (
            (self.input_embed, self.attention, 1),
            (self.attention, self.mlp, blocks),
            (self.mlp, self.attention, blocks - 1),
            (self.mlp, self.output_embed, 1),
            (self.output_embed, self.input_embed, 1),
        ):
            work = self.layer(self.compute(layer, tokens, context, prefill), layer, following, load_cache, store)
            total += times * work.seconds
            for name, part in work.terms.items():
                terms[name] += times * part
        if last and self.overlap and context.size:
            ahead, alone = (
                self.layer(
                    self.compute(self.output_embed, tokens, context, prefill),
                    self.output_embed,
                    following,
                    load_cache,
                    store,
                )
                for following in (self.input_embed, None)
            )
            total[..., -1:] += (alone.seconds - ahead.seconds + 0.0 * total)[..., -1:]
            for name, part in ahead.terms.items():
                terms[name][..., -1:] += (alone.terms.get(name, 0.0) - part + 0.0 * total)[..., -1:]
        return total, terms

    def layer(self, computed, layer: _LayerWork, following: _LayerWork | None, load_cache, store):
        """Seconds and terms of all micro-batches through one layer, with what moves beside it."""
        nothing = Work(np.zeros(1), np.zeros(1), {})
        n = self.batches
        weights = self.load_weights(following if self.overlap else layer) if following or not self.overlap else nothing
        load_cache = load_cache or nothing
        attention = layer.kind == "attention"
        before_attention = following is not None and following.kind == "attention"
        if not self.overlap:
            moves = (load_cache, store) if attention else ()
            a_batch = sum((move.main_thread + move.seconds for move in moves), computed.seconds)
            seconds = weights.main_thread + weights.seconds + n * a_batch
            return _work(seconds, _sum_terms((weights, 1), (computed, n), *((move, n) for move in moves)))

        # A step a micro-batch, with one wait at its end: the first brings the next layer's weights; at attention
        # each brings the next one's cache and stores the last one's; the last before attention brings its first.
        one = n == 1
        first = _beside(
            computed,
            (weights, 1),
            (load_cache, attention & ~one | before_attention & one),
            (store, layer.kind == "mlp"),
        )
        middle = _beside(computed, (load_cache, attention), (store, attention))
        last = _beside(computed, (load_cache, before_attention), (store, attention))
        steps = ((first, 1.0), (middle, np.maximum(n - 2, 0)), (last, np.minimum(n - 1, 1)))
        return _work(sum(step.seconds * times for step, times in steps), _sum_terms(*steps))


def _beside(computed: Work, *moves: tuple[Work, Any]) -> Work:
    """A computation with moves beside it, each taken or not: as long as the longest of them, and as what each
    part of the machine has to do for all of them. The main thread's part of a move comes before the computation.
    Copy threads open files in Python, as kernels are launched: one of them at a time (the interpreter's lock), so
    that launches wait, the more of these threads have one, but for no longer than opening takes."""
    terms = _sum_terms((computed, 1.0), *((move, taken) for move, taken in moves))
    seconds = computed.seconds + sum(move.main_thread * taken for move, taken in moves)
    for move, taken in moves:
        waited_for = np.minimum(move.file_threads * computed.main_thread, move.terms.get("tensor files", 0.0))
        seconds = np.maximum(seconds, (waited_for + move.main_thread + move.seconds) * taken)
    for part in terms.values():
        seconds = np.maximum(seconds, part)
    return _work(seconds, terms)


def _sum_terms(*parts: tuple[Work, Any]) -> Terms:
    total: Terms = {}
    for work, times in parts:
        for name, seconds in work.terms.items():
            total[name] = total[name] + seconds * times if name in total else seconds * times
    return total


def _cpu_attention_efficiency(batch: Seconds, hidden_size: int) -> Seconds:
    """How much of the CPU's attention rate small batches and heads get (FlexGen's cost_model.py: c1, c2, c3)."""
    small_batch = np.maximum(0.0, np.log2(64 / batch))
    small_model = max(0.0, float(np.log2(4096 / hidden_size)))
    return np.maximum(0.1, 1 + 0.0168 * small_batch * small_model - 0.0328 * small_batch - 0.0621 * small_model)


# --- predictions --------------------------------------------------------------------------------------------------


def latencies(settings: RunSettings, profile: MachineProfile) -> tuple[Seconds, Terms, bool]:
    """Seconds of each pass, prefill first, its terms, and whether the page cache serves what is on disk.

    With a debug mode the decode passes are what FlexGen projects: as many mean layer-steps as there are layers,
    taken from its second ten, an attention and an MLP in turn, in the first decode pass.
    """
    work = settings.workload
    run = _single(settings, profile)
    prefill, prefill_terms = run.passes(work.prompt_len, np.array([float(work.prompt_len)]), True, work.gen_len == 1)
    if settings.debug_mode:
        first = np.array([work.prompt_len + 1.0])
        cache, store = run.load_cache(first), run.store_cache(1)
        steps = [
            run.layer(run.compute(layer, 1, first, False), layer, following, cache, store)
            for layer, following in ((run.attention, run.mlp), (run.mlp, run.attention))
        ]
        half = len(run.model.layers) / 2
        repeated = np.ones(work.gen_len - 1)
        decode = half * (steps[0].seconds + steps[1].seconds) * repeated
        decode_terms = {name: part * repeated for name, part in _sum_terms(*((step, half) for step in steps)).items()}
    else:
        decode, decode_terms = run.passes(1, work.prompt_len + np.arange(1.0, work.gen_len), False, True)
    terms = {
        name: np.append(prefill_terms[name].ravel(), decode_terms.get(name, np.zeros(0)).ravel()) for name in TERMS
    }
    seconds = np.append(prefill.ravel(), decode.ravel())
    loading = np.zeros_like(seconds)
    if not settings.debug_mode:
        loading[:2] = (profile.prefill_kernel_loading_s, profile.decode_kernel_loading_s)[: loading.size]
    terms[KERNEL_LOADING] = loading
    return seconds + loading, terms, bool(run.cached.all())


def _single(settings: RunSettings, profile: MachineProfile) -> _Run:
    work = settings.workload
    sizes = np.array([[[work.gpu_batch_size]]])
    return _Run(settings, profile, (_representative(settings),), sizes, (work.num_gpu_batches,))


def fastest_latencies(
    settings: RunSettings,
    profile: MachineProfile,
    splits: Sequence[tuple[int, int]],
    batch_sizes: NDArray[np.int64],
    batch_counts: Sequence[int],
) -> Seconds:
    """Seconds of the whole run at each placement, micro-batch size and count (the axes of `batch_sizes`), at the
    least and nearly exactly: each decode pass at the mean context. (A pass is a maximum of lines in the context,
    so that their mean is no shorter.)"""
    return _whole_run(_Run(settings, profile, splits, batch_sizes, batch_counts))[0]


def by_batch_size(settings: RunSettings, profile: MachineProfile, batch_sizes: Sequence[int]) -> tuple[Seconds, Terms]:
    """Seconds of the whole run, and of each of its terms, at each micro-batch size; as exact as `fastest_latencies`."""
    sizes = np.array(batch_sizes).reshape(1, -1, 1)
    total, terms = _whole_run(
        _Run(settings, profile, (_representative(settings),), sizes, (settings.workload.num_gpu_batches,))
    )
    return total.ravel(), {name: part.ravel() for name, part in terms.items()}


def _whole_run(run: _Run) -> tuple[Seconds, Terms]:
    """Seconds of all passes and their terms, each decode pass at the mean context."""
    work = run.settings.workload
    prefill, prefill_terms = run.passes(work.prompt_len, np.array([float(work.prompt_len)]), True, work.gen_len == 1)
    total, terms = prefill[..., 0], {name: part[..., 0] for name, part in prefill_terms.items()}
    if work.gen_len > 1:
        mean = work.prompt_len + work.gen_len / 2
        decode, decode_terms = run.passes(1, np.array([mean, mean]), False, True)  # a usual pass, and the last
        usual = work.gen_len - 2
        total = total + usual * decode[..., 0] + decode[..., 1]
        terms = {name: terms[name] + usual * part[..., 0] + part[..., 1] for name, part in decode_terms.items()}
    return total, terms


@dataclass(frozen=True)
class LayerTimes:
    """What FlexGen does during one layer of a decode pass, in seconds: of the layer's own computation, of the cache,
    and of the weights that it loads: the next layer's, or without overlap its own.

    Reading from disk and copying from host memory start together; what was read crosses PCIe afterwards.
    """

    kind: str
    compute_s: float
    disk_s: float  # reading the weights, from the disk or the page cache
    disk_to_gpu_s: float
    cpu_to_gpu_s: float
    cache_load_s: float
    cache_store_s: float
    layer_s: float  # of all of it, as the schedule overlaps it


def layer_times(settings: RunSettings, profile: MachineProfile) -> tuple[LayerTimes, ...]:
    """The layers of a decode pass at the mean context: input embedding, attention, MLP (and these two again and again)
    and output embedding."""
    run, work = _single(settings, profile), settings.workload
    context = np.array([work.prompt_len + work.gen_len / 2])
    cache, store = run.load_cache(context), run.store_cache(1)
    layers = (run.input_embed, run.attention, run.mlp, run.output_embed)
    following = (run.attention, run.mlp, run.attention, run.input_embed)
    times = []
    for layer, after in zip(layers, following):
        loaded = after if run.overlap else layer
        load, computed = run.load_weights(loaded), run.compute(layer, 1, context, False)
        to_gpu_s = float(np.sum(loaded.disk_bytes)) / (profile.h2d_gb_s * G)
        is_attention = layer.kind == "attention"
        times.append(
            LayerTimes(
                kind=layer.kind,
                compute_s=work.num_gpu_batches * float(computed.seconds.item()),
                disk_s=max(float(load.terms[name].item()) for name in ("disk", "page cache", "relay"))
                + float(load.terms["tensor files"].item()),
                disk_to_gpu_s=to_gpu_s,
                cpu_to_gpu_s=float(load.terms["host to device"].item()) - to_gpu_s,
                cache_load_s=is_attention * work.num_gpu_batches * float((cache.main_thread + cache.seconds).item()),
                cache_store_s=is_attention * work.num_gpu_batches * float(store.seconds.item()),
                layer_s=float(run.layer(computed, layer, after, cache, store).seconds.item()),
            )
        )
    return tuple(times)


def _representative(settings: RunSettings) -> tuple[int, int]:
    split = settings.split
    return representative_split(settings.opt_model, split.weights_gpu, split.weights_cpu)


def predict(settings: RunSettings, profile: MachineProfile) -> Prediction:
    """What FlexGen's command would print for these settings on this machine, and the memory that it would take."""
    gpu, cpu = _representative(settings)
    if (gpu, cpu) != settings.split.percent[:2]:
        split = settings.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
        settings = settings.model_copy(update={"split": split})
    return _predict(settings, profile)


@lru_cache(maxsize=20_000)
def _predict(settings: RunSettings, profile: MachineProfile) -> Prediction:
    work = settings.workload
    seconds, by_pass, cached = latencies(settings, profile)
    terms = {name: float(part.sum()) for name, part in by_pass.items()}
    gpu = peak_gpu_memory(settings, profile.cublas_workspace_bytes)
    host = host_memory(settings)
    return Prediction(
        prefill_latency_s=float(seconds[0]),
        decode_pass_latencies_s=tuple(seconds[1:].tolist()),
        total_throughput_tok_s=work.generated_tokens / float(seconds.sum()),
        total_throughput_tok_s_bounds=(
            work.generated_tokens / sum(terms.values()),
            work.generated_tokens / max(terms.values()),
        ),
        bottleneck=max(terms, key=lambda name: terms[name]),
        terms_s=terms,
        page_cache_serves_disk=cached,
        peak_gpu_mem_gib=gpu.likeliest_gib,
        peak_gpu_mem_gib_range=gpu.range_gib,
        host_mem_gib=host.total_gib,
        fits=gpu.high_bytes <= profile.usable_gpu_bytes and host.total_bytes <= profile.usable_host_bytes,
    )


@dataclass(frozen=True)
class Measured:
    """A run's settings and the throughput that it had, in token/s."""

    settings: RunSettings
    total_throughput_tok_s: float


def calibrate(profile: MachineProfile, points: Sequence[Measured]) -> MachineProfile:
    """The profile with the rates that the points show: of each, the one of its bottleneck.

    Refused if two points have the same bottleneck, or a rate cannot make a point as fast or slow as it was.
    """
    points_of: dict[str, Measured] = {}
    for point in points:
        bottleneck = predict(point.settings, profile).bottleneck
        if bottleneck == KERNEL_LOADING:
            raise Refused(f"calibration: --percent {point.settings.split} is too short a run to show a rate")
        field = TERMS[bottleneck]
        if field in points_of:
            raise Refused(
                f"calibration: --percent {points_of[field].settings.split} and --percent {point.settings.split} "
                f"both show {field} alone; leave one out"
            )
        points_of[field] = point
    for _ in range(10):  # each rate moves the others' points a little
        before = profile
        for field, point in points_of.items():
            profile = with_rate_of(profile, field, point)
        if all(abs(getattr(profile, f) / getattr(before, f) - 1) < 1e-6 for f in points_of):
            break
    sources = profile.sources | {
        field: f"calibrated on --percent {point.settings.split}"
        f"{' --compress-weight' if point.settings.compress_weight else ''}: {point.total_throughput_tok_s:g} token/s"
        for field, point in points_of.items()
    }
    return profile.model_copy(update={"sources": sources})


def with_rate_of(profile: MachineProfile, field: str, point: Measured) -> MachineProfile:
    """The profile with `field` such that the point comes out as measured. Refused if none does."""
    settings = point.settings
    return with_seconds(
        profile,
        field,
        lambda tried: float(latencies(settings, tried)[0].sum()),
        settings.workload.generated_tokens / point.total_throughput_tok_s,
        f"--percent {settings.split}",
    )


def with_seconds(
    profile: MachineProfile, field: str, seconds_of: Callable[[MachineProfile], float], measured_s: float, what: str
) -> MachineProfile:
    """The profile with `field` such that `seconds_of` it is what was measured, by bisection. Refused if none does."""

    def with_value(value: float) -> MachineProfile:
        return profile.model_copy(update={field: value})

    def too_slow(value: float) -> bool:
        return seconds_of(with_value(value)) > measured_s

    slow, fast = (1e5, 1e-3) if field.endswith("_us") else (1e-4, 1e5)
    if not too_slow(slow) or too_slow(fast):
        raise Refused(f"calibration: no {field} makes {what} take {measured_s:.4g} s on {profile.name}")
    for _ in range(60):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if too_slow(middle) else (slow, middle)
    return with_value(fast)


@dataclass(frozen=True)
class Loads:
    """In how many seconds an attention layer's and an MLP's weights come to the GPU, each alone."""

    attention_s: float
    mlp_s: float

    @property
    def block_s(self) -> float:
        return self.attention_s + self.mlp_s


def loads(settings: RunSettings, profile: MachineProfile) -> Loads:
    """What FlexGen's own timer of load_weight (`--debug-mode breakdown`) would show."""
    run = _single(settings, profile)
    return Loads(
        *(
            float(load.main_thread.item() + load.seconds.item())
            for load in map(run.load_weights, (run.attention, run.mlp))
        )
    )


def with_page_cache_of(profile: MachineProfile, settings: RunSettings, measured: Loads) -> MachineProfile:
    """The profile with the overhead of a file and the page cache's rate that the two kinds of layer show: attention
    has more and smaller matrices than the MLP. Refused if no rate comes out.
    """
    run = _single(settings, profile)
    layers = (run.attention, run.mlp)
    steps = np.array([layer.disk_steps.item() for layer in layers])
    gigabytes = np.array([layer.disk_bytes.item() for layer in layers]) / G
    seconds = np.array([measured.attention_s, measured.mlp_s]) - gigabytes / profile.h2d_gb_s
    overhead_s, s_per_gb = np.linalg.solve(np.stack([steps, gigabytes], axis=1), seconds)
    if overhead_s > 0 and s_per_gb > 0:
        return profile.model_copy(
            update={"file_overhead_us": 1e6 * float(overhead_s), "page_cache_gb_s": 1 / float(s_per_gb)}
        )
    return with_seconds(
        profile.model_copy(update={"file_overhead_us": 0.0}),
        "page_cache_gb_s",
        lambda tried: loads(settings, tried).block_s,
        measured.block_s,
        "a block's loads",
    )
