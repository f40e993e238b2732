"""The homework's tables, and a measured run beside the reference: raw numbers to keep, formatted text to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from helpers import analysis, paths
from helpers.analysis.batch_size import BATCHES
from helpers.analysis.disk_readers import DIRECT, STOCK
from helpers.analysis.matching import Rows, homework_rows, names
from helpers.analysis.offload_sweep import STEPS, number
from helpers.analysis.readers import read_csv
from helpers.analysis.values import Value, capital, gib, in_line, latency, plain, ratio, throughput, times
from helpers.homework import QUESTIONS, Row
from helpers.machine.ceilings import MachineCeilings
from helpers.placement import TIERS
from helpers.runs import Run

NOT_KNOWN = "—"
MORE_THAN_THEORY = 1.02  # times a theoretical ceiling: what a rounded one and a timer explain
REFERENCE = paths.ROOT / "outputs" / "reference" / "t4-colab" / "figures.csv"


@dataclass(frozen=True)
class Table:
    """A table twice: `frame` holds raw numbers (NaN is "not known"), `shown` the same as text.

    `short` is the caption on a page that says once of all its tables what the long one says of each.
    """

    name: str
    caption: str
    frame: pd.DataFrame
    shown: pd.DataFrame
    short: str = ""

    @property
    def markdown(self) -> str:
        """With the caption that stands alone, as files and the report have it."""
        return self._under(self.caption)

    @property
    def on_a_page(self) -> str:
        return self._under(self.short or self.caption)

    def _under(self, caption: str) -> str:
        lines = [list(map(str, self.shown.columns)), ["---"] * len(self.shown.columns), *self.shown.values.tolist()]
        return f"{caption}\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"

    def _repr_markdown_(self) -> str:
        return self.markdown


def save(table: Table, folder: Path) -> list[Path]:
    """Write `NAME.csv` (raw numbers) and `NAME.md` (formatted); return their paths."""
    return [
        paths.write_atomically(folder / f"{table.name}.csv", table.frame.to_csv(index=False)),
        paths.write_atomically(folder / f"{table.name}.md", table.markdown),
    ]


def ceilings(measured: MachineCeilings) -> Table:
    """What the parts of a machine did at their best beside what they could in theory, and where each is from."""
    how = dict(note.split(": ", 1) for note in measured.notes if ": " in note)
    names = {
        "disk_read_gb_s": ("disk, sequential reads", "GB/s"),
        "page_cache_read_gb_s": ("page cache, reads", "GB/s"),
        "host_to_device_gb_s": ("host to GPU, pinned", "GB/s"),
        "device_to_host_gb_s": ("GPU to host, pinned", "GB/s"),
        "gpu_copy_gb_s": ("GPU memory, copy (read + written)", "GB/s"),
        "matmul_tflop_s": ("GPU, fp16 matrix product", "TFLOP/s"),
    }
    raw, shown = [], []
    for name, (what, unit) in names.items():
        found, theory = getattr(measured, name), measured.theoretical.get(name)
        limit = theory.value if theory else None
        share = found / limit if found is not None and limit else None
        source = theory.source if theory else "not kept with these figures"
        if share is not None and share > MORE_THAN_THEORY:
            source += "; more was measured, so this is not what bounds it here"
        raw.append(
            {
                "what": what,
                "measured": found,
                "theoretical": limit,
                "unit": unit,
                "measured_over_theoretical": share,
                "how": how.get(name, ""),
                "theoretical_from": source,
            }
        )
        shown.append(
            {
                "What": what,
                "Measured": _digits(found),
                "Theoretical": _digits(limit),
                "Unit": unit,
                "Measured / theoretical": NOT_KNOWN if share is None else f"{100 * share:.0f} %",
                "How it was measured": in_line(how.get(name, "")),
                "Where the theoretical value is from": in_line(source),
            }
        )
    where = "this machine, no GPU in use" if measured.machine.name.startswith("emulated") else measured.machine.name
    caption = f"Measured ceilings of {where}, folder {measured.folder}, beside theoretical ones."
    return Table("machine", caption, pd.DataFrame(raw), pd.DataFrame(shown).astype(str))


def every(points: Sequence[Run]) -> dict[str, Table]:
    """All tables by name, in the order of the report; the reference is not put beside itself, and a run that the
    homework does not ask for has a table only where it was made."""
    tables = [
        offload_sweep(points),
        offload_sweep_ratios(points),
        batch_size(points),
        batch_size_ratios(points),
        weight_compression(points),
        disk_io(points),
        breakdown(points),
        disk_reads(points),
    ]
    if DIRECT.id in homework_rows(points).extras:
        tables.append(disk_readers(points))
    if REFERENCE.is_file() and homework_rows(points).by_id != homework_rows(read_csv(REFERENCE)).by_id:
        tables += [comparison(points), comparison_ratios(points)]
    tables.append(all_runs(points))
    return {table.name: table for table in tables}


# ---- question 1 -----------------------------------------------------------------------------------------------------


def offload_sweep(points: Iterable[Run]) -> Table:
    """Throughput and peak GPU memory of the five splits, asked and achieved."""
    return _run_table(
        "q1",
        "Q1. Progressive offload sweep",
        points,
        QUESTIONS["q1"],
        {"Setting": lambda row: number(row.id)},
        (_THROUGHPUT, _PEAK),
    )


def offload_sweep_ratios(points: Iterable[Run]) -> Table:
    """The ratio at each boundary, the link it adds, and what bounds the run after it."""
    points = tuple(points)
    sweep = analysis.offload_sweep.analyze(points)
    raw, shown = [], []
    for step in sweep.steps:
        raw.append(
            {
                "boundary": step.name,
                **_spread("ratio", step.ratio),
                "link_added": step.link,
                "bytes_added_per_pass": step.bytes_added,
                "seconds_added_per_pass": step.seconds_added,
                "link_seconds_per_pass": step.link_seconds,
                "longest_part_after": " or ".join(step.may_be_longest_after) or None,
            }
        )
        shown.append(
            {
                "Boundary": step.name,
                "Ratio": f"{number(step.before)} / {number(step.after)} = {_times(step.ratio)}",
                "Dominant bottleneck: link added (PCIe / Disk)": step.link or NOT_KNOWN,
                "Added, measured (s/pass)": _digits(step.seconds_added),
                "Added bytes at the link's rate (s/pass)": _digits(step.link_seconds),
                "Longest part of the pass after it": " or ".join(step.may_be_longest_after) or NOT_KNOWN,
            }
        )
    return _table("q1_ratios", "Q1. Boundary ratios of throughput", homework_rows(points), raw, shown, QUESTIONS["q1"])


# ---- question 2 -----------------------------------------------------------------------------------------------------


def batch_size(points: Iterable[Run]) -> Table:
    """Wall time, throughput and peak GPU memory of the batches."""
    return _run_table(
        "q2",
        "Q2. Batch size, 100 % disk",
        points,
        QUESTIONS["q2"],
        {"Batch size": lambda row: str(row.gpu_batch_size)},
        (_WALL_TIME, _THROUGHPUT, _PEAK),
    )


def batch_size_ratios(points: Iterable[Run]) -> Table:
    """Neighbouring batches against the ideal ratio."""
    points = tuple(points)
    raw, shown = [], []
    for step in analysis.batch_size.analyze(points).steps:
        raw.append(
            {
                "batches": step.name,
                **_spread("ratio", step.ratio),
                "ideal": step.ideal,
                "share_of_ideal": step.share_of_ideal,
                **_spread("wall_time_ratio", step.wall_time_ratio),
            }
        )
        shown.append(
            {
                "Batches": step.name,
                "Throughput ratio": _times(step.ratio),
                "Ideal": f"{step.ideal:g}",
                "Share of ideal": f"{100 * step.share_of_ideal:.1f} %",
                "Wall time ratio": f"{step.wall_time_ratio.value:.4f}",
            }
        )
    return _table("q2_ratios", "Q2. Ratios of neighbouring batches", homework_rows(points), raw, shown, QUESTIONS["q2"])


# ---- question 3 -----------------------------------------------------------------------------------------------------


def weight_compression(points: Iterable[Run]) -> Table:
    """Throughput and peak GPU memory with and without 4-bit weights, on the GPU and on disk."""
    points = tuple(points)
    found = analysis.weight_compression.analyze(points)
    changes = {"q3-gpu-4bit": found.gpu, "q3-disk-4bit": found.disk}
    return _run_table(
        "q3",
        "Q3. Weight compression",
        points,
        QUESTIONS["q3"],
        {
            "Scenario": lambda row: "(α) 100 % GPU" if row.percent.startswith("100") else "(β) 100 % disk",
            "Compression": lambda row: "with `--compress-weight`" if row.compress_weight else "without",
        },
        (_THROUGHPUT, _PEAK),
        extra={
            "Change of throughput": lambda row: (
                times(change.ratio, "x") if (change := changes.get(row.id)) and change.ratio else ""
            )
        },
    )


# ---- question 4 -----------------------------------------------------------------------------------------------------


def disk_io(points: Iterable[Run]) -> Table:
    """The peaks of iostat's columns while all weights were on disk, with the class they give."""
    points = tuple(points)
    rows = homework_rows(points)
    columns = {
        "r/s peak (req/s)": ("disk_r_s_peak", 0),
        "rkB/s peak (KiB/s)": ("disk_rkb_s_peak", 0),
        "rareq-sz peak (KiB/req)": ("disk_rareq_kb_peak", 2),
        "%util peak": ("disk_util_percent_peak", 1),
    }
    raw, shown = [], []
    classes = analysis.disk_io.analyze(points).classes
    for found in classes:
        point, reads = rows.done(found.row_id), found.reads
        raw.append(
            {
                "run": found.row_id,
                **{field: getattr(point, field) for field, _ in columns.values()},
                "class": found.by_rule,
                "bytes_from_disk": reads.bytes_given if reads else None,
                "bytes_expected_from_disk": reads.bytes_needed if reads else None,
                "source": point.disk.source if point.disk else None,
                "kind": point.kind,
                "status": point.status,
                "reason": point.reason,
            }
        )
        shown.append(
            {
                "Run": f"{found.label}, achieved {point.placement}",
                **{header: _fixed(getattr(point, field), decimals) for header, (field, decimals) in columns.items()},
                "Class by the rule": found.by_rule,
                "By the bytes": reads.verdict if reads else NOT_KNOWN,
            }
        )
    wanted = [row for row in QUESTIONS["q4"] if row.debug_mode is None]
    for row in wanted:
        point = rows.by_id.get(row.id)
        if point is not None and point.status == "failed":
            raw.append({"run": row.id, "kind": point.kind, "status": point.status, "reason": point.reason})
            shown.append(
                {
                    "Run": f"{row.label}, achieved {point.placement}",
                    **dict.fromkeys(columns, NOT_KNOWN),
                    "Class by the rule": NOT_KNOWN,
                    "By the bytes": f"failed: {in_line(point.reason)}",
                }
            )
    counters = sorted({p.disk.source for found in classes if (p := rows.done(found.row_id)).disk})
    title = "Q4 part 1. Disk I/O under 100 % disk" + (f", counted by {', '.join(counters)}" if counters else "")
    title += "; peaks over all samples that lie within a repeat"
    return _table("q4_disk", title, rows, raw, shown, wanted)


