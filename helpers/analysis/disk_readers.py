"""Beyond question 4: FlexGen's disk reader against one that bypasses the page cache, both with the cache dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from helpers.analysis.disk_reads import DiskReads, reads_of
from helpers.analysis.matching import QuestionRow, homework_rows
from helpers.analysis.values import (
    EMULATED,
    Answer,
    Part,
    Value,
    disturbed,
    in_line,
    latency,
    percent,
    plain,
    rate,
    ratio,
    throughput,
    times,
)
from helpers.homework import EXTRAS, QUESTIONS
from helpers.runs import Run

STOCK = next(row for row in QUESTIONS["q4"] if row.page_cache == "cold")
(DIRECT,) = EXTRAS["q4"]
NAMES = {STOCK.id: "FlexGen's own", DIRECT.id: "direct (O_DIRECT)"}
READER_NOTE = "direct disk reader: "  # how the reader's own notes begin


@dataclass(frozen=True)
class ReaderRun:
    """The cold run of one reader, failed or not; `reads` is None without figures."""

    row: QuestionRow
    reads: DiskReads | None

    @property
    def run(self) -> Run:
        return self.row.run

    @property
    def name(self) -> str:
        return NAMES[self.row.id]

    @property
    def throughput(self) -> Value | None:
        return throughput(self.run) if self.run.status == "done" else None

    @property
    def disk_bytes_per_s(self) -> float | None:
        """What the disk delivered, averaged over the generation."""
        time = latency(self.run)
        if self.reads is None or self.reads.bytes_given is None or time is None:
            return None
        return self.reads.bytes_given / time.value

    @property
    def own_notes(self) -> tuple[str, ...]:
        """Requests that the direct reader couldn't meet."""
        return tuple(note for note in self.run.notes if note.startswith(READER_NOTE))


@dataclass(frozen=True, kw_only=True)
class DiskReaders(Answer):
    """The runs behind the answer, by row id: none, one or both."""

    question: ClassVar[str] = "q4"
    runs: dict[str, ReaderRun]

    @property
    def gaps(self) -> tuple[str, ...]:
        return tuple(disturbed((reader.row for reader in self.runs.values()), self.question))

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_compared(self),)

    @property
    def ratio(self) -> Value | None:
        """The direct reader's throughput over FlexGen's own."""
        return ratio(*(self.runs[row.id].throughput if row.id in self.runs else None for row in (DIRECT, STOCK)))


def analyze(runs: Iterable[Run]) -> DiskReaders:
    """FlexGen's reader and the direct one, from the cold runs with all weights on disk."""
    rows = homework_rows(runs)
    found = {}
    for row in (STOCK, DIRECT):
        run = rows.by_id.get(row.id) or rows.extras.get(row.id)
        if run is not None:
            shown = QuestionRow(row.id, NAMES[row.id], f"{NAMES[row.id]} reader", run, row is STOCK)
            found[row.id] = ReaderRun(shown, reads_of(shown, rows))
    return DiskReaders(rows=rows, runs=found)


def _compared(answer: DiskReaders) -> Part:
    for row in (DIRECT, STOCK):
        reader = answer.runs.get(row.id)
        if reader is None or reader.throughput is None:
            why = f" ({in_line(reader.run.reason)})" if reader and reader.run.reason else ""
            return Part("", f"Can't tell: no figures with the {NAMES[row.id]} reader, page cache dropped{why}.")
    direct, stock = answer.runs[DIRECT.id], answer.runs[STOCK.id]
    here, there, faster = direct.throughput, stock.throughput, answer.ratio
    assert here and there and faster
    figures = f"{plain(here.value)} vs {plain(there.value)} token/s"
    if here.differs_from(there):
        word = "faster" if here.value > there.value else "slower"
        verdict = f"The direct reader is {word} than FlexGen's own: {times(faster.value)}× ({figures})."
    else:
        verdict = f"The direct reader is as fast as FlexGen's own, within the spread of the figures ({figures})."
    notes = [f"Note: {in_line(note.removeprefix(READER_NOTE))}." for note in direct.own_notes]
    return Part("", verdict, " ".join([_disk_rates(direct, stock), *notes]))


def _disk_rates(direct: ReaderRun, stock: ReaderRun) -> str:
    if EMULATED in (direct.run.kind, stock.run.kind):
        return "The emulation paces the disk tier, whichever reader reads, so this says nothing about a disk."
    shares = [
        f"{percent(run.reads.share_from_disk)} for {run.name}"
        for run in (direct, stock)
        if run.reads and run.reads.share_from_disk is not None and run.reads.partly_cached
    ]
    if shares:
        return (
            f"But page cache served part of the reads (from the disk: {', '.join(shares)}), so the two don't compare."
        )
    here, there = direct.disk_bytes_per_s, stock.disk_bytes_per_s
    if here is None or there is None:
        return "Nothing counted what the disk delivered in both."
    return f"The disk delivered {rate(here)} vs {rate(there)}, averaged over the generation."
