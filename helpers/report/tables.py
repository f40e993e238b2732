"""The tables of the report: each is a list of columns, filled from the runs that its question shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from helpers import analysis
from helpers.analysis.batch_size import BatchStep
from helpers.analysis.disk_io import DiskClass
from helpers.analysis.disk_readers import ReaderRun
from helpers.analysis.disk_reads import DiskReads
from helpers.analysis.disturbances import disturbance
from helpers.analysis.matching import QuestionRow, homework_rows, names
from helpers.analysis.offload_sweep import Step
from helpers.analysis.values import (
    Value,
    in_line,
    latency,
    memory,
    plain,
    rate,
    ratio as ratio_of,
    seconds,
    size,
    throughput,
    times,
)
from helpers.report.columns import (
    NO_BREAK,
    NOT_KNOWN,
    Column,
    Table,
    asked_and_achieved,
    attributes,
    build,
    figure,
    percent_option,
    ratio,
)
from helpers.report.comparison import comparison, comparison_ratios, same_figures
from helpers.report.environment import provenance
from helpers.runs import Run
from helpers.settings import Workload

if TYPE_CHECKING:
    from helpers.machine.ceilings import MachineCeilings

MORE_THAN_THEORY = 1.02  # times a theoretical ceiling: rounding and the timer explain less


def every(runs: Sequence[Run]) -> dict[str, Table]:
    """All tables by name, in the order of the report. The reference isn't compared with itself, and the direct reader
    has a table only where it ran."""
    tables = [
        offload_sweep(runs),
        offload_sweep_ratios(runs),
        batch_size(runs),
        batch_size_ratios(runs),
        weight_compression(runs),
        disk_io(runs),
        breakdown(runs),
        disk_reads(runs),
    ]
    if homework_rows(runs).extras:
        tables.append(disk_readers(runs))
    if not same_figures(runs):
        tables += [comparison(runs), comparison_ratios(runs)]
    tables.append(all_runs(runs))
    return {table.name: table for table in tables}


# ---- columns of every table of runs ---------------------------------------------------------------------------------


def _remark(run: Run) -> str:
    """Why a run has no figures, or what disturbed them."""
    if run.status == "failed":
        return f"failed: {run.reason or 'no reason given'}"
    what = disturbance(run)
    return "; ".join((*([f"disturbed: {what}"] if what else []), *(f"check: {remark}" for remark in run.remarks)))


def _run_columns(*figures: Column[QuestionRow], labels: tuple[Column[QuestionRow], ...]) -> tuple:
    """Which run it is, its figures, and what kind they are; a failed run keeps its row."""
    return (
        Column("", "row", lambda row: row.id),
        Column("", "run_id", lambda row: row.run.run_id),
        *labels,
        Column("`--percent`", "percent", lambda row: row.run.split, percent_option),
        Column("Weights: asked → achieved", "", lambda row: asked_and_achieved(row.run.split, row.run.placement)),
        Column("", "gpu_batch_size", lambda row: row.run.workload.gpu_batch_size),
        Column("", "compress_weight", lambda row: row.run.compress_weight),
        Column("", "achieved_gpu_percent", lambda row: row.run.placement.percent("gpu")),
        Column("", "achieved_cpu_percent", lambda row: row.run.placement.percent("cpu")),
        Column("", "achieved_disk_percent", lambda row: row.run.placement.percent("disk")),
        *figures,
        *attributes(_run, "repeats", "page_cache"),
        *_about(_run),
    )


def _about(run: Callable[[Any], Run]) -> tuple[Column[Any], ...]:
    """The last columns of a table of runs."""
    return (
        Column("Kind", "kind", lambda line: run(line).kind, show="if different"),
        *attributes(run, "source", "status", "reason"),
        Column("", "disturbance", lambda line: disturbance(run(line))),
        Column("Remark", "", lambda line: _remark(run(line)), show="if any"),
    )


def _run(line: Any) -> Run:
    return line.run


_THROUGHPUT: Column[QuestionRow] = Column(
    "Throughput (token/s)", "total_throughput_tok_s", lambda row: throughput(row.run), figure, ranged=True
)
_WALL_TIME: Column[QuestionRow] = Column(
    "Wall time (s)", "wall_time_s", lambda row: latency(row.run), figure, ranged=True
)
_PEAK: Column[QuestionRow] = Column("Peak GPU mem", "peak_gpu_mem_gib", lambda row: row.run.peak_gpu_mem_gib, memory)


def _run_table(name: str, caption: str, columns: tuple[Column[QuestionRow], ...], rows: Iterable[QuestionRow]) -> Table:
    rows = tuple(rows)
    return build(name, caption, columns, rows, provenance([row.run for row in rows]))


def _source(runs: Iterable[Run], question: str) -> str:
    return provenance([row.run for row in homework_rows(runs).question(question)])


# ---- question 1 -----------------------------------------------------------------------------------------------------

OFFLOAD_SWEEP = _run_columns(_THROUGHPUT, _PEAK, labels=(Column("Setting", "", lambda row: row.label),))


def _division(step: Step) -> str:
    return f"{step.before.label} / {step.after.label} = {ratio(step.ratio)}".replace(" ", NO_BREAK)


OFFLOAD_SWEEP_RATIOS: tuple[Column[Step], ...] = (
    Column("Boundary", "boundary", lambda step: step.name),
    Column("", "ratio", lambda step: step.ratio, ranged=True),
    Column("Ratio", "", _division),
    Column("Dominant bottleneck (PCIe / Disk)", "link_added", lambda step: step.link),
    Column("", "bytes_added_per_pass", lambda step: step.bytes_added),
    Column("Added per pass", "seconds_added_per_pass", lambda step: step.seconds_added, seconds),
    Column("", "link_seconds_per_pass", lambda step: step.link_s and step.link_s.high),
    Column(
        "Longest part of the pass after it",
        "longest_part_after",
        lambda step: " or ".join(step.may_be_longest_after) or None,
    ),
)


def offload_sweep(runs: Iterable[Run]) -> Table:
    """Throughput and peak GPU memory by weight split."""
    return _run_table("q1", "Q1. Progressive offload sweep.", OFFLOAD_SWEEP, homework_rows(runs).question("q1"))


def offload_sweep_ratios(runs: Iterable[Run]) -> Table:
    """Ratio of throughputs at each boundary, the link it adds, and what bounds the run after it."""
    runs = tuple(runs)
    steps = [step for step in analysis.offload_sweep.analyze(runs).steps if step.ratio]
    return build("q1_ratios", "Q1. Boundary ratios of throughput.", OFFLOAD_SWEEP_RATIOS, steps, _source(runs, "q1"))


# ---- question 2 -----------------------------------------------------------------------------------------------------

BATCH_SIZE = _run_columns(_WALL_TIME, _THROUGHPUT, _PEAK, labels=(Column("Batch size", "", lambda row: row.label),))

BATCH_SIZE_RATIOS: tuple[Column[BatchStep], ...] = (
    Column("Batches", "batches", lambda step: step.name),
    Column("Throughput ratio", "ratio", lambda step: step.ratio, ratio, ranged=True),
    Column("Ideal", "ideal", lambda step: step.ideal, "{:g}".format),
    Column("Share of ideal", "share_of_ideal", lambda step: step.share_of_ideal, lambda share: f"{100 * share:.1f} %"),
    Column("Wall time ratio", "wall_time_ratio", lambda step: step.wall_time_ratio, figure, ranged=True),
)


def batch_size(runs: Iterable[Run]) -> Table:
    """Wall time, throughput and peak GPU memory by batch."""
    return _run_table("q2", "Q2. Batch size, 100 % disk.", BATCH_SIZE, homework_rows(runs).question("q2"))


def batch_size_ratios(runs: Iterable[Run]) -> Table:
    """Neighbouring batches compared with the ideal ratio."""
    runs = tuple(runs)
    steps = analysis.batch_size.analyze(runs).steps
    return build("q2_ratios", "Q2. Ratios of neighbouring batches.", BATCH_SIZE_RATIOS, steps, _source(runs, "q2"))


# ---- question 3 -----------------------------------------------------------------------------------------------------


def weight_compression(runs: Iterable[Run]) -> Table:
    """Throughput and peak GPU memory with and without 4-bit weights."""
    rows = homework_rows(runs).question("q3")

    def change(row: QuestionRow) -> Value | None:
        before = [other.run for other in rows if other.run.split == row.run.split and not other.run.compress_weight]
        return ratio_of(throughput(row.run), throughput(before[0])) if row.run.compress_weight and before else None

    columns = _run_columns(
        _THROUGHPUT,
        _PEAK,
        Column("Change", "throughput_change", change, lambda value: times(value, "x"), ranged=True),
        labels=(
            Column(
                "Scenario",
                "",
                lambda row: (
                    f"{row.label} {row.run.split.in_words}" if row.label.startswith("(") else row.run.split.in_words
                ),
            ),
            Column("Compression", "", lambda row: row.run.compress_weight, lambda on: "4-bit" if on else "without"),
        ),
    )
    return _run_table("q3", "Q3. Weight compression (`--compress-weight`).", columns, rows)


# ---- question 4 -----------------------------------------------------------------------------------------------------


class _DiskLine(NamedTuple):
    row: QuestionRow
    found: DiskClass | None

    @property
    def run(self) -> Run:
        return self.row.run

    @property
    def reads(self) -> DiskReads | None:
        return self.found.reads if self.found else None


DISK_IO: tuple[Column[_DiskLine], ...] = (
    Column("", "run", lambda line: line.row.id),
    Column("Setting", "", lambda line: line.row.label),
    Column("Page cache", "page_cache", lambda line: line.run.page_cache, show="if any"),
    Column("Weights", "", lambda line: str(line.run.placement)),
    Column("r/s peak", "disk_r_s_peak", lambda line: line.run.disk_r_s_peak, "{:,.0f} req/s".format),
    Column("rkB/s peak", "disk_rkb_s_peak", lambda line: line.run.disk_rkb_s_peak, "{:,.0f} KiB/s".format),
    Column("rareq-sz peak", "disk_rareq_kb_peak", lambda line: line.run.disk_rareq_kb_peak, "{:,.2f} KiB".format),
    Column("%util peak", "disk_util_percent_peak", lambda line: line.run.disk_util_percent_peak, "{:.1f} %".format),
    Column("Class", "class", lambda line: line.found and line.found.by_rule),
    Column("Reads", "", lambda line: line.reads and line.reads.verdict),
    Column("", "bytes_from_disk", lambda line: line.reads and line.reads.bytes_given),
    Column("", "bytes_expected_from_disk", lambda line: line.reads and line.reads.bytes_needed),
    *_about(_run),
    # In this file "source" names the counter (iostat, /proc/diskstats), not the machine.
    Column("", "source", lambda line: line.run.disk and line.run.disk.source),
)

BREAKDOWN = _run_columns(
    Column("load_weight (per layer)", "load_weight_s", lambda row: row.run.load_weight_s, "{:.6f} s".format),
    Column(
        "compute_layer_decoding (per batch)",
        "compute_layer_decoding_s",
        lambda row: row.run.compute_layer_decoding_s,
        "{:.6f} s".format,
    ),
    Column(
        "load / compute",
        "load_over_compute",
        lambda row: _over(row.run.load_weight_s, row.run.compute_layer_decoding_s),
        ratio,
    ),
    Column("Medians: load, compute, ratio", "", lambda row: _medians(row.run), show="if any"),
    Column("", "load_weight_s_median", lambda row: row.run.load_weight_s_median),
    Column("", "compute_layer_decoding_s_median", lambda row: row.run.compute_layer_decoding_s_median),
    labels=(Column("Scenario", "", lambda row: row.label),),
)


def _over(load: float | None, compute: float | None) -> float | None:
    return load / compute if load is not None and compute else None


def _medians(run: Run) -> str | None:
    load, compute = run.load_weight_s_median, run.compute_layer_decoding_s_median
    if load is None or not compute:
        return None
    return f"{seconds(load)}, {seconds(compute)}, {ratio(load / compute)}"


def disk_io(runs: Iterable[Run]) -> Table:
    """The peaks of iostat's columns with all weights on disk, and the class they give."""
    runs = tuple(runs)
    classes = {found.row_id: found for found in analysis.disk_io.analyze(runs).classes}
    rows = [row for row in homework_rows(runs).question("q4") if row.run.debug_mode is None]
    counters = ", ".join(sorted({row.run.disk.source for row in rows if row.run.disk}))
    caption = "Q4 part 1. Disk I/O with 100 % disk" + (f", from {in_line(counters)}" if counters else "") + "."
    lines = [_DiskLine(row, classes.get(row.id)) for row in rows]
    return build("q4_disk", caption, DISK_IO, lines, provenance([row.run for row in rows]))