def breakdown(points: Iterable[Run]) -> Table:
    """FlexGen's load_weight and compute_layer_decoding, all on the GPU and all on disk."""
    points = tuple(points)

    def load_over_compute(point: Run) -> float | None:
        return (
            point.load_weight_s / point.compute_layer_decoding_s
            if point.load_weight_s is not None and point.compute_layer_decoding_s
            else None
        )

    columns: tuple[_Column, ...] = (
        (
            "load_weight (per layer, s)",
            "load_weight_s",
            lambda p: p.load_weight_s,
            lambda p: _fixed(p.load_weight_s, 6),
        ),
        (
            "compute_layer_decoding (per batch, s)",
            "compute_layer_decoding_s",
            lambda p: p.compute_layer_decoding_s,
            lambda p: _fixed(p.compute_layer_decoding_s, 6),
        ),
        ("load / compute", "load_over_compute", load_over_compute, lambda p: _times(load_over_compute(p))),
        (
            "median load_weight (s)",
            "load_weight_s_median",
            lambda p: p.load_weight_s_median,
            lambda p: _fixed(p.load_weight_s_median, 6),
        ),
        (
            "median compute (s)",
            "compute_layer_decoding_s_median",
            lambda p: p.compute_layer_decoding_s_median,
            lambda p: _fixed(p.compute_layer_decoding_s_median, 6),
        ),
    )
    points_with_medians = any(p.load_weight_s_median is not None for p in points)
    return _run_table(
        "q4_breakdown",
        "Q4 part 2. `--debug-mode breakdown`, means as FlexGen prints them",
        points,
        [row for row in QUESTIONS["q4"] if row.debug_mode],
        {"Scenario": lambda row: "(1) Baseline" if row.percent.startswith("100") else "(5) Disk offload"},
        columns if points_with_medians else columns[:3],
    )


