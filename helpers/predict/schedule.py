"""FlexGen's schedule in seconds: computation, loads and stores of each layer, and what overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helpers.machine.profiles import MachineProfile
from helpers.models import FP16_BYTES
from helpers.placement import place
from helpers.predict.host_memory import host_batch, host_weights, largest_cache_elements, largest_weight_elements
from helpers.predict.layer_work import LayerWork, layer_work
from helpers.predict.page_cache import History, Served, served
from helpers.predict.tensors import COPY_BUFFER_BYTES, COPY_THREADS, CacheShape, cache_segments
from helpers.settings import RunSettings
from helpers.units import GIB

# The terms of a pass: parts of the machine, each with the profile's field for its rate.
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
G = 1e9
OPERATORS_A_LAYER = 10  # counted; the main thread launches each, and each copy of a tensor to the GPU
# Share of a layer's wait for its copy threads left when it overlaps computing: fitted to `20 40` on five H200 machines.
OVERLAPPED_WAIT = 0.7
# Time to decompress a 4-bit cache on the CPU, by that of attention there: 0.55 and 0.5 GB/s, opt-mini on an EPYC core.
CPU_DECOMPRESSION = 0.9
ATTENTION_SCORE_PASSES = 7  # how often mha writes or reads its b x heads x s x s scores

Seconds = NDArray[np.float64]


Terms = dict[str, Seconds]  # by name of TERMS


class Work(NamedTuple):
    """Seconds of a computation or of a move, and the terms that make them up.

    `main_thread` is the time on the main thread, which launches kernels too: part of a computation's `seconds`, but in
    addition to a move's. `file_threads` is the share of the copy threads that open files meanwhile.
    """

    main_thread: Seconds
    seconds: Seconds
    terms: Terms
    file_threads: Seconds | float = 0.0


def _work(
    seconds: Seconds, terms: Terms, main_thread: Seconds | float = 0.0, file_threads: Seconds | float = 0.0
) -> Work:
    return Work(main_thread + 0.0 * seconds, seconds, terms, file_threads)


class Schedule:
    """One setting, or many that differ only in placement and batch, on a machine; `history` is the page cache's.

    Arrays have the axes (placement, micro-batch size, number of micro-batches, pass).
    """

    def __init__(
        self,
        settings: RunSettings,
        profile: MachineProfile,
        splits: Sequence[tuple[int, int]],
        batch_sizes: NDArray[np.int64],
        batch_counts: Sequence[int],
        history: History = "likely",
    ) -> None:
        self.settings, self.profile, self.model = settings, profile, settings.opt_model
        self.batch = np.asarray(batch_sizes, dtype=float)[..., None]
        self.batches = np.array(batch_counts, dtype=float).reshape(1, 1, -1, 1)
        placed = [layer_work(self.model, *split, settings.compress_weight) for split in splits]
        self.input_embed, self.attention, self.mlp, self.output_embed = map(LayerWork.side_by_side, zip(*placed))
        self.on_gpu, self.on_cpu, self.on_disk = cache_segments(settings)
        self.overlap = settings.overlap and settings.debug_mode != "breakdown"
        # Bytes of one position's key and value of one layer, as stored and as attended to.
        stored = CacheShape(self.model, 1, 1, settings.compress_cache)
        self.kv_stored_bytes = 2.0 * sum(stored.buffers)
        self.kv_fp16_bytes = 2.0 * FP16_BYTES * self.model.hidden_size
        self.cache_files = 2.0 * len(stored.buffers) * bool(self.on_disk)  # of keys and of values
        self.cache_threads = 2.0 / COPY_THREADS * bool(self.on_disk)
        self.direct = settings.disk_reader == "direct"
        self.served = self._served(splits, batch_sizes, batch_counts)
        self.from_page_cache = getattr(self.served, history)
        self.adds_up_terms = True  # a comparison of many settings needs only the seconds, in half the time

    def _served(
        self, splits: Sequence[tuple[int, int]], batch_sizes: NDArray[np.int64], batch_counts: Sequence[int]
    ) -> Served:
        """The page cache's share of what each pass reads from the disk tier, with the room that the run leaves it."""
        settings, model = self.settings, self.model
        per_layer = (
            (self.input_embed, 1),
            (self.attention, model.num_layers),
            (self.mlp, model.num_layers),
            (self.output_embed, 1),
        )
        weights = sum(times * layer.disk_bytes for layer, times in per_layer) * (not self.direct)
        # The first and the last layer share the token embedding, and the lab links it: one file, read twice.
        twice = self._shared_embedding(splits) if not (self.direct or settings.compress_weight) else 0.0
        positions = settings.workload.prompt_len + settings.workload.gen_len - 1
        cache = self.on_disk * self.kv_stored_bytes * model.num_layers * positions * self.batch * self.batches
        self.reads_through_page_cache = np.asarray(weights + cache) > 0
        taken = np.array(
            [sum(host_weights(model, *split, settings.compress_weight, settings.pin_weight)) for split in splits],
            dtype=float,
        ).reshape(-1, 1, 1, 1)
        of_batch = {}
        for n, batches in enumerate(batch_counts):
            for size in np.unique(batch_sizes[:, :, n]).tolist():
                of_batch[size, batches] = sum(host_batch(settings, size, batches).values())
        growing = np.vectorize(lambda size, batches: of_batch[size, batches], otypes=[float])
        taken = taken + growing(batch_sizes, np.array(batch_counts).reshape(1, 1, -1))[..., None]
        taken = taken + COPY_THREADS * self._copy_buffer_bytes(splits, batch_sizes)
        if settings.page_cache == "cold":
            return Served.nothing()
        active = self.profile.mapped_files_gib * GIB + twice
        return served(weights + cache - twice, self.profile.shared_host_bytes - taken, active)

    def _shared_embedding(self, splits: Sequence[tuple[int, int]]) -> Seconds:
        """Bytes of the token embedding where both of its copies are on disk."""
        found = []
        for split in splits:
            layers = place(self.model, *split, self.settings.compress_weight).layers
            on_disk = [{t.name: t.stored_bytes for t in layers[j] if t.tier == "disk"} for j in (0, -1)]
            found.append(sum(size for name, size in on_disk[0].items() if name in on_disk[1]))
        return np.array(found, dtype=float).reshape(-1, 1, 1, 1)

    def _copy_buffer_bytes(self, splits: Sequence[tuple[int, int]], batch_sizes: NDArray[np.int64]) -> Seconds | float:
        """Pinned bytes of one copy thread's buffer at each placement and micro-batch size."""
        settings = self.settings
        if settings.copy_buffer == "stock":
            return float(COPY_BUFFER_BYTES)
        weights = [largest_weight_elements(settings, *split) for split in splits]
        sizes = np.unique(batch_sizes)
        cache = np.array([largest_cache_elements(settings, int(size)) for size in sizes])
        largest = np.maximum(np.array(weights).reshape(-1, 1, 1), cache[np.searchsorted(sizes, batch_sizes)])
        return FP16_BYTES * largest[..., None].astype(float)

    # ---- steps, in seconds

    def compute(self, layer: LayerWork, tokens: int, context: Seconds, prefill: bool) -> Work:
        """Seconds and terms of one micro-batch in one layer."""
        p, settings, h = self.profile, self.settings, self.model.hidden_size
        flop = layer.flop_per_token * self.batch * tokens
        gpu_bytes = layer.read_bytes + 0.0 * self.batch
        dequantized = layer.dequantized_bytes + 0.0 * self.batch
        on_cpu_bytes = moved_down = moved_up = 0.0 * self.batch
        attends, on_gpu = layer.kind == "attention" and not prefill, 1.0
        if layer.kind == "output_embed":
            gpu_bytes = gpu_bytes + FP16_BYTES * self.batch * tokens * self.model.vocab_size
        if layer.kind == "attention" and prefill:
            flop = flop + 4.0 * self.batch * tokens * context * h
            scores = FP16_BYTES * self.batch * self.model.num_heads * tokens * context
            gpu_bytes = gpu_bytes + ATTENTION_SCORE_PASSES * scores
        elif attends:
            attended = self.kv_fp16_bytes * self.batch * context
            if settings.cpu_cache_compute:
                on_gpu = self.on_gpu if settings.split.cache_is_mixed else 0.0
                on_cpu_bytes = attended * (1 - on_gpu) / _cpu_attention_efficiency(self.batch, h)
                on_cpu_bytes = on_cpu_bytes * (1 + CPU_DECOMPRESSION * settings.compress_cache)
                # The query goes to the CPU as fp32, and the result comes back as fp32.
                moved_down = moved_up = 2.0 * FP16_BYTES * self.batch * h
            gpu_bytes = gpu_bytes + on_gpu * attended
            if settings.compress_cache:
                dequantized = dequantized + on_gpu * attended
        if not settings.split.activations_gpu:
            hidden = FP16_BYTES * self.batch * tokens * h
            moved_down, moved_up = moved_down + hidden, moved_up + hidden
        decompressed = layer.dequantized_tensors + 2.0 * (attends and settings.compress_cache and on_gpu > 0)
        launched_us = p.layer_overhead_us + decompressed * p.dequantize_overhead_us
        terms = {
            "launch overhead": launched_us / 1e6 + 0.0 * self.batch,
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

    def load_weights(self, layer: LayerWork) -> Work:
        """Bring a layer's weights to the GPU, once for all micro-batches.

        The copy threads read a tensor, then move it. Four read from one disk, finish together and then share the link,
        so reading and moving add up. Weights on the CPU move meanwhile: the main thread launches one copy per tensor,
        and the first moves while it launches the others.
        """
        from_cpu = layer.cpu_bytes / (self.profile.h2d_gb_s * G)
        by_host = 0.0 if self.settings.pin_weight else layer.cpu_bytes / (self.profile.host_copy_gb_s * G)
        if self.direct:
            load = self._load_direct(layer, from_cpu, by_host)
        else:
            load = self._load(
                layer.disk_bytes,
                layer.disk_files,
                layer.disk_threads,
                layer.relayed_bytes,
                layer.large_bytes,
                from_cpu,
                by_host,
                to_gpu=True,
            )
        launched = layer.cpu_copies * self.profile.layer_overhead_us / 1e6 / OPERATORS_A_LAYER
        load.terms["launch overhead"] = launched + 0.0 * load.seconds
        return load._replace(main_thread=load.main_thread + launched, seconds=np.maximum(load.seconds - launched, 0.0))

    def load_cache(self, context: Seconds) -> Work:
        """Bring one micro-batch's keys and values of one layer to where attention is computed."""
        settings, p = self.settings, self.profile
        share = (1 + settings.attn_sparsity) / 2  # with sparse attention, only the most attended values
        bytes_ = share * self.kv_stored_bytes * self.batch * context
        to_gpu = not settings.cpu_cache_compute
        # The rate of CPU attention includes reading the cache there.
        from_cpu = self.on_cpu * bytes_ / (p.h2d_gb_s * G) if to_gpu else 0.0 * bytes_
        by_host = self.on_cpu * bytes_ / (p.host_copy_gb_s * G) if to_gpu else 0.0
        moved = p.cache_overhead_us / 1e6 * bool(self.on_cpu and to_gpu)
        # One copy thread brings the keys, another the values.
        relayed = self.on_disk * bytes_ / 2 if settings.compress_cache and to_gpu else 0.0
        return self._load(
            self.on_disk * bytes_, self.cache_files, self.cache_threads, relayed, 0.0, from_cpu, by_host, to_gpu, moved
        )

    def _load(
        self,
        disk_bytes: Seconds,
        disk_files: Seconds | float,
        disk_threads: Seconds | float,
        relayed_bytes: Seconds | float,
        large_bytes: Seconds | float,
        from_cpu: Seconds,
        by_host: Seconds | float,
        to_gpu: bool,
        moved: float = 0.0,
    ) -> Work:
        p = self.profile
        waits = np.sign(disk_files) * (OVERLAPPED_WAIT if self.overlap else 1.0)
        opened = (disk_files + waits) * p.file_overhead_us / 1e6
        disk = (1 - self.from_page_cache) * disk_bytes / (p.disk_gb_s * G)
        from_page_cache = self.from_page_cache * np.maximum(
            disk_bytes / (p.page_cache_gb_s * G), large_bytes / (p.large_file_gb_s * G)
        )
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
        # A copy thread converts what it has just read, so that its disk and its conversion take turns.
        read = opened + disk + np.maximum(from_page_cache, relay)
        return _work(np.maximum(read, from_cpu) + after_disk, terms, by_host + moved, disk_threads)

    def _load_direct(self, layer: LayerWork, from_cpu: Seconds, by_host: Seconds | float) -> Work:
        """The direct reader's part: reading and moving to the GPU overlap, and 4-bit weights stay as they are."""
        disk = layer.disk_bytes / (self.profile.direct_disk_gb_s * G)
        to_gpu = from_cpu + layer.disk_bytes / (self.profile.h2d_gb_s * G)
        terms = {"disk": disk, "host copy": by_host + 0.0 * disk, "host to device": to_gpu}
        return _work(np.maximum(disk, to_gpu), terms, by_host)

    def store_cache(self, tokens: int) -> Work:
        """Store one micro-batch's new keys and values of one layer."""
        p = self.profile
        bytes_ = self.kv_stored_bytes * self.batch * tokens
        through_threads = self.on_disk + (self.on_cpu if tokens > 1 else 0.0)
        terms = {
            "tensor files": (self.cache_files + np.sign(self.cache_files)) * p.file_overhead_us / 1e6 + 0.0 * bytes_,
            "cache store": through_threads * bytes_ / (p.cache_store_gb_s * G),
            "disk write": self.on_disk * bytes_ / (p.disk_write_gb_s * G),
            "device to host": (self.on_cpu if tokens == 1 else 0.0) * bytes_ / (p.d2h_gb_s * G),
        }
        seconds = np.maximum(terms["cache store"], terms["disk write"]) + terms["tensor files"]
        return _work(seconds + terms["device to host"], terms, file_threads=self.cache_threads)

    # ---- the schedule

    def passes(self, tokens: int, context: Seconds, prefill: bool, last: bool) -> tuple[Seconds, Terms]:
        """Seconds and terms of each pass of a phase; `last`: its last pass is the run's last, and loads no next one."""
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

    def layer(
        self, computed: Work, layer: LayerWork, following: LayerWork | None, load_cache: Work | None, store: Work
    ) -> Work:
        """Seconds and terms of all micro-batches in one layer, with the moves that overlap them."""
        nothing = Work(np.zeros(1), np.zeros(1), {})
        n = self.batches
        loaded = following if self.overlap else layer
        weights = self.load_weights(loaded) if loaded else nothing
        load_cache = load_cache or nothing
        attention = layer.kind == "attention"
        before_attention = following is not None and following.kind == "attention"
        if not self.overlap:
            moves = (load_cache, store) if attention else ()
            a_batch = computed.seconds
            for move in moves:
                a_batch = a_batch + (move.main_thread + move.seconds)
            seconds = weights.main_thread + weights.seconds + n * a_batch
            return _work(seconds, sum_terms((weights, 1), (computed, n), *((move, n) for move in moves)))

        # One step per micro-batch, with one wait at its end. The first loads the next layer's weights. In attention,
        # each loads the next micro-batch's cache and stores the previous one's; the last one before attention loads
        # the first micro-batch's cache.
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
        terms = sum_terms(*steps) if self.adds_up_terms else {}
        return _work(np.asarray(sum(step.seconds * times for step, times in steps)), terms)


def _beside(computed: Work, *moves: tuple[Work, Any]) -> Work:
    """A computation overlapped by moves, each made or not: as long as the longest of them, and at least as long as each
    part of the machine needs for all of them together. The main thread's part of a move precedes the computation.

    Copy threads open files in Python, which also launches kernels, one thread at a time (the interpreter's lock). So
    launches wait, longer the more threads open a file, but no longer than opening takes.
    """
    terms = sum_terms((computed, 1.0), *((move, taken) for move, taken in moves))
    seconds = computed.seconds + sum(move.main_thread * taken for move, taken in moves)
    for move, taken in moves:
        waited_for = np.minimum(move.file_threads * computed.main_thread, move.terms.get("tensor files", 0.0))
        seconds = np.maximum(seconds, (waited_for + move.main_thread + move.seconds) * taken)
    for part in terms.values():
        seconds = np.maximum(seconds, part)
    return _work(seconds, terms)


def sum_terms(*parts: tuple[Work, Any]) -> Terms:
    total: Terms = {}
    for work, times in parts:
        for name, seconds in work.terms.items():
            total[name] = total[name] + seconds * times if name in total else seconds * times
    return total


def _cpu_attention_efficiency(batch: Seconds, hidden_size: int) -> Seconds:
    """Share of the CPU's attention rate that small batches and models reach (FlexGen's cost_model.py: c1, c2, c3)."""
    small_batch = np.maximum(0.0, np.log2(64 / batch))
    small_model = max(0.0, float(np.log2(4096 / hidden_size)))
    return np.maximum(0.1, 1 + 0.0168 * small_batch * small_model - 0.0328 * small_batch - 0.0621 * small_model)
