"""Measure a machine's profile: its ceilings, and rates from a few short FlexGen runs (probes)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers import lab
from helpers.engine.core_speed import FULL_SPEED
from helpers.errors import Refused
from helpers.machine import profiles
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.measured_profile import from_ceilings
from helpers.machine.profiles import MachineProfile
from helpers.models import PROBE_MODEL
from helpers.predict.rates import Loads, loads, with_page_cache_of, with_seconds
from helpers.predict.time_model import latencies
from helpers.results import RunRecord
from helpers.settings import OffloadSplit, RunSettings, Workload

_ON_GPU, _ON_CPU, _ON_DISK = "100 0 100 0 100 0", "0 100 100 0 100 0", "0 0 100 0 100 0"
_CACHE_ON_CPU = "100 0 0 100 100 0"


def probes() -> dict[str, RunSettings]:
    """The probes by the rate each measures, ordered so that each needs only the rates before it.

    Their model has a few wide layers, so that passes are short and bound by that rate. Processes on one machine differ,
    most of all when launches are the bottleneck, so there are several of each. Reads are timed layer by layer
    (breakdown): one process shows dozens of them, and attention's four small matrices and the MLP's two large ones tell
    a file's overhead from the rate.
    """

    def probe(percent: str, gen_len: int = 8, batch: int = 4, **options: Any) -> RunSettings:
        return RunSettings(
            model=PROBE_MODEL.name,
            split=OffloadSplit.parse(percent),
            device="cuda",
            copy_buffer="fit",
            workload=Workload(gpu_batch_size=batch, num_gpu_batches=1, prompt_len=128, gen_len=gen_len),
            **{"repeats": 1 if "debug_mode" in options else 2, **options},
        )

    return {
        "layer_overhead_us": probe(_ON_GPU, gen_len=16, repeats=3),  # every prediction includes its overhead
        "dequantize_overhead_us": probe(_ON_GPU, compress_weight=True, repeats=3),
        "h2d_gb_s": probe(_ON_CPU, gen_len=16),
        "host_copy_gb_s": probe(_ON_CPU, pin_weight=False),
        "cache_overhead_us": probe(_CACHE_ON_CPU, gen_len=16, batch=16),
        "cpu_attention_gb_s": probe(_CACHE_ON_CPU, gen_len=16, batch=16, cpu_cache_compute=True),
        "page_cache_gb_s": probe(_ON_DISK, debug_mode="breakdown"),
        "relay_gb_s": probe(_ON_DISK, debug_mode="breakdown", compress_weight=True),
        "disk_gb_s": probe(_ON_DISK, debug_mode="breakdown", page_cache="cold"),
    }


def calibrate(
    ceilings: MachineCeilings, output_dir: Path, offload_root: Path | None = None, say: Callable[[str], None] = print
) -> MachineProfile:
    """Profile this machine: its ceilings, and a short FlexGen run for each rate that they don't cover.

    A rate that its probe fails to measure keeps the ceilings' value, with a message. Raises Refused without a GPU.
    """
    profile = from_ceilings(ceilings)
    sweep = lab.run(probes(), output_dir, fresh=True, offload_root=offload_root, say=say)
    return with_probes(profile, sweep.records, say)


def with_probes(
    profile: MachineProfile, records: Mapping[str, RunRecord], say: Callable[[str], None] = print
) -> MachineProfile:
    """The profile updated from these records, given by rate in the order of `probes()`."""
    for field, record in records.items():
        if record.failure:
            say(f"{field}: not calibrated, its run failed ({record.failure.kind}: {record.failure.message})")
            continue
        try:
            profile = with_probe(profile, field, record)
        except Refused as error:
            say(f"{field}: not calibrated, left at {getattr(profile, field):g} ({error})")
        for note in record.notes:
            say(f"{field}: {note}")
    return profile


def with_probe(profile: MachineProfile, field: str, record: RunRecord) -> MachineProfile:
    """The profile with the rate that a probe's record shows, from repeats on a free core if any. Raises Refused if it
    doesn't show one."""
    record, settings = _on_a_free_core(record), record.settings
    found = profile
    if field == "layer_overhead_us":
        found = found.model_copy(update=_kernel_loading_s(record))
    if field == "cache_overhead_us":  # storing the prompt's keys and values is most of its prefill
        prefill_s = statistics.median(repeat.pass_latencies_s[0] for repeat in record.repeats)
        found = with_seconds(
            found, "cache_store_gb_s", lambda tried: float(latencies(settings, tried)[0][0]), prefill_s, "a prefill"
        )
    if field == "page_cache_gb_s":
        found = with_page_cache_of(found, settings, _loads(record))
    elif settings.debug_mode:
        block_s = _loads(record).block_s
        found = with_seconds(found, field, lambda tried: loads(settings, tried).block_s, block_s, "a block's loads")
    else:
        found = with_seconds(
            found, field, lambda tried: _usual(latencies(settings, tried)[0]), _usual_pass_s(record), "a decode pass"
        )
    changed = [name for name in profiles.numbers() if getattr(found, name) != getattr(profile, name)]
    return found.model_copy(update={"sources": found.sources | dict.fromkeys([field, *changed], _source(record))})


def _on_a_free_core(record: RunRecord) -> RunRecord:
    """The record with only the repeats on an otherwise idle core, or with all if there are none."""
    free = tuple(repeat for repeat in record.repeats if (repeat.core_speed or 1.0) >= FULL_SPEED)
    return record.model_copy(update={"repeats": free or record.repeats})


def _loads(record: RunRecord) -> Loads:
    """Medians by kind of layer over all passes and repeats; FlexGen's timers go through the layers in turn."""
    layers = record.settings.opt_model.layers
    by_kind: dict[str, list[float]] = {}
    for repeat in record.repeats:
        for number, seconds in enumerate(repeat.timers_s["load_weight"]):
            by_kind.setdefault(layers[number % len(layers)].kind, []).append(seconds)
    return Loads(statistics.median(by_kind["attention"]), statistics.median(by_kind["mlp"]))


def _usual_pass_s(record: RunRecord) -> float:
    """Median of all repeats' usual passes. Throughput won't do: loading kernels that only this kind of run needs takes
    as long as the few passes themselves."""
    return statistics.median(_usual(repeat.pass_latencies_s) for repeat in record.repeats)


def _usual(pass_latencies_s: Sequence[float] | NDArray[np.float64]) -> float:
    """The median of the passes after the prefill and the first decode pass, which load kernels."""
    return float(statistics.median(pass_latencies_s[2:]))


def _kernel_loading_s(record: RunRecord) -> dict[str, float]:
    """How much longer than a usual pass the prefill and the first decode pass took: medians of the repeats.

    Launches bound the probe's passes whatever the number of tokens, so its prefill is a usual pass too.
    """
    beyond = []
    for repeat in record.repeats:
        usual_s = _usual(repeat.pass_latencies_s)
        beyond.append([max(0.0, taken_s - usual_s) for taken_s in repeat.pass_latencies_s[:2]])
    prefill, decode = map(statistics.median, zip(*beyond))
    return {"prefill_kernel_loading_s": prefill, "decode_kernel_loading_s": decode}


def _source(record: RunRecord) -> str:
    settings = record.settings
    flags = [
        flag
        for flag, is_set in (
            ("--compress-weight", settings.compress_weight),
            ("--pin-weight 0", not settings.pin_weight),
            ("--cpu-cache-compute", settings.cpu_cache_compute),
        )
        if is_set
    ]
    run = " ".join([PROBE_MODEL.name, f"--percent {settings.split}", *flags])
    return f"measured on this machine: {run}, page cache {settings.page_cache}"