def disk_reads(points: Iterable[Run]) -> Table:
    """Bytes that each run had to read from the disk tier, and what the disk gave."""
    points = tuple(points)
    reading = [row for rows in QUESTIONS.values() for row in rows if row.debug_mode is None]
    raw, shown = [], []
    for reads in analysis.disk_reads.analyze(points):
        raw.append(
            {
                "run": reads.run_id,
                "label": reads.label,
                "bytes_needed": reads.bytes_needed,
                "needed_bytes_per_s": reads.needed_bytes_per_s,
                "disk_peak_bytes_per_s": reads.disk_bytes_per_s,
                "disk_peak_is_own": reads.disk_rate_is_own,
                "bytes_from_disk": reads.bytes_given,
                "verdict": reads.verdict,
            }
        )
        shown.append(
            {
                "Run": reads.label,
                "Had to read (GB)": plain(reads.bytes_needed / 1e9),
                "Needed rate (GB/s)": _digits(_giga(reads.needed_bytes_per_s)),
                "Disk's peak rate (GB/s)": _digits(_giga(reads.disk_bytes_per_s))
                + ("" if reads.disk_rate_is_own or reads.disk_bytes_per_s is None else " (another run)"),
                "Disk gave (GB)": _digits(_giga(reads.bytes_given)),
                "So the reads were": reads.verdict,
            }
        )
    title = (
        "What the disk tier had to deliver (bytes on disk x passes / wall time; GB = 10⁹ bytes; the disk's peak "
        "rate is of all repeats, what it gave the median repeat's)"
    )
    return _table("disk_reads", title, homework_rows(points), raw, shown, reading)