def breakdown(runs: Iterable[Run]) -> Table:
    """FlexGen's load_weight and compute_layer_decoding by split."""
    rows = [row for row in homework_rows(runs).question("q4") if row.run.debug_mode]
    caption = "Q4 part 2. `--debug-mode breakdown`, means as FlexGen prints them."
    return _run_table("q4_breakdown", caption, BREAKDOWN, rows)


# ---- the disk tier --------------------------------------------------------------------------------------------------


DISK_READS: tuple[Column[DiskReads], ...] = (
    Column("", "run", lambda reads: reads.run_id),
    Column("Run", "label", lambda reads: reads.label),
    Column("Needed", "bytes_needed", lambda reads: reads.bytes_needed, size),
    Column("From the disk", "bytes_from_disk", lambda reads: reads.bytes_given, size),
    Column("Needed rate", "needed_bytes_per_s", lambda reads: reads.needed_bytes_per_s, rate),
    Column("Disk's peak", "disk_peak_bytes_per_s", lambda reads: reads.disk_bytes_per_s, rate),
    Column("", "disk_peak_is_own", lambda reads: reads.disk_rate_is_own),
    Column("Reads", "verdict", lambda reads: reads.verdict),
)

DISK_READERS: tuple[Column[ReaderRun], ...] = (
    Column("", "row", lambda line: line.row.id),
    Column("Reader", "", lambda line: line.name),
    Column("", "disk_reader", lambda line: line.run.settings.disk_reader),
    Column("Throughput (token/s)", "total_throughput_tok_s", lambda line: line.throughput, figure, ranged=True),
    Column("Needed", "bytes_needed", lambda line: line.reads and line.reads.bytes_needed, size),
    Column("From the disk", "bytes_from_disk", lambda line: line.reads and line.reads.bytes_given, size),
    Column("Disk rate", "disk_bytes_per_s", lambda line: line.disk_bytes_per_s, rate),
    Column("Reads", "", lambda line: line.reads and line.reads.verdict),
    Column("", "notes", lambda line: "; ".join(line.own_notes)),
    *attributes(lambda line: line.run, "repeats", "page_cache"),
    *_about(lambda line: line.run),
)


