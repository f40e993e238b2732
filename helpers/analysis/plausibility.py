"""Spot impossible figures, and suggest the likely mistake."""

from __future__ import annotations

from helpers.models import KNOWN_MODELS, SYNTHETIC_MODELS
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.runs import Run
from helpers.units import GIB

OFF_BY = 0.1  # between iostat's columns, whose peaks may come from different samples only upwards
FASTEST_PASS_S = 1e-4  # per token and sequence batch: no machine is faster
MOST_UTIL = 250.0  # percent; iostat shows up to about 228 for RAID and NVMe devices
ROUNDING_GIB = 0.002


def remarks_on(run: Run) -> tuple[str, ...]:
    """Remarks on a run's implausible figures; empty if they all look right."""
    if run.status == "failed" or run.kind == "quoted":
        return ()
    found = (_iostat_units(run), _util(run), _peak(run), _wall_time(run), _breakdown(run), _speed(run))
    return tuple(remark for remark in found if remark)


def _iostat_units(run: Run) -> str:
    """The largest rate can't exceed the product of the largest count and size."""
    reads, rate, size = run.disk_r_s_peak, run.disk_rkb_s_peak, run.disk_rareq_kb_peak
    if reads is None or rate is None or size is None or not (reads and rate and size):
        return ""
    ratio = reads * size / rate
    if 1024 / 4 < ratio < 1024 * 4:
        return (
            f"{reads:g} reads/s of {size:g} KiB are about {reads * size:,.0f} KiB/s, not {rate:g}: "
            f"probably iostat -m's MB/s, {rate * 1024:,.0f} KiB/s"
        )
    if ratio < 1 - OFF_BY:
        return (
            f"{rate:,.0f} KiB/s is more than {reads:g} reads/s of {size:g} KiB can be: check the three columns' units"
        )
    return ""


def _util(run: Run) -> str:
    util = run.disk_util_percent_peak
    return f"%util of {util:g} is more than a disk shows: check the column" if util and util > MOST_UTIL else ""


def _peak(run: Run) -> str:
    peak, placed = run.peak_gpu_mem_gib, run.placement
    if not peak:
        return ""
    least = placed.gib("gpu")
    if peak > 100 and run.gpu_mem_gib is None:
        return f"a peak of {peak:g} GiB: MB given as GiB?"
    if run.gpu_mem_gib is not None and peak > run.gpu_mem_gib:
        return f"a peak of {peak:g} GiB is more than the card's {run.gpu_mem_gib:g} GiB"
    if peak < least - ROUNDING_GIB:
        return (
            f"a peak of {peak:g} GiB is less than the {least:.3f} GiB of {run.opt_model.name}'s weights on the GPU: "
            "another model or split?"
        )
    return _another_model(run, peak)


def _another_model(run: Run, peak: float) -> str:
    """A peak far from this model's prediction that another model's meets."""
    if run.debug_mode or abs(peak / peak_gpu_memory(run.settings, 0).likeliest_gib - 1) < 0.3:
        return ""
    for name, model in KNOWN_MODELS.items():
        if model in SYNTHETIC_MODELS or name == run.model or run.workload.effective_batch > 1000:
            continue
        likeliest = peak_gpu_memory(run.settings.replace(model=name), 0).likeliest_gib
        if abs(peak / likeliest - 1) < 0.02:
            return f"a peak of {peak:g} GiB is {name}'s, not {run.model}'s"
    return ""


def _wall_time(run: Run) -> str:
    work = run.workload
    if not run.figures_disagree or run.wall_time_s is None or run.total_throughput_tok_s is None:
        return ""
    tokens = run.wall_time_s * run.total_throughput_tok_s
    return (
        f"{run.wall_time_s:g} s x {run.total_throughput_tok_s:g} token/s are {tokens:.0f} tokens, but batch "
        f"{work.effective_batch} x {work.gen_len} is {work.generated_tokens}: another batch or length?"
    )


def _breakdown(run: Run) -> str:
    """A layer's time in seconds can't be above the whole pass of a plain run, nor near one second on a GPU."""
    times = [one for one in (run.load_weight_s, run.compute_layer_decoding_s) if one]
    layer_gb = run.placement.total_bytes / len(run.opt_model.layers) / 1e9
    if times and max(times) > 60 * max(layer_gb, 0.1):
        return f"{max(times):g} s for one layer: milliseconds given as seconds?"
    if run.compute_layer_decoding_s and run.compute_layer_decoding_s > 0.1 and run.split.weights_gpu == 100:
        return f"{run.compute_layer_decoding_s:g} s to compute one layer: milliseconds given as seconds?"
    return ""


def _speed(run: Run) -> str:
    """More passes per second than any machine makes."""
    if run.latency_s is None or run.debug_mode:
        return ""
    pass_s = run.latency_s / run.passes
    weights_per_s = run.placement.disk_bytes_per_pass / pass_s
    if pass_s < FASTEST_PASS_S * len(run.opt_model.layers) / 50:
        return f"{run.latency_s:g} s for {run.passes} passes of {run.opt_model.name}: faster than any machine"
    if weights_per_s > 100 * GIB:
        return f"reading the disk tier at {weights_per_s / 1e9:,.0f} GB/s: faster than any machine's memory"
    return ""
