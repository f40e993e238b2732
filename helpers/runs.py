"""One measured run, whoever measured it: from this lab's log, or from a file of figures."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from helpers.models import OptModel
from helpers.placement import Placement, place
from helpers.results import DiskSeries, Kind, Machine, Repeat, RunRecord, Sweep
from helpers.settings import Frozen, OffloadSplit, RunSettings, Workload


class Run(Frozen):
    """The settings and figures of one run. None means "not known"; a failed run has a reason and no figures.

    `wall_time_s` is prefill + decode of one generation. With repeats, figures are medians and `*_range` holds
    (lowest, highest). GiB = 2**30 bytes; iostat's kB are KiB.
    """

    run_id: str
    kind: Kind
    source: str  # the machine that measured it, or the file it came from
    sources: tuple[str, ...] = ()  # file and line of the figures, where they come from files
    settings: RunSettings
    assumed: tuple[str, ...] = ()  # options that the source doesn't state, taken to be the homework's

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
    started_at: str = ""  # ISO 8601, UTC
    command: str = ""
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # suspicious figures from a file, and assumptions about them

    @property
    def named_by_person(self) -> bool:
        """Whether a person chose `run_id`, as there is no lab record."""
        return self.kind in ("quoted", "measured by you")

    @property
    def model(self) -> str:
        return self.settings.model

    @property
    def split(self) -> OffloadSplit:
        return self.settings.split

    @property
    def workload(self) -> Workload:
        return self.settings.workload

    @property
    def compress_weight(self) -> bool:
        return self.settings.compress_weight

    @property
    def debug_mode(self) -> Literal["breakdown", "fewer_batch"] | None:
        return self.settings.debug_mode

    @property
    def page_cache(self) -> Literal["natural", "cold"] | None:
        return None if "page_cache" in self.assumed else self.settings.page_cache

    @property
    def other_options(self) -> str:
        return self.settings.other_options

    @property
    def in_words(self) -> str:
        return self.settings.in_words

    @property
    def opt_model(self) -> OptModel:
        return self.settings.opt_model

    @property
    def model_shape(self) -> OptModel | None:
        """The shape of a model in a folder, whose name alone doesn't say which model it was."""
        return self.opt_model if os.path.isabs(self.model) else None

    @property
    def placement(self) -> Placement:
        """Where FlexGen puts the weights."""
        return place(self.opt_model, self.split.weights_gpu, self.split.weights_cpu, self.compress_weight)

    @property
    def passes(self) -> int:
        """Forward passes of one generation: the prefill, and one for each further token."""
        return self.workload.gen_len

    @property
    def figures_disagree(self) -> bool:
        """Whether wall time x throughput differs from the workload's tokens, so that one of them is of another run."""
        if self.wall_time_s is None or self.total_throughput_tok_s is None:
            return False
        tokens = self.wall_time_s * self.total_throughput_tok_s
        return abs(tokens - self.workload.generated_tokens) > 0.05 * self.workload.generated_tokens

    @property
    def latency_s(self) -> float | None:
        """Seconds per generation: the wall time, or tokens over throughput where that is unknown or disagrees."""
        if self.wall_time_s is not None and not self.figures_disagree:
            return self.wall_time_s
        if self.total_throughput_tok_s:
            return self.workload.generated_tokens / self.total_throughput_tok_s
        return None


def from_sweep(sweep: Sweep) -> tuple[Run, ...]:
    """The figures of a sweep, in its order."""
    return tuple(from_record(name, record) for name, record in sweep.records.items())


def from_record(run_id: str, record: RunRecord) -> Run:
    """The figures of a record. Disk peaks are those within the measured repeats."""
    settings = record.settings
    failed = record.status == "failed"
    repeats = () if failed else record.counted
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
        settings=settings,
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
        started_at=record.started_at,
        command=record.command,
        notes=record.notes + record.samples.notes,
    )


def _range(values: Iterable[float]) -> tuple[float, float] | None:
    values = list(values)
    return (min(values), max(values)) if len(values) > 1 else None


def samples_within(disk: DiskSeries, windows_s: Iterable[tuple[float, float]]) -> list[int]:
    """Indices of the samples within each window or, for a window too short to hold one, those that overlap it."""
    inside: list[int] = []
    for start, stop in windows_s:
        touching = [i for i, end in enumerate(disk.time_s) if end > start and end - disk.interval_s < stop]
        within = [i for i in touching if disk.time_s[i] - disk.interval_s >= start and disk.time_s[i] <= stop]
        inside += within or touching
    return inside


def _disk_peaks(disk: DiskSeries | None, repeats: Sequence[Repeat]) -> dict[str, Any]:
    """Peaks over the samples within a repeat or, for a repeat too short to hold one, those that overlap it. Anything
    read before the run doesn't count. A peak rate is at least the repeat's mean rate."""
    columns = {
        "disk_r_s_peak": "reads_per_s",
        "disk_rkb_s_peak": "read_kib_per_s",
        "disk_rareq_kb_peak": "request_kib",
        "disk_util_percent_peak": "util_percent",
    }
    if disk is None:
        return dict.fromkeys(columns)
    inside = samples_within(disk, [(repeat.started_s, repeat.ended_s) for repeat in repeats])
    peaks: dict[str, float | None] = {}
    for name, column in columns.items():
        values = [getattr(disk, column)[i] for i in inside]
        peaks[name] = max((v for v in values if v is not None), default=None)
    means = [
        repeat.disk_read_bytes / 1024 / (repeat.ended_s - repeat.started_s)
        for repeat in repeats
        if repeat.disk_read_bytes is not None and repeat.ended_s > repeat.started_s
    ]
    if peaks["disk_rkb_s_peak"] is not None:
        if not peaks["disk_rkb_s_peak"] and any(means):  # the samples within the repeats missed the reads
            peaks = dict.fromkeys(peaks)
        peaks["disk_rkb_s_peak"] = max((peaks["disk_rkb_s_peak"] or 0.0, *means))
    return peaks
