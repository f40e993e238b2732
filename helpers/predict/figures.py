"""Predictions and search results as the command line prints them."""

from __future__ import annotations

from typing import Any

from helpers.machine.profiles import MachineProfile
from helpers.placement import place
from helpers.predict.search import SearchResult
from helpers.predict.time_model import Prediction
from helpers.printing import in_words, lines, wrapped
from helpers.results import settings_as_json
from helpers.settings import RunSettings
from helpers.units import GIB

PREDICTED_WITHIN = 0.1  # roughly the mean error on the machines that predictions were judged on: docs/predictions.md


def prediction_as_json(settings: RunSettings, found: Prediction, profile: MachineProfile) -> dict[str, Any]:
    """The figures that `predict --json` prints."""
    return {
        "kind": "predicted",
        "machine": profile.name,
        "device": settings.device,
        **settings_as_json(settings),
        "fits": found.fits,
        "reason": None if found.fits else what_does_not_fit(found, profile),
        "total_throughput_tok_s": found.total_throughput_tok_s,
        "total_throughput_tok_s_bounds": list(found.total_throughput_tok_s_bounds),
        "prefill_latency_s": found.prefill_latency_s,
        "decode_latency_s": found.decode_latency_s,
        "total_latency_s": found.total_latency_s,
        "bottleneck": found.bottleneck,
        "terms_s": found.terms_s,
        "peak_gpu_mem_gib": found.peak_gpu_mem_gib,
        "peak_gpu_mem_gib_range": list(found.peak_gpu_mem_gib_range),
        "host_mem_gib": found.host_mem_gib,
        "page_cache_serves_disk": found.page_cache_serves_disk,
        "page_cache_share_range": list(found.page_cache_share_range),
        "command": settings.flexgen_command,
    }


def prediction_as_text(settings: RunSettings, found: Prediction, profile: MachineProfile) -> str:
    figures = prediction_as_json(settings, found, profile)
    long = {name: seconds for name, seconds in found.terms_s.items() if seconds > 1e-3 * found.total_latency_s}
    terms = "\n".join(f"{name} {in_words(seconds)} s" for name, seconds in long.items())
    reason = figures.pop("reason")
    short = [f"does not fit: {reason}; time and throughput are as if there were enough"] if reason else []
    return "\n".join([*short, lines(figures | {"achieved": str(placement_of(settings)), "terms_s": terms})])


def what_does_not_fit(found: Prediction, profile: MachineProfile) -> str:
    """The memory that a prediction exceeds, in GiB."""
    memories = (
        ("GPU memory", found.peak_gpu_mem_gib_range[1], profile.usable_gpu_bytes / GIB, profile.gpu_overhead_gib),
        ("host memory", found.host_mem_gib, profile.usable_host_bytes / GIB, profile.host_overhead_gib),
    )
    return "; ".join(
        f"needs {needed_gib:.2f} GiB of {what}, {profile.name} has {usable_gib:.2f} "
        f"(plus {overhead_gib:.2f} for Python, torch and CUDA)"
        for what, needed_gib, usable_gib, overhead_gib in memories
        if needed_gib > usable_gib
    )


def search_as_json(found: SearchResult, model: str, profile: MachineProfile) -> dict[str, Any]:
    """The choices that `search --json` prints, with the best one separate."""
    choices = [
        {
            "percent": str(choice.settings.split),
            "achieved": settings_as_json(choice.settings)["achieved"],
            "gpu_batch_size": choice.settings.workload.gpu_batch_size,
            "num_gpu_batches": choice.settings.workload.num_gpu_batches,
            "compress_weight": choice.settings.compress_weight,
            "compress_cache": choice.settings.compress_cache,
            "cpu_cache_compute": choice.settings.cpu_cache_compute,
            "pin_weight": choice.settings.pin_weight,
            "disk_reader": choice.settings.disk_reader,
            "copy_buffer": choice.settings.copy_buffer,
            "total_throughput_tok_s": choice.prediction.total_throughput_tok_s,
            "peak_gpu_mem_gib": choice.prediction.peak_gpu_mem_gib,
            "host_mem_gib": choice.prediction.host_mem_gib,
            "bottleneck": choice.prediction.bottleneck,
            "command": choice.command,
        }
        for choice in (found.best, *found.runners_up)
    ]
    return {
        "kind": "predicted",
        "machine": profile.name,
        "model": model,
        "compared": found.compared,
        "limit": found.limit,
        "lead": found.lead,
        "best": choices[0],
        "runners_up": choices[1:],
    }


def search_as_text(found: SearchResult, profile: MachineProfile) -> str:
    shown = wrapped(f"predicted for {profile.name}, the best of {found.compared:,} settings that fit; {found.limit}")
    ranked = (found.best, *found.runners_up)
    for choice in ranked:
        predicted = choice.prediction
        shown += [
            f"{predicted.total_throughput_tok_s:9.2f} token/s {predicted.peak_gpu_mem_gib:7.2f} GiB GPU "
            f"{predicted.host_mem_gib:7.2f} GiB host  {predicted.bottleneck}",
            f"{'':9} weights: {choice.settings.split.in_words} asked, {placement_of(choice.settings)} achieved",
            f"{'':9} {choice.command}",
        ]
    if found.lead is not None:
        shown += wrapped(f"the best is {100 * found.lead:.2g} % faster than the next")
    fastest = found.best.prediction.total_throughput_tok_s
    alike = sum(c.prediction.total_throughput_tok_s >= (1 - PREDICTED_WITHIN) * fastest for c in ranked)
    if alike > 1:
        shown += wrapped(
            f"the first {alike} are within {100 * PREDICTED_WITHIN:.0f} % of the fastest, about the predictions' own "
            "error: measure them to find the fastest"
        )
    return "\n".join(shown)


def placement_of(settings: RunSettings) -> str:
    """The achieved split in words."""
    split = settings.split
    return str(place(settings.opt_model, split.weights_gpu, split.weights_cpu, settings.compress_weight))
