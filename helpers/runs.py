"""One row of figures, whoever measured them: from the laboratory's own log, or from someone's CSV."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from helpers import models
from helpers.models import OptModel
from helpers.placement import Placement, place
from helpers.results import DiskSeries, Machine, Repeat, RunRecord, Sweep
from helpers.settings import Frozen, OffloadSplit, RunSettings, Workload

Kind = Literal["measured on CUDA", "measured on the emulated GPU", "projected by FlexGen", "predicted", "quoted"]


class Run(Frozen):
    """One row of figures. None is "not known"; a failed run is a point with its reason and no figures.

    `wall_time_s` is prefill + decode of one generation; with repeats, figures are medians and
    `*_range` holds (lowest, highest). GiB = 2**30 bytes; iostat's kB are KiB.
    """

    run_id: str
    kind: Kind
    source: str  # the machine that measured, or the file that says so
    model: str
    model_shape: OptModel | None = None  # of a model from a folder, as it was when it ran
    split: OffloadSplit
    workload: Workload
    compress_weight: bool = False
    debug_mode: Literal["breakdown", "fewer_batch"] | None = None
    page_cache: Literal["natural", "cold"] | None = None
    other_options: str = ""  # FlexGen options that are not at their defaults

    status: Literal["done", "failed"] = "done"
    reason: str = ""

    repeats: int | None = None
    wall_time_s: float | None = None
    wall_time_s_range: tuple[float, float] | None = None
    total_throughput_tok_s: float | None = None
    total_throughput_tok_s_range: tuple[float, float] | None = None
    prefill_latency_s: float | None = None
    decode_latency_s: float | None = None
    peak_gpu_mem_gib: float | None = None

    load_weight_s: float | None = None  # mean over layers, FlexGen's figure
    load_weight_s_median: float | None = None
    compute_layer_decoding_s: float | None = None  # mean over layer-steps, FlexGen's figure
    compute_layer_decoding_s_median: float | None = None

    disk_r_s_peak: float | None = None
    disk_rkb_s_peak: float | None = None
    disk_rareq_kb_peak: float | None = None
    disk_util_percent_peak: float | None = None
    bytes_from_disk: int | None = None
    bytes_expected_from_disk: int | None = None
    disk: DiskSeries | None = None
    windows_s: tuple[tuple[float, float], ...] = ()  # start and end of each repeat, on the clock of `disk`

    gpu_mem_gib: float | None = None  # the GPU's capacity
    machine: Machine | None = None
    versions: dict[str, str] = {}
    command: str = ""
    notes: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        """What the run is; the model and the lengths of its workload apart."""
        shares = ((self.split.weights_gpu, "GPU"), (self.split.weights_cpu, "CPU"), (self.split.weights_disk, "disk"))
        return ", ".join(
            filter(
                None,
                (
                    " + ".join(f"{share} % {tier}" for share, tier in shares if share),
                    f"batch {self.workload.gpu_batch_size}",
                    "4-bit weights" if self.compress_weight else "",
                    self.debug_mode,
                    "page cache dropped" if self.page_cache == "cold" else "",
                    self.other_options,
                ),
            )
        )

    @property
    def opt_model(self) -> OptModel:
        """The model that ran. Raises Refused if it is a folder that is not here, of which no record tells the shape."""
        return self.model_shape or models.resolve(self.model)

    @property
    def placement(self) -> Placement:
        """Where FlexGen puts the weights. Raises Refused as `opt_model` does."""
        return place(self.opt_model, self.split.weights_gpu, self.split.weights_cpu, self.compress_weight)

    @property
    def passes(self) -> int:
        """Forward passes of one generation: the prefill, and one for each further token."""
        return self.workload.gen_len

    @property
    def figures_disagree(self) -> bool:
        """Whether wall time x throughput is not the workload's tokens: then one of them is of something else."""
        if self.wall_time_s is None or self.total_throughput_tok_s is None:
            return False
        tokens = self.wall_time_s * self.total_throughput_tok_s
        return abs(tokens - self.workload.generated_tokens) > 0.05 * self.workload.generated_tokens

    @property
    def latency_s(self) -> float | None:
        """Seconds of one generation: the wall time, or tokens over throughput if it is not given or disagrees."""
        if self.wall_time_s is not None and not self.figures_disagree:
            return self.wall_time_s
        if self.total_throughput_tok_s:
            return self.workload.generated_tokens / self.total_throughput_tok_s
        return None


def from_sweep(sweep: Sweep) -> tuple[Run, ...]:
    """The figures of a sweep, in its order."""
    return tuple(from_record(name, record) for name, record in sweep.records.items())