def disk_reads(runs: Iterable[Run]) -> Table:
    """Bytes that each run had to read from the disk tier, and the bytes that the disk gave."""
    caption = (
        "What the disk tier had to deliver: bytes on disk x passes, and the same over the wall time. "
        "The disk's peak is the highest rate sampled in any run."
    )
    runs = tuple(runs)
    return build(
        "disk_reads", caption, DISK_READS, analysis.disk_reads.analyze(runs), provenance(homework_rows(runs).runs)
    )


def disk_readers(runs: Iterable[Run]) -> Table:
    """The direct reader's run next to FlexGen's own reader's, both with all weights on disk and a cold page cache."""
    found = analysis.disk_readers.analyze(runs)
    against: Column[ReaderRun] = Column(
        "Ratio",
        "throughput_ratio",
        lambda line: found.ratio if line.run.settings.disk_reader == "direct" else None,
        ratio,
        ranged=True,
    )
    caption = "Two readers of the disk tier, 100 % disk, page cache dropped."
    lines = tuple(found.runs.values())
    return build("disk_readers", caption, (*DISK_READERS, against), lines, provenance([line.run for line in lines]))


# ---- every run ------------------------------------------------------------------------------------------------------


class _AnyRun(NamedTuple):
    name: str
    run: Run
    in_homework: bool


