"""Beyond question 4: what a reader that goes past the page cache buys, beside FlexGen's own, both cold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.disk_reads import DiskReads, reads_of
from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import (
    EMULATED,
    SAME_WITHIN,
    Answer,
    Part,
    Value,
    in_line,
    latency,
    listed,
    percent,
    plain,
    rate,
    ratio,
    throughput,
    times,
)
from helpers.homework import EXTRAS, QUESTIONS, Row
from helpers.machine.emulation import EMULATED_T4
from helpers.runs import Run

STOCK = next(row for row in QUESTIONS["q4"] if row.page_cache == "cold")
(DIRECT,) = EXTRAS["q4"]
NAMES = {STOCK.id: "FlexGen's own", DIRECT.id: "direct (O_DIRECT)"}
OF_THE_READER = "direct disk reader: "  # how the reader's own notes begin


@dataclass(frozen=True)
class ReaderRun:
    """The cold run of one reader, failed or not; `reads` is None where it has no figures."""

    row: Row
    point: Run
    reads: DiskReads | None

    @property
    def name(self) -> str:
        return NAMES[self.row.id]

    @property
    def throughput(self) -> Value | None:
        return throughput(self.point) if self.point.status == "done" else None

    @property
    def disk_bytes_per_s(self) -> float | None:
        """What the disk gave, over the time of the generation."""
        time = latency(self.point)
        if self.reads is None or self.reads.bytes_given is None or time is None:
            return None
        return self.reads.bytes_given / time.value

    @property
    def own_notes(self) -> tuple[str, ...]:
        """What the direct reader could not do as asked."""
        return tuple(note for note in self.point.notes if note.startswith(OF_THE_READER))


@dataclass(frozen=True, kw_only=True)
class DiskReaders(Answer):
    """The runs behind the answer, by row id: none, one or both."""

    runs: dict[str, ReaderRun]

    @property
    def ratio(self) -> Value | None:
        """The direct reader's throughput over that of FlexGen's own."""
        return ratio(*(self.runs[row.id].throughput if row.id in self.runs else None for row in (DIRECT, STOCK)))


def analyze(points: Iterable[Run]) -> DiskReaders:
    """FlexGen's reader and the direct one, from the cold runs with all weights on disk."""
    rows = homework_rows(points)
    found = {row.id: _run(row, rows) for row in (STOCK, DIRECT) if row.id in rows.by_id | rows.extras}
    answer = DiskReaders(question="q4", parts=(), runs=found)
    part = Part("The direct reader beside FlexGen's own, page cache dropped", "", _in_words(answer))
    return DiskReaders(question="q4", parts=(part,), runs=found)


def _run(row: Row, rows: Rows) -> ReaderRun:
    point = (rows.by_id | rows.extras)[row.id]
    return ReaderRun(row, point, reads_of(f"{NAMES[row.id]} reader", point, rows))


def _in_words(answer: DiskReaders) -> str:
    direct, stock = answer.runs.get(DIRECT.id), answer.runs.get(STOCK.id)
    if direct is None:
        return (
            "No run with the direct reader and the page cache dropped is in these figures: what it buys here is not "
            "known."
        )
    notes = "".join(f" The run's note: {in_line(note.removeprefix(OF_THE_READER))}." for note in direct.own_notes)
    if direct.throughput is None:
        return f"The run with the direct reader has no figures{_why(direct)}: what it buys here is not known.{notes}"
    if stock is None or stock.throughput is None:
        why = " is not there" if stock is None else f" has no figures{_why(stock)}"
        return f"The same run with FlexGen's own reader{why}: there is nothing to compare the direct one with.{notes}"
    return (
        " ".join(
            filter(None, (_compared(answer, direct, stock), _disk_rates(direct, stock), _not_alike(direct, stock)))
        )
        + notes
    )


def _why(run: ReaderRun) -> str:
    return f" ({in_line(run.point.reason)})" if run.point.reason else ""


def _compared(answer: DiskReaders, direct: ReaderRun, stock: ReaderRun) -> str:
    here, there = direct.throughput, stock.throughput
    figures = f"{plain(here.value)} against {plain(there.value)} token/s"
    if here.differs_from(there):
        word = "faster" if here.value > there.value else "slower"
        return f"The direct reader is {word} than FlexGen's own: {figures}, {times(answer.ratio, 'x')}."
    apart = here.low > there.high or there.low > here.high
    within = (
        "a difference within the range of the repeats"
        if not apart and (here.repeated or there.repeated)
        else f"at most {100 * SAME_WITHIN:g} % apart"
    )
    return f"The direct reader is no faster than FlexGen's own: {figures}, {within}."


def _disk_rates(direct: ReaderRun, stock: ReaderRun) -> str:
    here, there = direct.disk_bytes_per_s, stock.disk_bytes_per_s
    if here is None or there is None:
        return "What the disk gave is not known for both."
    return f"The disk gave {rate(here)} against {rate(there)}, over the time of the generation."


def _not_alike(direct: ReaderRun, stock: ReaderRun) -> str:
    """What besides the reader differs, or hides a difference."""
    if direct.point.kind == EMULATED or stock.point.kind == EMULATED:
        return (
            f"The emulation holds the disk tier to {rate(EMULATED_T4.disk_gb_s * 1e9)}, whichever reader reads: "
            "this says nothing of a disk."
        )
    cached = [
        f"{run.name} ({percent(run.reads.share_from_disk)} from the disk)"
        for run in (direct, stock)
        if run.reads and run.reads.share_from_disk is not None and run.reads.partly_cached
    ]
    if cached:
        return f"But page cache gave part of the reads of {listed(cached)}, so the two are not alike."
    return ""
