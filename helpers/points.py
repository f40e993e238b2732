"""One row of figures, whoever measured them: from the laboratory's own log, or from someone's CSV."""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from helpers import models, paths
from helpers.errors import Refused
from helpers.homework import EXTRAS, QUESTIONS, Row
from helpers.models import OptModel
from helpers.placement import Placement, place
from helpers.results import DiskSeries, Log, Machine, Repeat, RunRecord, Sweep
from helpers.settings import Frozen, OffloadSplit, RunSettings, Workload

Kind = Literal[
    "measured on CUDA", "measured on the emulated GPU", "projected by FlexGen", "predicted", "quoted"
]


class Point(Frozen):
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
        return ", ".join(filter(None, (
            " + ".join(f"{share} % {tier}" for share, tier in shares if share),
            f"batch {self.workload.gpu_batch_size}", "4-bit weights" if self.compress_weight else "",
            self.debug_mode, "page cache dropped" if self.page_cache == "cold" else "", self.other_options,
        )))

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


def of(sweep: Sweep) -> tuple[Point, ...]:
    """The figures of a sweep, in its order."""
    return tuple(from_record(name, record) for name, record in sweep.records.items())


def from_record(run_id: str, record: RunRecord) -> Point:
    """The figures of a record. Disk peaks are those inside the measured repeats."""
    settings = record.settings
    failed = record.status == "failed"
    repeats = () if failed else record.repeats
    load = [s for repeat in repeats for s in repeat.timers_s.get("load_weight", ())]
    compute = [s for repeat in repeats for s in repeat.timers_s.get("compute_layer_decoding", ())]
    windows = tuple((repeat.started_s, repeat.ended_s) for repeat in repeats)
    disk = record.samples.disk
    reason = "" if not failed else (
        f"{record.failure.kind}: {record.failure.message}" if record.failure else "no reason recorded"
    )
    return Point(
        run_id=run_id, kind=record.kind, source=record.machine.name, model=settings.model,
        model_shape=record.model_shape, split=settings.split, workload=settings.workload,
        compress_weight=settings.compress_weight, debug_mode=settings.debug_mode, page_cache=settings.page_cache,
        other_options=_other_options(settings), status=record.status, reason=reason,
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
        disk=disk, windows_s=windows,
        gpu_mem_gib=record.machine.gpu_mem_gib, machine=record.machine, versions=record.versions,
        command=record.command, notes=record.notes + record.samples.notes,
    )


def _range(values: Iterable[float]) -> tuple[float, float] | None:
    values = list(values)
    return (min(values), max(values)) if len(values) > 1 else None


