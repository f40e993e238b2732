"""A machine's profile, measured: its ceilings, and the rates that a few short FlexGen runs show."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from helpers import lab, machine_profiles
from helpers.errors import Refused
from helpers.machine import MachineCeilings
from helpers.machine_profiles import MachineProfile
from helpers.models import PROBE_MODEL
from helpers.results import RunRecord
from helpers.settings import OffloadSplit, RunSettings, Workload
from helpers.time_model import Measured, with_rate_of

_ON_GPU, _ON_DISK = "100 0 100 0 100 0", "0 0 100 0 100 0"


def probes() -> dict[str, RunSettings]:
    """The runs by the rate that each shows, in an order in which each needs only the rates before it.

    A few wide layers: what a pass takes is that rate, and a pass is short.
    """
    def probe(percent: str, gen_len: int = 8, **options) -> RunSettings:
        return RunSettings(
            model=PROBE_MODEL.name, split=OffloadSplit.parse(percent), device="cuda", **{"repeats": 1, **options},
            workload=Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=32, gen_len=gen_len),
        )

    return {
        "layer_overhead_us": probe(_ON_GPU, gen_len=16, repeats=2),  # every prediction has its overhead in it
        "dequantize_gb_s": probe(_ON_GPU, compress_weight=True, repeats=2),
        "host_copy_gb_s": probe(_ON_DISK),
        "relay_gb_s": probe(_ON_DISK, compress_weight=True),
        "disk_gb_s": probe(_ON_DISK, gen_len=4, page_cache="cold"),
    }


def calibrate(
    ceilings: MachineCeilings,
    output_dir: Path,
    offload_root: Path | None = None,
    say: Callable[[str], None] = print,
) -> MachineProfile:
    """The profile of this machine: ceilings for links and GPU, a FlexGen run each for overhead, dequantisation, reads
    out of the page cache, their relay in 4 bits, and cold reads.

    A rate that its run does not show stays as the ceilings have it, which is said. Raises Refused without a GPU.
    """
    profile = machine_profiles.from_ceilings(ceilings)
    sweep = lab.run(probes(), output_dir, fresh=True, offload_root=offload_root, say=say)
    for field, record in sweep.records.items():
        if record.failure:
            say(f"{field}: not calibrated, its run failed ({record.failure.kind}: {record.failure.message})")
            continue
        if field == "layer_overhead_us":
            profile = _with(profile, "kernel_loading_s", _kernel_loading_s(record), record)
        try:
            point = Measured(record.settings, record.total_throughput_tok_s)
            profile = _with(profile, field, getattr(with_rate_of(profile, field, point), field), record)
        except Refused as error:
            say(f"{field}: not calibrated, left at {getattr(profile, field):g} ({error})")
    return profile


def _kernel_loading_s(record: RunRecord) -> float:
    """What the prefill and the first decode pass took beyond a usual pass: median of the repeats.

    The probe's passes are as long as their launches, whatever the tokens, so that its prefill is a usual pass too.
    """
    beyond = []
    for repeat in record.repeats:
        prefill, first, *others = repeat.pass_latencies_s
        usual = statistics.median(others)
        beyond.append(max(0.0, prefill - usual) + max(0.0, first - usual))
    return statistics.median(beyond)


def _with(profile: MachineProfile, field: str, value: float, record: RunRecord) -> MachineProfile:
    settings = record.settings
    run = f"--percent {settings.split}{' --compress-weight' if settings.compress_weight else ''}"
    source = f"measured on this machine: {PROBE_MODEL.name} {run}, page cache {settings.page_cache}"
    return profile.model_copy(update={field: value, "sources": profile.sources | {field: source}})