def disk_readers(points: Iterable[Run]) -> Table:
    """The direct reader's run beside that of FlexGen's own reader, both with all weights on disk and cold."""
    points = tuple(points)
    rows, found = homework_rows(points), analysis.disk_readers.analyze(points)
    mixed = len({run.point.kind for run in found.runs.values()}) > 1
    all_done = all(run.point.status == "done" for run in found.runs.values())
    raw, shown = [], []
    for row_id, run in found.runs.items():
        point, reads = run.point, run.reads
        against = found.ratio if row_id == DIRECT.id else None
        raw.append(
            {
                "row": row_id,
                "disk_reader": run.row.disk_reader,
                "page_cache": point.page_cache,
                "total_throughput_tok_s": _value(run.throughput),
                "total_throughput_tok_s_min": run.throughput.low if run.throughput else None,
                "total_throughput_tok_s_max": run.throughput.high if run.throughput else None,
                **_spread("throughput_ratio", against),
                "bytes_needed": reads.bytes_needed if reads else None,
                "bytes_from_disk": reads.bytes_given if reads else None,
                "disk_bytes_per_s": run.disk_bytes_per_s,
                "repeats": point.repeats,
                "kind": point.kind,
                "source": point.source,
                "status": point.status,
                "reason": point.reason,
                "notes": "; ".join(run.own_notes),
            }
        )
        line = {
            "Reader": run.name,
            "Throughput (token/s)": _throughput(point),
            "Against FlexGen's own": times(against, "x") if against else NOT_KNOWN,
            "Had to read (GB)": _digits(_giga(reads.bytes_needed if reads else None)),
            "Disk gave (GB)": _digits(_giga(reads.bytes_given if reads else None)),
            "Disk gave (GB/s)": _digits(_giga(run.disk_bytes_per_s)),
            "So the reads were": reads.verdict if reads else NOT_KNOWN,
        }
        if mixed:
            line["Kind"] = point.kind
        if not all_done:
            line["Status"] = point.status + (f": {in_line(point.reason)}" if point.reason else "")
        shown.append(line)
    title = "Beyond the homework: two readers of the disk tier, 100 % disk, page cache dropped"
    return _table("disk_readers", title, rows, raw, shown, (STOCK, DIRECT))