def from_record(run_id: str, record: RunRecord) -> Run:
    """The figures of a record. Disk peaks are those inside the measured repeats."""
    settings = record.settings
    failed = record.status == "failed"
    repeats = () if failed else record.repeats
    load = [s for repeat in repeats for s in repeat.timers_s.get("load_weight", ())]
    compute = [s for repeat in repeats for s in repeat.timers_s.get("compute_layer_decoding", ())]
    windows = tuple((repeat.started_s, repeat.ended_s) for repeat in repeats)
    disk = record.samples.disk
    reason = (
        ""
        if not failed
        else (f"{record.failure.kind}: {record.failure.message}" if record.failure else "no reason recorded")
    )
    return Run(
        run_id=run_id,
        kind=record.kind,
        source=record.machine.name,
        model=settings.model,
        model_shape=record.model_shape,
        split=settings.split,
        workload=settings.workload,
        compress_weight=settings.compress_weight,
        debug_mode=settings.debug_mode,
        page_cache=settings.page_cache,
        other_options=other_options(settings),
        status=record.status,
        reason=reason,
        repeats=len(repeats) or None,
        wall_time_s=record.total_latency_s if repeats else None,
        wall_time_s_range=_range(r.total_latency_s for r in repeats),
        total_throughput_tok_s=record.total_throughput_tok_s if repeats else None,
        total_throughput_tok_s_range=_range(record.throughputs_tok_s if repeats else ()),
        prefill_latency_s=record.prefill_latency_s if repeats else None,
        decode_latency_s=record.decode_latency_s if repeats else None,
        peak_gpu_mem_gib=record.peak_gpu_mem_gib if repeats else None,
        load_weight_s=statistics.fmean(load) if load else None,
        load_weight_s_median=statistics.median(load) if load else None,
        compute_layer_decoding_s=statistics.fmean(compute) if compute else None,
        compute_layer_decoding_s_median=statistics.median(compute) if compute else None,
        **_disk_peaks(disk, repeats),
        bytes_from_disk=record.bytes_from_disk if repeats else None,
        bytes_expected_from_disk=record.bytes_expected_from_disk,
        disk=disk,
        windows_s=windows,
        gpu_mem_gib=record.machine.gpu_mem_gib,
        machine=record.machine,
        versions=record.versions,
        command=record.command,
        notes=record.notes + record.samples.notes,
    )


def _range(values: Iterable[float]) -> tuple[float, float] | None:
    values = list(values)
    return (min(values), max(values)) if len(values) > 1 else None


def _disk_peaks(disk: DiskSeries | None, repeats: Sequence[Repeat]) -> dict[str, float | None]:
    """Peaks over the samples within a repeat, or, of a repeat too short to hold one, those that touch it: what was
    read before the run, by its own loading or by others, is not the run. A rate has been as high as its mean."""
    columns = {
        "disk_r_s_peak": "reads_per_s",
        "disk_rkb_s_peak": "read_kib_per_s",
        "disk_rareq_kb_peak": "request_kib",
        "disk_util_percent_peak": "util_percent",
    }
    if disk is None:
        return dict.fromkeys(columns)
    inside: list[int] = []
    for start, stop in ((repeat.started_s, repeat.ended_s) for repeat in repeats):
        touching = [i for i, end in enumerate(disk.time_s) if end > start and end - disk.interval_s < stop]
        within = [i for i in touching if disk.time_s[i] - disk.interval_s >= start and disk.time_s[i] <= stop]
        inside += within or touching
    peaks = {}
    for name, column in columns.items():
        values = [getattr(disk, column)[i] for i in inside]
        peaks[name] = max((v for v in values if v is not None), default=None)
    means = [
        repeat.disk_read_bytes / 1024 / (repeat.ended_s - repeat.started_s)
        for repeat in repeats
        if repeat.disk_read_bytes is not None and repeat.ended_s > repeat.started_s
    ]
    if peaks["disk_rkb_s_peak"] is not None:
        if not peaks["disk_rkb_s_peak"] and any(means):  # what was read fell between the samples within
            peaks = dict.fromkeys(peaks)
        peaks["disk_rkb_s_peak"] = max((peaks["disk_rkb_s_peak"] or 0.0, *means))
    return peaks


def other_options(settings: RunSettings) -> str:
    options = []
    if settings.compress_cache:
        options.append("--compress-cache")
    if settings.cpu_cache_compute:
        options.append("--cpu-cache-compute")
    if not settings.overlap:
        options.append("--overlap false")
    if not settings.pin_weight:
        options.append("--pin-weight false")
    if settings.attn_sparsity < 1:
        options.append(f"--attn-sparsity {settings.attn_sparsity}")
    if settings.disk_reader != "stock":
        options.append(f"--disk-reader {settings.disk_reader}")
    if settings.copy_buffer != "stock":
        options.append(f"--copy-buffer {settings.copy_buffer}")
    return " ".join(options)
