"""Which run is which row of the homework, matched by what it is, never by its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from helpers.homework import EXTRAS, QUESTIONS, Row
from helpers.runs import Run, other_options
from helpers.settings import OffloadSplit, RunSettings


def _homework_rows() -> dict[Row, None]:
    return {row: None for rows in QUESTIONS.values() for row in rows}


def _identity(run: Row | Run | RunSettings) -> tuple:
    """What makes a run a row of the homework, or not; the page cache apart."""
    if isinstance(run, Row):
        return OffloadSplit.parse(run.percent).percent, run.gpu_batch_size, run.compress_weight, run.debug_mode
    return run.split.percent, run.workload.gpu_batch_size, run.compress_weight, run.debug_mode


_ROWS_BY_IDENTITY = {
    identity: tuple(row for row in _homework_rows() if _identity(row) == identity)
    for identity in map(_identity, _homework_rows())
}


def _extra(run: Run | RunSettings) -> Row | None:
    """The extra that a run is, or None: beside what makes a row, page cache and options are those of the extra."""
    options = run.other_options if isinstance(run, Run) else other_options(run)
    return _EXTRAS.get((_identity(run), run.page_cache, options))


_EXTRAS = {
    (_identity(row), row.page_cache, f"--disk-reader {row.disk_reader}"): row
    for rows in EXTRAS.values()
    for row in rows
}


@dataclass(frozen=True)
class Rows:
    """The homework's rows as far as the figures have them, by row id; failed runs among them. `extras`: the runs
    beside them that the homework does not ask for."""

    by_id: dict[str, Run]
    notes: tuple[str, ...] = ()
    extras: dict[str, Run] = field(default_factory=dict)

    def done(self, row_id: str) -> Run | None:
        """The point that has figures for a row or an extra, or None."""
        point = self.by_id.get(row_id) or self.extras.get(row_id)
        return point if point is not None and point.status == "done" else None

    @property
    def first(self) -> Run | None:
        return next(iter(self.by_id.values()), None)


def campaigns(points: Iterable[Run]) -> tuple[tuple[Run, ...], ...]:
    """Points that may be compared: one source, one model (a folder may get another), one prompt and generation
    length, same options."""
    groups: dict[tuple, list[Run]] = {}
    for point in points:
        groups.setdefault((*_same_work(point), point.other_options), []).append(point)
    return tuple(map(tuple, groups.values()))


def _same_work(point: Run) -> tuple:
    work = point.workload
    return (
        point.source,
        point.kind == "predicted",
        point.model,
        point.model_shape,
        work.prompt_len,
        work.gen_len,
        work.num_gpu_batches,
    )


def _unlike(other: Run, point: Run) -> str:
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


def homework_rows(points: Iterable[Run]) -> Rows:
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


def _beside(first: Run, extras: Iterable[Run]) -> dict[str, Run]:
    """The extras that may be compared with a campaign, by row id; of two for one the later one that is done."""
    found: dict[str, Run] = {}
    for point in extras:
        row_id = _extra(point).id
        if first.other_options or _same_work(point) != _same_work(first):
            continue
        if row_id not in found or point.status == "done" or found[row_id].status == "failed":
            found[row_id] = point
    return found


def names(points: Sequence[Run]) -> list[str]:
    """What to call each point: its id if it is a row of the homework or was named by a person, else in words."""
    rows = homework_rows(points)
    used = [*rows.by_id.values(), *rows.extras.values()]
    return [point.run_id if point.kind == "quoted" or point in used else point.in_words for point in points]


def _match(group: Sequence[Run]) -> Rows:
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


def _by_row(group: Sequence[Run], rows: Iterable[Row] | None = None) -> tuple[dict[str, Run], tuple[str, ...]]:
    if rows is None:
        rows = [row for row in _homework_rows() if row.page_cache is None]
    by_identity: dict[tuple, list[Run]] = {}
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


def run_id(settings: RunSettings) -> str:
    """The homework's name for these settings, or their key."""
    if extra := _extra(settings):
        return extra.id
    same = _ROWS_BY_IDENTITY.get(_identity(settings), ())
    rows = [row for row in same if row.page_cache in (None, settings.page_cache)]
    rows.sort(key=lambda row: row.page_cache is None)
    return rows[0].id if rows else settings.key
