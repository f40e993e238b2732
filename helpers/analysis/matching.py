"""Which runs each question shows, matched by their settings and never by their names.

`homework_rows(runs)` picks one campaign (same machine, model, lengths and options). `rows.question("q1")` are then the
rows of that question's table, plot, ratios and answer: the homework's own rows and every other run that varies what
the question varies. `rows.left_out` names the runs that no question shows, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from helpers.analysis.disturbances import disturbance
from helpers.homework import DISK, EXTRAS, QUESTIONS, Row
from helpers.runs import Run
from helpers.settings import OffloadSplit, RunSettings

_DISK_SPLIT = OffloadSplit.parse(DISK)
_HOMEWORK = tuple({row: None for rows in QUESTIONS.values() for row in rows})
_REFERENCE_BATCH = 4  # of the homework's rows; a campaign may have another
_NAMED = 3  # left-out runs named for one reason


@dataclass(frozen=True)
class QuestionRow:
    """One run in a question's table.

    `id` is the homework's ("q1-3") or, for other runs, the run's own. `label` is short enough for an axis: "(3)", "8"
    (a batch), "(α)", or the split itself ("20/80/0" for GPU/CPU/disk) where the homework has no such row.
    """

    id: str
    label: str
    name: str  # in words: "50 % GPU + 50 % disk"
    run: Run
    in_homework: bool

    @property
    def done(self) -> bool:
        return self.run.status == "done"

    @property
    def disturbance(self) -> str:
        """What disturbed the run while it was measured, or ""."""
        return disturbance(self.run)


@dataclass(frozen=True)
class Rows:
    """One campaign's runs. `by_id` holds the homework's rows, failed ones included; `extras` the runs that have a
    section of their own."""

    by_id: dict[str, Run]
    left_out: tuple[str, ...] = ()
    extras: dict[str, Run] = field(default_factory=dict)
    _questions: dict[str, tuple[QuestionRow, ...]] = field(default_factory=dict)

    def question(self, question: str) -> tuple[QuestionRow, ...]:
        """The rows of q1 (splits, by GPU share then CPU share), q2 (batches, ascending), q3 (splits, each without and
        with 4-bit weights) or q4 (all weights on disk, then breakdowns)."""
        return self._questions.get(question, ())

    def done(self, row_id: str) -> Run | None:
        """The run that has figures for a homework row or an extra, or None."""
        run = self.by_id.get(row_id) or self.extras.get(row_id)
        return run if run is not None and run.status == "done" else None

    @property
    def first(self) -> Run | None:
        return next((row.run for rows in self._questions.values() for row in rows), None)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every run that a question shows, each once."""
        return tuple({id(row.run): row.run for rows in self._questions.values() for row in rows}.values())


def homework_rows(runs: Iterable[Run]) -> Rows:
    """The campaign with the most rows of the homework, and its rows by question.

    Of several runs with the same settings the last one that is done is used.
    """
    runs = tuple(runs)
    groups = [_Campaign(group) for group in _campaigns(run for run in runs if "--disk-reader" not in run.other_options)]
    if not groups:
        return Rows({})
    best = max(groups, key=lambda campaign: (len(campaign.by_id), len(campaign.shown)))
    if not best.shown:
        return Rows({})
    extras = _extras(best.shown[0], runs)
    shown = {id(run) for run in (*best.shown, *extras.values())}
    left_out: dict[str, list[Run]] = {}
    for run in runs:
        if id(run) not in shown:
            left_out.setdefault(best.why_not(run), []).append(run)
    return Rows(best.by_id, tuple(_named(*item) for item in left_out.items()), extras, best.questions)


def names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its id if it is a homework row or a person named it, else its settings in words."""
    rows = homework_rows(runs)
    used = [*rows.by_id.values(), *rows.extras.values()]
    return [run.run_id if run.named_by_person or run in used else run.in_words for run in runs]


def run_id(settings: RunSettings) -> str:
    """The homework's name for these settings, or their key."""
    if extra := _extra(settings):
        return extra.id
    same = [row for row in _HOMEWORK if _key(row) == _key(settings) and row.page_cache in (None, settings.page_cache)]
    same.sort(key=lambda row: row.page_cache is None)
    return same[0].id if same else settings.key


# ---- one campaign ---------------------------------------------------------------------------------------------------

_Key = tuple[tuple[int, ...], int, bool, str | None]


def _key(run: Row | Run | RunSettings) -> _Key:
    """The settings that the questions vary, except for the page cache."""
    if isinstance(run, Row):
        return _row_key(run)
    return run.split.percent, run.workload.gpu_batch_size, run.compress_weight, run.debug_mode