def _options(run: Run) -> str:
    cache = f"page cache {run.page_cache}" if run.page_cache else ""
    words = ("4-bit weights" if run.compress_weight else "", run.debug_mode or "", run.other_options, cache)
    return ", ".join(filter(None, words)) or NOT_KNOWN


def _tokens(work: Workload) -> str:
    return f"{work.prompt_len} + {work.gen_len}"


ALL_RUNS: tuple[Column[_AnyRun], ...] = (
    Column("Run", "", lambda line: line.name),
    Column("", "run_id", lambda line: line.run.run_id),
    Column("", "in_homework", lambda line: line.in_homework),
    Column("Model", "model", lambda line: line.run.model, show="if different"),
    Column("`--percent`", "percent", lambda line: line.run.split, percent_option),
    Column("Achieved", "", lambda line: str(line.run.placement)),
    Column("Batch", "", lambda line: f"{line.run.workload.gpu_batch_size} x {line.run.workload.num_gpu_batches}"),
    Column("Tokens", "", lambda line: _tokens(line.run.workload), show="if different"),
    *attributes(lambda line: line.run.workload, "gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len"),
    Column("Options", "", lambda line: _options(line.run)),
    *attributes(_run, "compress_weight", "debug_mode", "page_cache", "other_options"),
    Column("Throughput (token/s)", "", lambda line: throughput(line.run), figure),
    Column("Peak GPU mem", "peak_gpu_mem_gib", lambda line: line.run.peak_gpu_mem_gib, memory),
    *attributes(_run, "wall_time_s", "total_throughput_tok_s", "prefill_latency_s", "decode_latency_s"),
    *attributes(_run, "bytes_from_disk", "bytes_expected_from_disk", "repeats"),
    Column("", "projected", lambda line: line.run.debug_mode is not None),
    *_about(_run),
)


