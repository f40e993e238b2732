"""Time of a run before it starts: FlexGen's schedule, with each layer's work at the rates that the machine achieves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from helpers.machine.profiles import MachineProfile
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.page_cache import History
from helpers.predict.schedule import TERMS, G, Schedule, Seconds, Terms, Work, sum_terms
from helpers.predict.tensors import representative_split
from helpers.settings import RunSettings

KERNEL_LOADING = "kernel loading"  # a term without a rate


# How far a run's rates have been from those of probes minutes before, and how much longer launches take on a core that
# other processes use too: judged on six H200 machines, whose cores are shared.
RATE_SPREAD = 0.2
SHARED_CORE = 2.0


@dataclass(frozen=True)
class Prediction:
    """A run's prediction. Throughput and its bounds in token/s, memory in GiB, `terms_s` in seconds of the whole run.

    At the upper bound everything overlaps, the page cache serves as much as it may, and the longest term's rate is
    RATE_SPREAD higher. At the lower bound nothing overlaps, the page cache serves as little as it may, other processes
    use the core that launches kernels, and all rates are RATE_SPREAD lower. `bottleneck` is the longest term.
    `page_cache_share_range`: share of the disk tier's bytes that the page cache serves, at worst and at best.
    """

    prefill_latency_s: float
    decode_pass_latencies_s: tuple[float, ...]
    total_throughput_tok_s: float
    total_throughput_tok_s_bounds: tuple[float, float]
    bottleneck: str
    terms_s: dict[str, float]
    page_cache_serves_disk: bool
    page_cache_share_range: tuple[float, float]
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


def latencies(
    settings: RunSettings, profile: MachineProfile, history: History = "likely"
) -> tuple[Seconds, Terms, bool]:
    """Seconds of each pass, prefill first, its terms, and whether the page cache serves the disk tier.

    With a debug mode, decode passes are as FlexGen projects them: the mean of its second ten layer-steps (attention and
    MLP in turn, in the first decode pass) times the number of layers.
    """
    work = settings.workload
    run = single(settings, profile, history)
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
        decode_terms = {name: part * repeated for name, part in sum_terms(*((step, half) for step in steps)).items()}
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
    return seconds + loading, terms, bool((run.reads_through_page_cache & (run.from_page_cache == 1)).all())


def single(settings: RunSettings, profile: MachineProfile, history: History = "likely") -> Schedule:
    """The schedule of one setting."""
    work = settings.workload
    sizes = np.array([[[work.gpu_batch_size]]])
    return Schedule(settings, profile, (_representative(settings),), sizes, (work.num_gpu_batches,), history)


def fastest_latencies(
    settings: RunSettings,
    profile: MachineProfile,
    splits: Sequence[tuple[int, int]],
    batch_sizes: NDArray[np.int64],
    batch_counts: Sequence[int],
) -> Seconds:
    """Seconds of the whole run at each placement, micro-batch size and count (the axes of `batch_sizes`).

    Every decode pass is taken at the mean context. That is nearly exact, and never too long: a pass is a maximum of
    linear functions of the context.
    """
    run = Schedule(settings, profile, splits, batch_sizes, batch_counts)
    run.adds_up_terms = False
    return _whole_run(run)[0]


def by_batch_size(settings: RunSettings, profile: MachineProfile, batch_sizes: Sequence[int]) -> tuple[Seconds, Terms]:
    """Seconds of the whole run, and of each of its terms, at each micro-batch size; as exact as `fastest_latencies`."""
    sizes = np.array(batch_sizes).reshape(1, -1, 1)
    total, terms = _whole_run(
        Schedule(settings, profile, (_representative(settings),), sizes, (settings.workload.num_gpu_batches,))
    )
    return total.ravel(), {name: part.ravel() for name, part in terms.items()}


def _whole_run(run: Schedule) -> tuple[Seconds, Terms]:
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
    """Seconds of each part of one layer of a decode pass: computation, cache, and loading weights (the next layer's, or
    without overlap its own).

    Reading from disk and copying from host memory start together; weights from disk cross PCIe after they are read.
    """

    kind: str
    compute_s: float
    disk_s: float  # reading the weights, from the disk or the page cache
    disk_to_gpu_s: float
    cpu_to_gpu_s: float
    cache_load_s: float
    cache_store_s: float
    layer_s: float  # all of it, overlapped as FlexGen's schedule does


def layer_times(settings: RunSettings, profile: MachineProfile) -> tuple[LayerTimes, ...]:
    """The four kinds of layer, in their order, in a decode pass at the mean context."""
    run, work = single(settings, profile), settings.workload
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
                disk_s=_seconds(load, "disk", "tensor files")
                + max(_seconds(load, "page cache"), _seconds(load, "relay")),
                disk_to_gpu_s=to_gpu_s,
                cpu_to_gpu_s=_seconds(load, "host to device") - to_gpu_s,
                cache_load_s=is_attention * work.num_gpu_batches * float((cache.main_thread + cache.seconds).item()),
                cache_store_s=is_attention * work.num_gpu_batches * float(store.seconds.item()),
                layer_s=float(run.layer(computed, layer, after, cache, store).seconds.item()),
            )
        )
    return tuple(times)


def _seconds(work: Work, *terms: str) -> float:
    return sum(float(work.terms[name].item()) for name in terms if name in work.terms)


def _representative(settings: RunSettings) -> tuple[int, int]:
    split = settings.split
    return representative_split(settings.opt_model, split.weights_gpu, split.weights_cpu)


def predict(settings: RunSettings, profile: MachineProfile) -> Prediction:
    """Predict the figures FlexGen's command would print for these settings on this machine, and its memory use."""
    gpu, cpu = _representative(settings)
    if (gpu, cpu) != settings.split.percent[:2]:
        split = settings.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
        settings = settings.model_copy(update={"split": split})
    return _predict(settings, profile)


@lru_cache(maxsize=512)  # up to 64 KB each
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
        total_throughput_tok_s_bounds=_bounds(settings, profile),
        bottleneck=max(terms, key=lambda name: terms[name]),
        terms_s=terms,
        page_cache_serves_disk=cached,
        page_cache_share_range=_page_cache_share_range(settings, profile),
        peak_gpu_mem_gib=gpu.likeliest_gib,
        peak_gpu_mem_gib_range=gpu.range_gib,
        host_mem_gib=host.total_gib,
        fits=gpu.high_bytes <= profile.usable_gpu_bytes and host.total_bytes <= profile.usable_host_bytes,
    )


def _bounds(settings: RunSettings, profile: MachineProfile) -> tuple[float, float]:
    worst, best = (
        {name: float(part.sum()) for name, part in latencies(settings, profile, history)[1].items()}
        for history in ("worst", "best")
    )
    slowest_s = sum(worst.values()) + (SHARED_CORE - 1) * worst["launch overhead"]
    tokens = settings.workload.generated_tokens
    return tokens / slowest_s / (1 + RATE_SPREAD), tokens / max(best.values()) * (1 + RATE_SPREAD)


def _page_cache_share_range(settings: RunSettings, profile: MachineProfile) -> tuple[float, float]:
    run = single(settings, profile)
    reads = run.reads_through_page_cache.any()
    return (float(run.served.worst.item()), float(run.served.best.item())) if reads else (0.0, 0.0)