def _disk_peaks(disk: DiskSeries | None, repeats: Sequence[Repeat]) -> dict[str, float | None]:
    """Peaks over the samples within a repeat, or, of a repeat too short to hold one, those that touch it: what was
    read before the run, by its own loading or by others, is not the run. A rate has been as high as its mean."""
    columns = {
        "disk_r_s_peak": "reads_per_s", "disk_rkb_s_peak": "read_kib_per_s",
        "disk_rareq_kb_peak": "request_kib", "disk_util_percent_peak": "util_percent",
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
    means = [repeat.disk_read_bytes / 1024 / (repeat.ended_s - repeat.started_s) for repeat in repeats
             if repeat.disk_read_bytes is not None and repeat.ended_s > repeat.started_s]
    if peaks["disk_rkb_s_peak"] is not None:
        if not peaks["disk_rkb_s_peak"] and any(means):  # what was read fell between the samples within
            peaks = dict.fromkeys(peaks)
        peaks["disk_rkb_s_peak"] = max((peaks["disk_rkb_s_peak"] or 0.0, *means))
    return peaks


def _other_options(settings: RunSettings) -> str:
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


def read(path: str | Path) -> tuple[Point, ...]:
    """The rows of a `.csv` of figures or of a `.jsonl` result log. Raises Refused."""
    path = Path(path)
    readers = {".csv": read_csv, ".jsonl": read_jsonl}
    if path.suffix.lower() not in readers:
        raise Refused(f"{path}: neither a .csv of figures nor a .jsonl result log")
    paths.check_file(path)
    if not os.path.exists(path):
        raise Refused(f"{path}: no such file")
    return readers[path.suffix.lower()](path)


def read_jsonl(path: str | Path) -> tuple[Point, ...]:
    """One point for each run of a result log: its last record that is done, else its last failure.

    Raises Refused if the log holds no readable record.
    """
    latest = Log(Path(path)).latest()
    if not latest:
        raise Refused(f"{path}: holds no readable record")
    return tuple(from_record(_run_id(record.settings), record) for record in latest.values())


def _run_id(settings: RunSettings) -> str:
    """The homework's name for these settings, or their key."""
    if extra := _extra(settings):
        return extra.id
    same = _ROWS_BY_IDENTITY.get(_identity(settings), ())
    rows = [row for row in same if row.page_cache in (None, settings.page_cache)]
    rows.sort(key=lambda row: row.page_cache is None)
    return rows[0].id if rows else settings.key


# ---- CSV ------------------------------------------------------------------------------------------------------------


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise ValueError
    return value


def _whole(text: str) -> int:
    value = float(text)  # pandas writes a column of whole numbers with a gap as 4.0
    if value != int(value):
        raise ValueError
    return int(value)


def _flag(text: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError
        return text.lower()
    return parse


# Column: how it is read, and what it must be. An empty cell is None.
_COLUMNS: dict[str, tuple[Callable[[str], Any], str]] = {
    "run_id": (str, "a name"),
    "model": (lambda name: models.resolve(name).name, "a model FlexGen knows"),
    "percent": (OffloadSplit.parse, "six whole numbers"),
    "gpu_batch_size": (_whole, "a whole number"),
    "num_gpu_batches": (_whole, "a whole number"),
    "prompt_len": (_whole, "a whole number"),
    "gen_len": (_whole, "a whole number"),
    "compress_weight": (_flag, "true or false"),
    "debug_mode": (_one_of("breakdown", "fewer_batch"), "breakdown or fewer_batch"),
    "page_cache": (_one_of("natural", "cold"), "natural or cold"),
    "status": (_one_of("done", "failed"), "done or failed"),
    "reason": (str, "text"),
    "wall_time_s": (_positive, "a number above 0"),
    "total_throughput_tok_s": (_positive, "a number above 0"),
    "peak_gpu_mem_gib": (_number, "a number"),
    "load_weight_s": (_number, "a number"),
    "compute_layer_decoding_s": (_number, "a number"),
    "disk_r_s_peak": (_number, "a number"),
    "disk_rkb_s_peak": (_number, "a number"),
    "disk_rareq_kb_peak": (_number, "a number"),
    "disk_util_percent_peak": (_number, "a number"),
    "bytes_from_disk": (_whole, "a whole number"),
    "gpu_mem_gib": (_positive, "a number above 0"),
    "notes": (lambda text: (text,), "text"),
}
_REQUIRED = ("model", "percent", "gpu_batch_size", "prompt_len", "gen_len")
_WORKLOAD = ("gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len")


def read_csv(path: str | Path) -> tuple[Point, ...]:
    """Figures that someone wrote down, one row a run, as points of kind "quoted".

    Needed columns: model, percent, gpu_batch_size, prompt_len, gen_len; every other column of
    `outputs/reference/t4-colab/figures.csv`, and status, reason, page_cache, bytes_from_disk,
    gpu_mem_gib and notes, may be left out or empty. A column of another name is refused.
    Raises Refused naming the line, the column and the value.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: not a readable UTF-8 text file ({error})") from error
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise Refused(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    if not lines:
        raise Refused(f"{path}: empty, a header line and one line a run are needed")
    header = [name.lower() for name in lines[0][1]]
    _check_header(path, header)
    if len(lines) == 1:
        raise Refused(f"{path}: a header and no rows")
    source = f"{path.resolve().parent.name}/{path.name}"
    return tuple(_csv_point(path, source, line, header, cells) for line, cells in lines[1:])


def _check_header(path: Path, header: list[str]) -> None:
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise Refused(f"{path}, line 1: no column {', '.join(missing)}; cells are separated by commas")
    for name in header:
        if name not in _COLUMNS:
            raise Refused(f"{path}, line 1: column {name!r} is not known; known are {', '.join(_COLUMNS)}")
        if header.count(name) > 1:
            raise Refused(f"{path}, line 1: column {name!r} stands twice")


def _csv_point(path: Path, source: str, line: int, header: list[str], cells: list[str]) -> Point:
    if len(cells) != len(header):
        raise Refused(f"{path}, line {line}: {len(cells)} cells, the header has {len(header)}")
    fields: dict[str, Any] = {}
    for name, text in zip(header, cells):
        parse, rule = _COLUMNS[name]
        if not text:
            if name in _REQUIRED:
                raise Refused(f"{path}, line {line}, column {name}: empty, {rule} is needed")
            continue
        try:
            fields[name] = parse(text)
        except Refused as error:
            raise Refused(f"{path}, line {line}, column {name}: {error}") from None
        except (ValueError, KeyError, OverflowError):
            raise Refused(
                f"{path}, line {line}, column {name}: {text!r} is not {rule}; "
                "leave a figure that is not known empty and say why in a column `reason`"
            ) from None
    try:
        workload = Workload(**{name: fields.pop(name) for name in _WORKLOAD if name in fields})
        status = fields.pop("status", None) or "done"
        return Point(
            run_id=fields.pop("run_id", f"line {line}"), kind="quoted", source=source,
            split=fields.pop("percent"), workload=workload, status=status, **fields,
        )
    except Refused as error:
        raise Refused(f"{path}, line {line}: {error}") from None


# ---- the homework's rows --------------------------------------------------------------------------------------------


def _homework_rows() -> dict[Row, None]:
    return {row: None for rows in QUESTIONS.values() for row in rows}


def _identity(run: Row | Point | RunSettings) -> tuple:
    """What makes a run a row of the homework, or not; the page cache apart."""
    if isinstance(run, Row):
        return OffloadSplit.parse(run.percent).percent, run.gpu_batch_size, run.compress_weight, run.debug_mode
    return run.split.percent, run.workload.gpu_batch_size, run.compress_weight, run.debug_mode


_ROWS_BY_IDENTITY = {
    identity: tuple(row for row in _homework_rows() if _identity(row) == identity)
    for identity in map(_identity, _homework_rows())
}


def _extra(run: Point | RunSettings) -> Row | None:
    """The extra that a run is, or None: beside what makes a row, page cache and options are those of the extra."""
    options = run.other_options if isinstance(run, Point) else _other_options(run)
    return _EXTRAS.get((_identity(run), run.page_cache, options))


_EXTRAS = {
    (_identity(row), row.page_cache, f"--disk-reader {row.disk_reader}"): row
    for rows in EXTRAS.values() for row in rows
}


@dataclass(frozen=True)
class Rows:
    """The homework's rows as far as the figures have them, by row id; failed runs among them. `extras`: the runs
    beside them that the homework does not ask for."""

    by_id: dict[str, Point]
    notes: tuple[str, ...] = ()
    extras: dict[str, Point] = field(default_factory=dict)

    def done(self, row_id: str) -> Point | None:
        """The point that has figures for a row or an extra, or None."""
        point = self.by_id.get(row_id) or self.extras.get(row_id)
        return point if point is not None and point.status == "done" else None

    @property
    def first(self) -> Point | None:
        return next(iter(self.by_id.values()), None)


def campaigns(points: Iterable[Point]) -> tuple[tuple[Point, ...], ...]:
    """Points that may be compared: one source, one model (a folder may get another), one prompt and generation
    length, same options."""
    groups: dict[tuple, list[Point]] = {}
    for point in points:
        groups.setdefault((*_same_work(point), point.other_options), []).append(point)
    return tuple(map(tuple, groups.values()))


def _same_work(point: Point) -> tuple:
    work = point.workload
    return (
        point.source, point.kind == "predicted", point.model, point.model_shape, work.prompt_len, work.gen_len,
        work.num_gpu_batches,
    )


def _unlike(other: Point, point: Point) -> str:
    """In what another campaign differs, seen from this one."""
    work, shape = other.workload, other.model_shape
    layers = f"when it had {shape.num_layers} layers, {shape.hidden_size} wide" if shape else ""
    differ = (
        (other.model, point.model, other.model),
        (shape, point.model_shape, f"{other.model} {layers}".strip()),
        (other.source, point.source, f"on {other.source}"),
        (other.kind == "predicted", point.kind == "predicted", other.kind),
        (work.prompt_len, point.workload.prompt_len, f"prompt {work.prompt_len}"),
        (work.gen_len, point.workload.gen_len, f"generated {work.gen_len}"),
        (work.num_gpu_batches, point.workload.num_gpu_batches, f"{work.num_gpu_batches} GPU batches"),
        (other.other_options, point.other_options, other.other_options or "no other options"),
    )
    return ", ".join(words for theirs, ours, words in differ if theirs != ours and words)


def homework_rows(points: Iterable[Point]) -> Rows:
    """Which point is which row of the homework, matched by what it is, never by its run_id.

    Of several campaigns the one with the most rows is taken; of two points for one row the later one
    that is done. A note says what was left out.
    """
    extras, others = [], []
    for point in points:
        if _extra(point):
            extras.append(point)
        elif _identity(point) in _ROWS_BY_IDENTITY and "--disk-reader" not in point.other_options:  # not FlexGen's
            others.append(point)
    candidates = sorted((_match(group) for group in campaigns(others)), key=lambda rows: -len(rows.by_id))
    if not candidates or not candidates[0].by_id:
        return Rows({})
    best, rest = candidates[0], [rows for rows in candidates[1:] if rows.by_id]
    notes = best.notes
    if rest:
        first = best.first
        others = "; ".join(f"{len(r.by_id)} of {_unlike(r.first, first)}" for r in rest)
        notes += (f"These rows are {first.model} on {first.source}; the figures also hold rows of others: {others}.",)
    return Rows(best.by_id, notes, _beside(best.first, extras))


def _beside(first: Point, extras: Iterable[Point]) -> dict[str, Point]:
    """The extras that may be compared with a campaign, by row id; of two for one the later one that is done."""
    found: dict[str, Point] = {}
    for point in extras:
        row_id = _extra(point).id
        if first.other_options or _same_work(point) != _same_work(first):
            continue
        if row_id not in found or point.status == "done" or found[row_id].status == "failed":
            found[row_id] = point
    return found


def names(points: Sequence[Point]) -> list[str]:
    """What to call each point: its id if it is a row of the homework or was named by a person, else in words."""
    rows = homework_rows(points)
    used = [*rows.by_id.values(), *rows.extras.values()]
    return [point.run_id if point.kind == "quoted" or point in used else point.in_words for point in points]


def _match(group: Sequence[Point]) -> Rows:
    cold = [p for p in group if p.page_cache == "cold"]
    natural = [p for p in group if p.page_cache != "cold"]
    # One page cache for the whole homework, so that its rows can be compared: the one with more rows.
    main, other = sorted((natural, cold), key=lambda some: -len(_by_row(some)[0]))
    matched, notes = _by_row(main)
    for row_id, point in _by_row(other)[0].items():
        if row_id not in matched and point.placement.disk_bytes_per_pass == 0:
            matched[row_id] = point
    for row in _homework_rows():
        if row.page_cache == "cold":
            matched.update(_by_row(cold, (row,))[0])
    order = [row.id for row in _homework_rows()]
    return Rows({row_id: matched[row_id] for row_id in order if row_id in matched}, notes)


def _by_row(group: Sequence[Point], rows: Iterable[Row] | None = None) -> tuple[dict[str, Point], tuple[str, ...]]:
    if rows is None:
        rows = [row for row in _homework_rows() if row.page_cache is None]
    by_identity: dict[tuple, list[Point]] = {}
    for point in group:
        by_identity.setdefault(_identity(point), []).append(point)
    matched, notes = {}, []
    for row in rows:
        same = by_identity.get(_identity(row), [])
        if same:
            done = [point for point in same if point.status == "done"]
            matched[row.id] = (done or same)[-1]
        if len(same) > 1:
            notes.append(f"{len(same)} rows are the same run ({row.label}); the last one that is done is used.")
    return matched, tuple(notes)