def all_runs(points: Iterable[Run]) -> Table:
    """Every run of the figures; `in_homework` says whether it is a row of the homework's sections."""
    points = tuple(points)
    used = homework_rows(points).by_id.values()
    raw, shown = [], []
    for point, name in zip(points, names(points)):
        raw.append(
            {
                "run_id": point.run_id,
                "in_homework": point in used,
                "kind": point.kind,
                "source": point.source,
                "model": point.model,
                "percent": str(point.split),
                "gpu_batch_size": point.workload.gpu_batch_size,
                "num_gpu_batches": point.workload.num_gpu_batches,
                "prompt_len": point.workload.prompt_len,
                "gen_len": point.workload.gen_len,
                "compress_weight": point.compress_weight,
                "debug_mode": point.debug_mode,
                "page_cache": point.page_cache,
                "other_options": point.other_options,
                "wall_time_s": point.wall_time_s,
                "total_throughput_tok_s": point.total_throughput_tok_s,
                "prefill_latency_s": point.prefill_latency_s,
                "decode_latency_s": point.decode_latency_s,
                "peak_gpu_mem_gib": point.peak_gpu_mem_gib,
                "bytes_from_disk": point.bytes_from_disk,
                "bytes_expected_from_disk": point.bytes_expected_from_disk,
                "repeats": point.repeats,
                "projected": point.debug_mode is not None,
                "status": point.status,
                "reason": point.reason,
            }
        )
        work = point.workload
        shown.append(
            {
                "Run": in_line(name),
                "Kind": point.kind,
                "Source": in_line(point.source),
                "Model": in_line(point.model),
                "`--percent`": f"`{point.split}`",
                "Achieved": str(point.placement),
                "Batch": f"{work.gpu_batch_size} x {work.num_gpu_batches}",
                "Prompt + generated": f"{work.prompt_len} + {work.gen_len}",
                "Options": ", ".join(
                    filter(
                        None,
                        (
                            "4-bit weights" if point.compress_weight else "",
                            point.debug_mode,
                            point.other_options,
                            f"page cache {point.page_cache}" if point.page_cache else "",
                        ),
                    )
                )
                or NOT_KNOWN,
                "Throughput (token/s)": _throughput(point) + (" (projected)" if point.debug_mode else ""),
                "Peak GPU mem (GiB)": _gib(point.peak_gpu_mem_gib),
                "Status": point.status + (f": {in_line(point.reason)}" if point.reason else ""),
            }
        )
    return Table("all_rows", "Every run in the figures.", pd.DataFrame(raw), pd.DataFrame(shown).astype(str))


# ---- beside the reference -------------------------------------------------------------------------------------------


def comparison(points: Iterable[Run]) -> Table:
    """Each row of the homework beside the T4 hand-in's, with ratios."""
    points = tuple(points)
    here, there = homework_rows(points), homework_rows(read_csv(REFERENCE))
    raw, shown = [], []
    compared = dict.fromkeys(row for rows in QUESTIONS.values() for row in rows if row.debug_mode is None)
    for row in compared:
        a, b = here.done(row.id), there.done(row.id)
        if a is None or b is None:
            continue
        speed = ratio(throughput(a), throughput(b))
        memory = (
            a.peak_gpu_mem_gib / b.peak_gpu_mem_gib if a.peak_gpu_mem_gib is not None and b.peak_gpu_mem_gib else None
        )
        raw.append(
            {
                "run": row.id,
                "total_throughput_tok_s": _value(throughput(a)),
                "reference_total_throughput_tok_s": _value(throughput(b)),
                **_spread("throughput_ratio", speed),
                "peak_gpu_mem_gib": a.peak_gpu_mem_gib,
                "reference_peak_gpu_mem_gib": b.peak_gpu_mem_gib,
                "peak_ratio": memory,
                "kind": a.kind,
                "reference_kind": b.kind,
            }
        )
        shown.append(
            {
                "Run": row.label if not row.label.startswith("batch") else f"100 % disk, {row.label}",
                "Throughput here (token/s)": _throughput(a),
                "T4 (token/s)": _throughput(b),
                "Here / T4": _times(speed),
                "Peak here (GiB)": _gib(a.peak_gpu_mem_gib),
                "T4 (GiB)": _gib(b.peak_gpu_mem_gib),
                "Here / T4 (peak)": _times(memory),
            }
        )
    title = f"Beside a student's Colab T4 (quoted){_other_workload(here, there)}"
    return _table("comparison", title, here, raw, shown, compared)


