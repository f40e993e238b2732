"""Compare a sweep with the T4 hand-in's, figure by figure and ratio by ratio."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from helpers import analysis, paths
from helpers.analysis.matching import QuestionRow, Rows, homework_rows
from helpers.analysis.readers import read_csv
from helpers.analysis.values import Value, in_line, memory, ratio as ratio_of, throughput
from helpers.report.columns import Column, Table, build, figure, ratio
from helpers.report.environment import provenance
from helpers.runs import Run

REFERENCE = paths.ROOT / "outputs" / "reference" / "t4-colab" / "figures.csv"


@cache
def _reference() -> tuple[Run, ...]:
    return read_csv(REFERENCE) if REFERENCE.is_file() else ()


def same_figures(runs: Iterable[Run]) -> bool:
    """Whether these are the reference's own figures, or there is no reference, which leaves nothing to compare."""

    def figures(rows: Rows) -> dict:
        return {
            row_id: (run.total_throughput_tok_s, run.wall_time_s, run.peak_gpu_mem_gib)
            for row_id, run in rows.by_id.items()
        }

    return figures(homework_rows(runs)) == figures(homework_rows(_reference())) or not _reference()


class _Pair(NamedTuple):
    row: QuestionRow
    here: Run
    there: Run


def _label(row: QuestionRow) -> str:
    return "100 % disk, " * row.name.startswith("batch") + row.name


def _peak_ratio(pair: _Pair) -> float | None:
    here, there = pair.here.peak_gpu_mem_gib, pair.there.peak_gpu_mem_gib
    return here / there if here is not None and there else None


COMPARISON: tuple[Column[_Pair], ...] = (
    Column("", "run", lambda pair: pair.row.id),
    Column("Run", "", lambda pair: _label(pair.row)),
    Column("", "total_throughput_tok_s", lambda pair: _value(throughput(pair.here))),
    Column("", "reference_total_throughput_tok_s", lambda pair: _value(throughput(pair.there))),
    Column("Here (token/s)", "", lambda pair: throughput(pair.here), figure),
    Column("T4 (token/s)", "", lambda pair: throughput(pair.there), figure),
    Column(
        "Here / T4",
        "throughput_ratio",
        lambda pair: ratio_of(throughput(pair.here), throughput(pair.there)),
        ratio,
        ranged=True,
    ),
    Column("Peak here", "peak_gpu_mem_gib", lambda pair: pair.here.peak_gpu_mem_gib, memory),
    Column("Peak, T4", "reference_peak_gpu_mem_gib", lambda pair: pair.there.peak_gpu_mem_gib, memory),
    Column("", "peak_ratio", _peak_ratio),
    Column("", "kind", lambda pair: pair.here.kind),
    Column("", "reference_kind", lambda pair: pair.there.kind),
)


def comparison(runs: Iterable[Run]) -> Table:
    """Each row of the homework next to the T4 hand-in's."""
    here, there = homework_rows(runs), homework_rows(_reference())
    rows = {row.id: row for question in ("q1", "q2", "q3") for row in here.question(question)}
    pairs = [_Pair(row, a, b) for row in rows.values() if (a := here.done(row.id)) and (b := there.done(row.id))]
    caption = f"Next to a student's Colab T4 (quoted).{_other_workload(here, there)}"
    return build("comparison", caption, COMPARISON, pairs, provenance([pair.here for pair in pairs]))


class _Ratio(NamedTuple):
    name: str
    here: Value | float | None
    there: Value | float | None


COMPARISON_RATIOS: tuple[Column[_Ratio], ...] = (
    Column("Ratio", "ratio", lambda line: line.name),
    Column("", "here", lambda line: _value(line.here)),
    Column("", "reference", lambda line: _value(line.there)),
    Column("Here", "", lambda line: line.here, ratio),
    Column("T4", "", lambda line: line.there, ratio),
)


def comparison_ratios(runs: Iterable[Run]) -> Table:
    """The homework's own ratios next to the T4 hand-in's: these compare even where the models differ."""
    runs = tuple(runs)
    here, there = _ratios(runs), _ratios(_reference())
    known = [_Ratio(name, value, there[name]) for name, value in here.items()]
    known = [line for line in known if line.here is not None and line.there is not None]
    source = provenance(homework_rows(runs).runs)
    return build("comparison_ratios", "The homework's ratios, here and on the T4.", COMPARISON_RATIOS, known, source)


def _ratios(runs: Iterable[Run]) -> dict[str, Value | float | None]:
    runs = tuple(runs)
    rows, io = homework_rows(runs), analysis.disk_io.analyze(runs)

    def of(a: str, b: str) -> Value | None:
        return ratio_of(throughput(rows.done(a)), throughput(rows.done(b)))

    return {
        **{f"({n}) / ({n + 1})": of(f"q1-{n}", f"q1-{n + 1}") for n in (1, 2, 3, 4)},
        "b4 / b1": of("q1-5", "q2-b1"),
        "b16 / b4": of("q2-b16", "q1-5"),
        "4-bit / fp16, 100 % GPU": of("q3-gpu-4bit", "q1-1"),
        "4-bit / fp16, 100 % disk": of("q3-disk-4bit", "q1-5"),
        "load / compute, 100 % GPU": io.gpu.load_over_compute if io.gpu else None,
        "load / compute, 100 % disk": io.disk.load_over_compute if io.disk else None,
        "load_weight, disk / GPU": io.load_ratio,
    }


def _value(value: Value | float | None) -> float | None:
    return value.value if isinstance(value, Value) else value


def _other_workload(here: Rows, there: Rows) -> str:
    a, b = here.first, there.first
    if a is None or b is None:
        return ""
    works = [(run.model, run.workload.prompt_len, run.workload.gen_len) for run in (a, b)]
    if works[0] == works[1]:
        return ""
    ours, theirs = (f"{in_line(model)}, {prompt} + {generated} tokens" for model, prompt, generated in works)
    return f" Not the same work ({ours} here, {theirs} there): compare ratios, not figures."