@cache
def _row_key(row: Row) -> _Key:
    return OffloadSplit.parse(row.percent).percent, row.gpu_batch_size, row.compress_weight, row.debug_mode


class _Campaign:
    """Runs that may be compared with each other, and the rows they make."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        # The homework's batch, unless more of these runs share another.
        per_batch = Counter(batch for _, batch, *_ in {_key(run) for run in runs})
        common = max(per_batch, key=lambda batch: (per_batch[batch], batch == _REFERENCE_BATCH))
        self.batch = common if per_batch[common] > 1 else _REFERENCE_BATCH
        cold = [run for run in runs if run.page_cache == "cold"]
        natural = [run for run in runs if run.page_cache != "cold"]
        # One page cache for all rows, so that they can be compared; a run that reads no disk can come from either.
        self.main_is_cold = len({_key(r) for r in cold}) > len({_key(r) for r in natural})
        main, other = (cold, natural) if self.main_is_cold else (natural, cold)
        self.chosen = {_key(run): run for run in _last_done(r for r in other if not r.placement.disk_bytes_per_pass)}
        self.chosen |= {_key(run): run for run in _last_done(main)}
        disk_key = (_DISK_SPLIT.percent, self.batch, False, None)
        self.cold_disk = next((r for r in _last_done(cold) if _key(r) == disk_key), None)

    @cached_property
    def questions(self) -> dict[str, tuple[QuestionRow, ...]]:
        return {"q1": self._splits(), "q2": self._batches(), "q3": self._compression(), "q4": self._disk()}

    @cached_property
    def by_id(self) -> dict[str, Run]:
        """The homework's rows, in the homework's order."""
        found = {row.id: row.run for rows in self.questions.values() for row in rows if row.in_homework}
        return {row.id: found[row.id] for row in _HOMEWORK if row.id in found}

    @property
    def shown(self) -> list[Run]:
        return list({id(row.run): row.run for rows in self.questions.values() for row in rows}.values())

    def _row(self, run: Run, label: str, name: str = "") -> QuestionRow:
        percent, batch, *rest = _key(run)
        # The campaign's batch stands for the homework's 4, which then is a batch like any other.
        batch = {_REFERENCE_BATCH: 0, self.batch: _REFERENCE_BATCH}.get(batch, batch)
        key = (percent, batch, *rest)
        known = next((row for row in _HOMEWORK if _key(row) == key and row.page_cache is None), None)
        row_id = known.id if known else run.run_id
        return QuestionRow(row_id, label, name or run.split.in_words, run, known is not None)

    def _where(self, wanted: Callable[[Run], bool]) -> list[Run]:
        found = [run for run in self.chosen.values() if _on_gpu(run.split) and wanted(run)]
        return sorted(found, key=lambda run: (-run.split.weights_gpu, -run.split.weights_cpu, run.compress_weight))

    def _is_plain(self, run: Run) -> bool:
        return run.workload.gpu_batch_size == self.batch and run.debug_mode is None

    def _splits(self) -> tuple[QuestionRow, ...]:
        numbers = {OffloadSplit.parse(row.percent).percent: f"({row.id[-1]})" for row in QUESTIONS["q1"]}
        found = self._where(lambda run: self._is_plain(run) and not run.compress_weight)
        return tuple(self._row(run, numbers.get(run.split.percent, _short(run.split))) for run in found)

    def _batches(self) -> tuple[QuestionRow, ...]:
        found = self._where(lambda r: r.split == _DISK_SPLIT and not r.compress_weight and r.debug_mode is None)
        found.sort(key=lambda run: run.workload.gpu_batch_size)
        return tuple(
            self._row(r, str(r.workload.gpu_batch_size), f"100 % disk, batch {r.workload.gpu_batch_size}")
            for r in found
        )

    def _compression(self) -> tuple[QuestionRow, ...]:
        signs = {(100, 0): "(α)", (0, 0): "(β)"}
        compressed = {run.split.percent for run in self._where(self._is_plain) if run.compress_weight}
        compressed |= {OffloadSplit.parse(row.percent).percent for row in QUESTIONS["q3"]}
        found = self._where(lambda run: self._is_plain(run) and run.split.percent in compressed)
        return tuple(
            self._row(
                run,
                signs.get((run.split.weights_gpu, run.split.weights_cpu), _short(run.split)),
                run.split.in_words + (", 4-bit weights" if run.compress_weight else ""),
            )
            for run in found
        )

    def _disk(self) -> tuple[QuestionRow, ...]:
        rows = []
        disk = self._where(lambda r: self._is_plain(r) and r.split == _DISK_SPLIT and not r.compress_weight)
        if disk:
            rows.append(self._row(disk[0], "(5)"))
        if self.cold_disk:
            cold = next(row for row in QUESTIONS["q4"] if row.page_cache == "cold")
            rows.append(QuestionRow(cold.id, "(5) cold", cold.label, self.cold_disk, True))
        breakdowns = self._where(
            lambda run: (
                run.workload.gpu_batch_size == self.batch and run.debug_mode == "breakdown" and not run.compress_weight
            )
        )
        numbers = {(100, 0): "(1)", (0, 0): "(5)"}
        for run in breakdowns:
            label = numbers.get((run.split.weights_gpu, run.split.weights_cpu), _short(run.split))
            rows.append(self._row(run, label, f"{run.split.in_words}, breakdown"))
        return tuple(rows)

    def why_not(self, run: Run) -> str:
        """Why no question shows this run."""
        ours = self.shown[0]
        if differences := _differences(run, ours):
            return f"{differences}, unlike the runs shown"
        if run.debug_mode == "fewer_batch":
            return "projected by --debug-mode fewer_batch"
        if not _on_gpu(run.split):
            return "KV cache or activations not on the GPU"
        used = self.chosen.get(_key(run))
        if used is not None and used is not run and run.page_cache == used.page_cache:
            return "measured again later" if run.status == "done" else "failed; another attempt is used"
        if (run.page_cache == "cold") != self.main_is_cold:
            return (
                "page cache " + ("dropped" if run.page_cache == "cold" else "not dropped") + ", unlike the runs shown"
            )
        return f"batch {run.workload.gpu_batch_size} instead of {self.batch}"


def _short(split: OffloadSplit) -> str:
    return f"{split.weights_gpu}/{split.weights_cpu}/{split.weights_disk}"


def _on_gpu(split: OffloadSplit) -> bool:
    """Whether KV cache and activations stay on the GPU, as in the homework."""
    return split.percent[2:] == _DISK_SPLIT.percent[2:]


def _last_done(runs: Iterable[Run]) -> list[Run]:
    """The last done run of each settings, else the last failed one."""
    chosen: dict[_Key, Run] = {}
    for run in runs:
        if run.status == "done" or chosen.get(_key(run), run).status == "failed":
            chosen[_key(run)] = run
    return list(chosen.values())


def _campaigns(runs: Iterable[Run]) -> list[list[Run]]:
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault((*_same_work(run), run.other_options), []).append(run)
    return list(groups.values())


def _same_work(run: Run) -> tuple:
    work = run.workload
    predicted = run.kind == "predicted"
    return run.source, predicted, run.model, run.model_shape, work.prompt_len, work.gen_len, work.num_gpu_batches


def _differences(other: Run, run: Run) -> str:
    """The differences that keep another run out of this run's campaign."""
    work, shape = other.workload, other.model_shape
    layers = f"{other.model} with {shape.num_layers} layers of width {shape.hidden_size}" if shape else other.model
    differ = (
        (other.model, run.model, other.model),
        (shape, run.model_shape, layers),
        (other.source, run.source, f"on {other.source}"),
        (other.kind == "predicted", run.kind == "predicted", other.kind),
        (work.prompt_len, run.workload.prompt_len, f"prompt {work.prompt_len}"),
        (work.gen_len, run.workload.gen_len, f"{work.gen_len} tokens generated"),
        (work.num_gpu_batches, run.workload.num_gpu_batches, f"{work.num_gpu_batches} GPU batches"),
        (other.other_options, run.other_options, other.other_options or "default options"),
    )
    return ", ".join(dict.fromkeys(words for theirs, ours, words in differ if theirs != ours))


def _named(why: str, runs: Sequence[Run]) -> str:
    called = [run.run_id if run.named_by_person else run.in_words for run in runs]
    more = f" and {len(called) - _NAMED} more" if len(called) > _NAMED else ""
    return f"Left out: {'; '.join(called[:_NAMED])}{more} ({why})."


# ---- runs with a section of their own -------------------------------------------------------------------------------


def _extra(run: Run | RunSettings) -> Row | None:
    """The homework's extra that has these settings, page cache and reader included."""
    for row in (row for rows in EXTRAS.values() for row in rows):
        if (_key(row), row.page_cache, f"--disk-reader {row.disk_reader}") == (
            _key(run),
            run.page_cache,
            run.other_options,
        ):
            return row
    return None


def _extras(first: Run, runs: Iterable[Run]) -> dict[str, Run]:
    """The extras that may be compared with a campaign, by row id."""
    if first.other_options:
        return {}
    comparable = [run for run in runs if _extra(run) and _same_work(run) == _same_work(first)]
    return {row.id: run for run in _last_done(comparable) if (row := _extra(run))}