def comparison_ratios(points: Iterable[Run]) -> Table:
    """The homework's own ratios beside the T4 hand-in's: these compare even where the models differ."""
    points = tuple(points)
    here, there = _derived(points), _derived(read_csv(REFERENCE))
    raw, shown = [], []
    for name, value in here.items():
        other = there[name]
        if value is None or other is None:
            continue
        raw.append({"ratio": name, "here": _value(value), "reference": _value(other)})
        shown.append({"Ratio": name, "Here": _times(value), "T4": _times(other)})
    title = "The homework's ratios beside the Colab T4's (quoted)"
    return _table("comparison_ratios", title, homework_rows(points), raw, shown)


def _derived(points: Iterable[Run]) -> dict[str, Value | float | None]:
    points = tuple(points)
    rows = homework_rows(points)
    speed = {row_id: throughput(rows.done(row_id)) for row_id in ("q1-1", "q1-2", "q1-3", "q1-4", "q1-5", *BATCHES)}
    compressed, io = analysis.weight_compression.analyze(points), analysis.disk_io.analyze(points)
    return {
        **{f"{number(a)} / {number(b)}": ratio(speed[a], speed[b]) for a, b in STEPS},
        "b4 / b1": ratio(speed["q1-5"], speed["q2-b1"]),
        "b16 / b4": ratio(speed["q2-b16"], speed["q1-5"]),
        "4-bit / fp16, 100 % GPU": compressed.gpu and compressed.gpu.ratio,
        "4-bit / fp16, 100 % disk": compressed.disk and compressed.disk.ratio,
        "load / compute, 100 % GPU": io.gpu.load_over_compute if io.gpu else None,
        "load / compute, 100 % disk": io.disk.load_over_compute if io.disk else None,
        "load_weight, disk / GPU": io.load_ratio,
    }


def _other_workload(here: Rows, there: Rows) -> str:
    a, b = here.first, there.first
    if a is None or (a.model, a.workload.prompt_len, a.workload.gen_len) == (
        b.model,
        b.workload.prompt_len,
        b.workload.gen_len,
    ):
        return ""
    return (
        f". Not the same work: {a.model}, {a.workload.prompt_len} + {a.workload.gen_len} tokens here, {b.model}, "
        f"{b.workload.prompt_len} + {b.workload.gen_len} there; compare the homework's ratios, not the figures"
    )


# ---- building -------------------------------------------------------------------------------------------------------

# Header, raw column, raw value, text.
_Column = tuple[str, str, Callable[[Run], Any], Callable[[Run], str]]


def _run_table(
    name: str,
    title: str,
    points: Iterable[Run],
    wanted: Sequence[Row],
    labels: dict[str, Callable[[Row], str]],
    columns: Sequence[_Column],
    extra: dict[str, Callable[[Row], str]] | None = None,
) -> Table:
    """A line for each row of the homework, with its split, kind and status; a row without figures says why."""
    points = tuple(points)
    rows = homework_rows(points)
    present = [rows.by_id[row.id] for row in wanted if row.id in rows.by_id]
    mixed = len({p.kind for p in present}) > 1
    all_done = len(present) == len(wanted) and all(p.status == "done" for p in present)
    raw, shown = [], []
    for row in wanted:
        point, done = rows.by_id.get(row.id), rows.done(row.id)
        status = "missing" if point is None else point.status
        line = {header: label(row) for header, label in labels.items()}
        line |= {
            "`--percent`": f"`{row.percent}`",
            "Asked": _asked(row),
            "Achieved": str(point.placement) if point else NOT_KNOWN,
        }
        line |= {header: text(done) if done else NOT_KNOWN for header, _, _, text in columns}
        line |= {header: text(row) for header, text in (extra or {}).items()}
        if mixed:
            line["Kind"] = point.kind if point else NOT_KNOWN
        if not all_done:
            line["Status"] = status + (f": {in_line(point.reason)}" if point and point.reason else "")
        shown.append(line)
        raw.append(
            {
                "row": row.id,
                "run_id": point.run_id if point else None,
                "percent": row.percent,
                "gpu_batch_size": row.gpu_batch_size,
                "compress_weight": row.compress_weight,
                **{f"achieved_{tier}_percent": point.placement.percent(tier) if point else None for tier in TIERS},
                **{key: value(done) if done else None for _, key, value, _ in columns},
                "total_throughput_tok_s_min": _low_high(done)[0],
                "total_throughput_tok_s_max": _low_high(done)[1],
                "repeats": done.repeats if done else None,
                "page_cache": point.page_cache if point else None,
                "kind": point.kind if point else None,
                "source": point.source if point else None,
                "status": status,
                "reason": point.reason if point else None,
            }
        )
    return _table(name, title, rows, raw, shown, wanted)


