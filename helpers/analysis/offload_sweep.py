"""Question 1: what each step of the offload sweep costs, which link it adds, and what bounds the run after it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from helpers.analysis.disk_reads import reads_of
from helpers.analysis.link_rates import LinkRates, link_rates
from helpers.analysis.matching import QuestionRow, Rows, homework_rows
from helpers.analysis.values import (
    Answer,
    Interval,
    Part,
    Value,
    capital,
    listed,
    orders,
    plain,
    rate,
    seconds,
    size,
    times,
    visible_part,
)
from helpers.runs import Run

Link = Literal["PCIe", "Disk"]
PARTS = {"compute": "computing", "PCIe": "PCIe", "Disk": "the disk tier"}
ADDS = {"PCIe": " (adds PCIe)", "Disk": " (adds disk reads)", None: ""}
FRONT, BACK = ("q1-1", "q1-2", "q1-3"), ("q1-3", "q1-4", "q1-5")  # each: a PCIe step, then a disk step


STEPS = (*itertools.pairwise(FRONT), *itertools.pairwise(BACK))


@dataclass(frozen=True)
class Step:
    """The boundary between two splits. Times are seconds of a pass."""

    before: QuestionRow
    after: QuestionRow
    link: Link | None  # the link that gets more bytes to move; None: FlexGen places both splits alike
    bytes_added: int
    ratio: Value  # throughput before / after
    base_s: float  # the pass before
    seconds_added: float
    link_s: Interval | None  # what the added bytes take at the link's rate
    may_be_longest_after: tuple[str, ...]
    cached: tuple[str, ...]  # which of the two rows page cache served better than the all-disk row
    ratio_at_one_disk_rate: float | None  # had it not; None where it served neither

    @property
    def longest_after(self) -> str | None:
        return self.may_be_longest_after[0] if len(self.may_be_longest_after) == 1 else None

    @property
    def name(self) -> str:
        return f"{self.before.label}→{self.after.label}"

    @property
    def slows(self) -> bool:
        return self.ratio.exceeds(Value.of(1.0))


@dataclass(frozen=True, kw_only=True)
class OffloadSweep(Answer):
    """The steps between neighbouring rows (and the homework's own), and the rates and parts behind the answer."""

    question: ClassVar[str] = "q1"
    steps: tuple[Step, ...]
    rates: LinkRates

    @property
    def parts(self) -> tuple[Part, ...]:
        others = [step for step in self.steps if (step.before.id, step.after.id) not in STEPS]
        return _within_class(self), _within_pair(self), *([_other_steps(others)] if others else [])

    def step(self, before: str, after: str) -> Step | None:
        """The boundary between two of the homework's rows, by their ids."""
        return next((step for step in self.steps if (step.before.id, step.after.id) == (before, after)), None)

    def pairs(self, position: int) -> tuple[Step, Step] | None:
        """The front and the back step of a class (0: PCIe, 1: disk), where both have figures."""
        front, back = self.step(*FRONT[position : position + 2]), self.step(*BACK[position : position + 2])
        return (front, back) if front and back else None


def analyze(runs: Iterable[Run]) -> OffloadSweep:
    """The answer to question 1 from whichever splits have figures."""
    rows = homework_rows(runs)
    rates = link_rates(rows.question("q1"))
    shown = [row for row in rows.question("q1") if row.id in rates.parts]
    steps = tuple(_step(before, after, rates, rows) for before, after in _boundaries(shown))
    return OffloadSweep(rows=rows, steps=steps, rates=rates)


def _boundaries(shown: list[QuestionRow]) -> list[tuple[QuestionRow, QuestionRow]]:
    """Neighbours, and the homework's own boundaries where another split lies between."""
    homework = [row for row in shown if row.in_homework]
    own = [(a, b) for a, b in itertools.pairwise(homework) if int(b.id[-1]) - int(a.id[-1]) == 1]
    pairs = list(itertools.pairwise(shown))
    pairs += [pair for pair in own if pair not in pairs]
    return sorted(pairs, key=lambda pair: (shown.index(pair[0]), shown.index(pair[1])))


def _step(before: QuestionRow, after: QuestionRow, rates: LinkRates, rows: Rows) -> Step:
    a, b = before.run.placement, after.run.placement
    copied = b.host_to_device_bytes_per_pass - a.host_to_device_bytes_per_pass
    read = b.disk_bytes_per_pass - a.disk_bytes_per_pass
    # Bytes new on disk always cross PCIe too; a step belongs to PCIe if the disk gets no more.
    link: Link | None = "Disk" if read > 0 else "PCIe" if copied > 0 else None
    added = {"Disk": read, "PCIe": copied}[link] if link else 0
    first, last = rates.parts[before.id], rates.parts[after.id]
    link_rate = last.disk_rate if link == "Disk" else rates.pcie
    cached = tuple(row.label for row in (before, after) if _helped_by_page_cache(row, rates, rows))
    at_one_rate = _at_disk_rate(after, rates, rows) / _at_disk_rate(before, rates, rows) if cached else None
    return Step(
        before,
        after,
        link,
        added,
        last.whole.over(first.whole),
        first.whole.value,
        last.whole.value - first.whole.value,
        link_rate.under(added) if link and link_rate else None,
        last.may_be_longest,
        cached,
        at_one_rate,
    )


def _at_disk_rate(row: QuestionRow, rates: LinkRates, rows: Rows) -> float:
    """Seconds of a pass if page cache had served the row no better than the all-disk row."""
    own = rates.parts[row.id].whole.value
    if rates.disk_row is None or not _helped_by_page_cache(row, rates, rows):
        return own
    slow = rates.parts[rates.disk_row.id].whole.value
    share = row.run.placement.disk_bytes_per_pass / rates.disk_row.run.placement.disk_bytes_per_pass
    return max(own, slow * share)


def _helped_by_page_cache(row: QuestionRow, rates: LinkRates, rows: Rows) -> bool:
    """Whether the row read faster than the all-disk row because page cache served more of it."""
    own, reads = rates.parts[row.id].disk_rate, reads_of(row, rows)
    slow = reads_of(rates.disk_row, rows) if rates.disk_row else None
    if not (own and rates.disk and reads and slow and own.low > rates.disk.high) or reads.paced:
        return False
    if reads.share_from_disk is not None and slow.share_from_disk is not None:
        return reads.share_from_disk < slow.share_from_disk - 0.05
    return reads.partly_cached


# ---- (a) within a class ---------------------------------------------------------------------------------------------


def _within_class(sweep: OffloadSweep) -> Part:
    classes = {name: pair for i, name in enumerate(("PCIe", "disk")) if (pair := sweep.pairs(i))}
    if not classes:
        return Part("(a)", "Can't tell: neither class has both of its ratios.")
    verdict = _class_verdict(classes)
    verdict += "".join(f" Can't tell for {name}: a ratio is missing." for name in {"PCIe", "disk"} - set(classes))
    base, *others = _class_reasons(sweep, list(classes.values())) or [""]
    cached = _page_cache_shares(sweep, [step for pair in classes.values() for step in pair])
    return visible_part("(a)", verdict, (base, *cached, *others), _derivation(sweep))


def _larger(front: Step, back: Step) -> str:
    """Which of two ratios is larger: "front", "back" or "" where they are close."""
    if front.ratio.is_close_to(back.ratio):
        return ""
    return "front" if front.ratio.value > back.ratio.value else "back"


def _class_verdict(classes: dict[str, tuple[Step, Step]]) -> str:
    figures = {name: f"{_times(front.ratio)} vs {_times(back.ratio)}" for name, (front, back) in classes.items()}
    larger = {name: _larger(*pair) for name, pair in classes.items()}
    if len(classes) == 2 and len(set(larger.values())) == 1:
        both = ", ".join(f"{name} {words}" for name, words in figures.items())
        if not larger["PCIe"]:
            return f"Yes, both pairs of ratios are close: {both}."
        return f"No. The {larger['PCIe']} ratio is larger in both classes: {both}."
    return " ".join(
        f"No for {name}: the {position} ratio is larger ({figures[name]})."
        if position
        else f"Yes for {name} ({figures[name]})."
        for name, position in larger.items()
    )


def _class_reasons(sweep: OffloadSweep, pairs: list[tuple[Step, Step]]) -> list[str]:
    """Why the ratios differ: how long the passes are that the steps start from, and how much the steps add."""
    apart = [pair for pair in pairs if _larger(*pair)]
    if not apart:
        everywhere = {parts.longest for parts in sweep.rates.parts.values()}
        longest = next(iter(everywhere)) if len(everywhere) == 1 else None
        return [f"The longest part of every pass is {PARTS[longest]}."] if longest else []
    still = [step.name for pair in apart for step in pair if not step.slows]
    idle = [f"{listed(still)} {'adds' if len(still) == 1 else 'add'} no measurable time."] if still else []
    slowing = [(front, back) for front, back in apart if front.slows]
    if slowing and all(_larger(*pair) == "front" and pair[0].base_s < pair[1].base_s for pair in slowing):
        dominated = all(sweep.rates.parts[back.before.id].longest == "Disk" for _, back in slowing)
        which = " that the disk tier already dominates" if dominated else ""
        words = (
            f"The back pair starts from {_bases([back for _, back in slowing])}{which}, "
            f"the front pair from {_bases([front for front, _ in slowing], 'only ')}."
        )
        more = [
            f"{front.name} also adds more ({seconds(front.seconds_added, 2)} vs {seconds(back.seconds_added, 2)})."
            for front, back in slowing
            if back.slows and front.seconds_added > 1.25 * back.seconds_added
        ]
        return [words, *idle, *more]
    costs = [
        f"{step.name} adds {seconds(step.seconds_added, 2)} to a pass of {seconds(step.base_s, 2)}."
        for pair in apart
        for step in pair
        if step.slows
    ]
    return [*costs, *idle]


def _bases(steps: list[Step], only: str = "") -> str:
    times_ = listed(seconds(step.base_s, 2) for step in steps)
    return f"passes of {only}{times_}" if len(steps) > 1 else f"a pass of {only}{times_}"


def _page_cache_shares(sweep: OffloadSweep, steps: list[Step]) -> list[str]:
    """How much of each ratio comes from page cache that served a row better than the all-disk row, largest first;
    a PCIe step's before a disk step's that is much alike."""
    found = []
    for step in steps:
        corrected = step.ratio_at_one_disk_rate
        if corrected and sweep.rates.disk_row and not Value.of(corrected).is_close_to(step.ratio):
            change = abs(math.log2(corrected / step.ratio.value))
            at = f"At {sweep.rates.disk_row.label}'s disk rate {step.name} is {plain(corrected, 4)}"
            found.append((-round(change), step.link == "Disk", f"{at}: page cache helped {listed(step.cached)}."))
    return [words for *_, words in sorted(found)]


# ---- (b) within a pair ----------------------------------------------------------------------------------------------


def _within_pair(sweep: OffloadSweep) -> Part:
    found: dict[str, tuple[str, str]] = {}  # pair: the larger link, "" for neither; figures
    shorter_base = False
    for name, ids in (("front", FRONT), ("back", BACK)):
        pcie, disk = sweep.step(ids[0], ids[1]), sweep.step(ids[1], ids[2])
        if pcie and disk:
            apart = pcie.ratio.differs_from(disk.ratio)
            larger = "" if not apart else "PCIe" if pcie.ratio.value > disk.ratio.value else "disk"
            shorter_base |= larger == "PCIe" and pcie.base_s < disk.base_s
            ordered = (pcie, disk) if larger == "PCIe" else (disk, pcie)
            found[name] = larger, " vs ".join(_times(step.ratio) for step in ordered)
    winners = {larger for larger, _ in found.values()}
    if not found:
        verdict = "Can't tell: neither pair has both of its ratios."
    elif len(found) == 2 and len(winners) == 1:
        figures, winner = " and ".join(words for _, words in found.values()), next(iter(winners))
        verdict = f"Neither: the ratios differ by less than the figures spread ({figures})."
        if winner:
            verdict = f"{capital(winner)}, in both pairs: {figures}."
    else:
        sentences = [f"{name.capitalize()} pair: {larger or 'neither'} ({f})." for name, (larger, f) in found.items()]
        sentences += [f"{n.capitalize()} pair: can't tell." for n in ("front", "back") if n not in found]
        verdict = " ".join(sentences)
    why = "A PCIe ratio can still be larger, because its step starts from a shorter pass."
    faster = sweep.rates.faster_link == "PCIe"
    return visible_part("(b)", verdict, (_rates_in_words(sweep), why if shorter_base and faster else ""))


def _rates_in_words(sweep: OffloadSweep) -> str:
    rates = sweep.rates
    if rates.pcie is None or rates.disk is None or rates.disk_row is None or rates.pcie_over_disk is None:
        return ""
    words = f"PCIe sustains {rates.pcie.words(_rate)} here and {_tier(sweep)} {rates.disk.words(_rate)}"
    factor = rates.pcie_over_disk
    if rates.faster_link is None:
        return f"{words}, which doesn't decide which link is slower."
    words += f", {factor.words(lambda value: plain(value, 2))} times less"
    if factor.low >= 10:
        words += f": {orders(factor.low, factor.high)}"
    elif factor.high < 10:
        words += ": less than an order of magnitude"
    return f"{words}."


def _tier(sweep: OffloadSweep) -> str:
    """The disk, or the disk tier where page cache served part of it."""
    reads = reads_of(sweep.rates.disk_row, sweep.rows) if sweep.rates.disk_row else None
    if reads is None or reads.paced or not reads.partly_cached:
        return "the disk"
    share = reads.share_from_disk
    if share is None or reads.verdict.startswith("warm"):
        return f"the disk tier ({'partly ' if share is None else ''}page cache)"
    return f"the disk tier ({plain(100 * share, 2)} % from the disk itself)"


# ---- details --------------------------------------------------------------------------------------------------------


def _derivation(sweep: OffloadSweep) -> str:
    rates, lines = sweep.rates, []
    if rates.pcie:
        tier = (
            f", disk tier {rates.disk.words(_rate)} in {rates.disk_row.label}" if rates.disk and rates.disk_row else ""
        )
        lines.append(
            "Each row bounds each link: bytes / pass time from below, bytes / (pass time - other parts) from above. "
            f"Together: PCIe {rates.pcie.words(_rate)}{tier}. Computing, kernel launches included, takes "
            f"{rates.compute.words(_seconds)} of each pass.\n"
        )
    return "\n".join((*lines, *(f"- {_bound(step)}" for step in sweep.steps)))


def _bound(step: Step) -> str:
    where = f"{step.name}, ratio {times(step.ratio)}: "
    if step.link is None:
        return where + "FlexGen places the weights alike for both, so the step moves nothing."
    more = f"{size(step.bytes_added)} more per pass over {'PCIe' if step.link == 'PCIe' else 'the disk'}"
    if not step.slows:
        change = "not slower" if not Value.of(1.0).exceeds(step.ratio) else "faster"
        return where + f"{more}, and the run is {change}."
    words = where + f"{more}; a pass takes {_seconds(step.seconds_added)} longer"
    if step.link_s is not None:
        words += f", and those bytes take {step.link_s.words(_seconds)}"
        if step.link_s.high < 0.5 * step.seconds_added:
            words += ", so most of the step isn't that link"
    return words + f". Longest part of a pass then: {' or '.join(PARTS[name] for name in step.may_be_longest_after)}."


def _other_steps(steps: list[Step]) -> Part:
    sentences = [f"{step.name} {_times(step.ratio)}{ADDS[step.link] if step.slows else ''}" for step in steps]
    return Part("Other steps:", f"{listed(sentences)}.")


def _times(value: Value) -> str:
    return times(value.value)


def _rate(bytes_per_s: float) -> str:
    return rate(bytes_per_s, 2)


def _seconds(value: float) -> str:
    return seconds(value, 2)