def all_runs(runs: Iterable[Run]) -> Table:
    """Every run of the figures; `in_homework` says whether it is one of the homework's rows."""
    runs = tuple(runs)
    shown = {id(run) for run in homework_rows(runs).by_id.values()}
    lines = [_AnyRun(name, run, id(run) in shown) for name, run in zip(names(runs), runs)]
    return build("all_rows", "Every run.", ALL_RUNS, lines)


# ---- the machine ----------------------------------------------------------------------------------------------------


class _Ceiling(NamedTuple):
    part: str
    unit: str
    measured: float | None
    theoretical: float | None
    how: str
    source: str

    @property
    def share(self) -> float | None:
        return _over(self.measured, self.theoretical)


CEILINGS: tuple[Column[_Ceiling], ...] = (
    Column("What", "what", lambda line: line.part),
    Column("Measured", "measured", lambda line: line.measured, plain),
    Column("Theoretical", "theoretical", lambda line: line.theoretical, plain),
    Column("Unit", "unit", lambda line: line.unit),
    Column(
        "Measured / theoretical",
        "measured_over_theoretical",
        lambda line: line.share,
        lambda share: f"{100 * share:.0f} %",
    ),
    Column("How it was measured", "how", lambda line: line.how),
    Column("Where the theoretical value is from", "theoretical_from", lambda line: line.source),
)
_PARTS = {
    "disk_read_gb_s": ("disk, sequential reads", "GB/s"),
    "page_cache_read_gb_s": ("page cache, reads", "GB/s"),
    "host_to_device_gb_s": ("host to GPU, pinned", "GB/s"),
    "device_to_host_gb_s": ("GPU to host, pinned", "GB/s"),
    "gpu_copy_gb_s": ("GPU memory, copy (read + written)", "GB/s"),
    "matmul_tflop_s": ("GPU, fp16 matrix product", "TFLOP/s"),
}


def ceilings(measured: MachineCeilings) -> Table:
    """Measured rates of a machine's parts next to the theoretical ones, and where each is from."""
    how = dict(note.split(": ", 1) for note in measured.notes if ": " in note)
    lines = []
    for name, (part, unit) in _PARTS.items():
        theory = measured.theoretical.get(name)
        source = theory.source if theory else "not kept with these figures"
        line = _Ceiling(
            part, unit, getattr(measured, name), theory.value if theory else None, how.get(name, ""), source
        )
        if line.share is not None and line.share > MORE_THAN_THEORY:
            line = line._replace(source=f"{source}; more was measured, so this isn't the limit here")
        lines.append(line)
    where = "this machine, no GPU in use" if measured.machine.name.startswith("emulated") else measured.machine.name
    caption = f"Measured ceilings of {in_line(where)}, next to theoretical ones."
    return build("machine", caption, CEILINGS, lines)