def _table(
    name: str, title: str, rows: Rows, raw: list[dict], shown: list[dict], wanted: Iterable[Row] | None = None
) -> Table:
    if not shown:
        shown = [{"": "no figures for this table"}]
    kinds = ", ".join(dict.fromkeys(p.kind for p in _of_rows(rows, wanted)))
    short = f"{title}. {capital(kinds)}." if kinds else ""
    return Table(
        name, f"{title}. {provenance(rows, wanted)}", pd.DataFrame(raw), pd.DataFrame(shown).astype(str), short
    )


def provenance(rows: Rows, wanted: Iterable[Row] | None = None) -> str:
    """What the figures of these rows (all by default) are, who measured them, and the workload, in one line."""
    points = _of_rows(rows, wanted)
    if not points:
        return "Its runs are not in the figures."
    first, work = points[0], points[0].workload
    kinds = ", ".join(dict.fromkeys(f"{p.kind}: {p.source}" for p in points))
    batches = {p.workload.gpu_batch_size for p in points}
    words = [capital(kinds), f"{first.model}, prompt {work.prompt_len}, generated {work.gen_len}"]
    words[1] += f", batch {work.gpu_batch_size}" if len(batches) == 1 else ""
    words[1] += f" x {work.num_gpu_batches} micro-batches" if work.num_gpu_batches > 1 else ""
    caches = [cache for cache in ("natural", "cold") if any(p.page_cache == cache for p in points)]
    if caches:
        words.append(f"page cache {' and '.join(caches)}")
    if first.other_options:
        words.append(f"options {first.other_options}")
    spread = any(p.repeats and p.repeats > 1 for p in points)
    return "; ".join(words) + "." + (" Medians of the repeats, with their range." if spread else "")


def _of_rows(rows: Rows, wanted: Iterable[Row] | None) -> list[Run]:
    """The points of these rows or extras; of all rows by default."""
    ids = set(rows.by_id) if wanted is None else {row.id for row in wanted}
    return [point for row_id, point in (rows.by_id | rows.extras).items() if row_id in ids]


def _asked(row: Row) -> str:
    gpu, cpu = map(int, row.percent.split()[:2])
    shares = ((gpu, "GPU"), (cpu, "CPU"), (100 - gpu - cpu, "disk"))
    return " + ".join(f"{share} % {tier}" for share, tier in shares if share)


def _throughput(point: Run) -> str:
    return _with_range(
        throughput(point) if point.status == "done" else None, lambda x: f"{x:,.3f}" if x >= 0.01 else plain(x)
    )


def _with_range(value: Value | None, text: Callable[[float], str]) -> str:
    if value is None:
        return NOT_KNOWN
    return text(value.value) + (f" ({text(value.low)} to {text(value.high)})" if value.repeated else "")


def _low_high(point: Run | None) -> tuple[float | None, float | None]:
    return (point.total_throughput_tok_s_range if point else None) or (None, None)


_THROUGHPUT: _Column = ("Throughput (token/s)", "total_throughput_tok_s", lambda p: _value(throughput(p)), _throughput)
_PEAK: _Column = (
    "Peak GPU mem (GiB)",
    "peak_gpu_mem_gib",
    lambda p: p.peak_gpu_mem_gib,
    lambda p: _gib(p.peak_gpu_mem_gib),
)
_WALL_TIME: _Column = (
    "Wall time (s)",
    "wall_time_s",
    lambda p: _value(latency(p)),
    lambda p: _with_range(latency(p), lambda x: f"{x:,.3f}"),
)


def _value(value: Value | float | None) -> float | None:
    return value.value if isinstance(value, Value) else value


def _spread(name: str, value: Value | None) -> dict[str, float | None]:
    return {
        name: value.value if value else None,
        f"{name}_min": value.low if value else None,
        f"{name}_max": value.high if value else None,
    }


def _times(value: Value | float | None) -> str:
    return NOT_KNOWN if value is None else times(value)


def _digits(value: float | None) -> str:
    return NOT_KNOWN if value is None else plain(value)


def _fixed(value: float | None, decimals: int) -> str:
    return NOT_KNOWN if value is None else f"{value:,.{decimals}f}"


def _gib(value: float | None) -> str:
    return NOT_KNOWN if value is None else gib(value)


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9
