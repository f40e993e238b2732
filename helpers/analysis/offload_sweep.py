"""Question 1: what each step of the offload sweep costs, which link it adds, and what bounds the run after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from helpers.analysis.disk_reads import DiskReads, reads_of
from helpers.analysis.link_rates import LinkRates, PassParts, link_rates
from helpers.analysis.matching import QuestionRow, Rows, homework_rows
from helpers.analysis.values import (
    Answer,
    Interval,
    Part,
    Value,
    gaps,
    listed,
    orders,
    pass_time,
    plain,
    rate,
    seconds,
    size,
    throughput,
    times,
    visible_part,
)
from helpers.runs import Run

Link = Literal["PCIe", "Disk"]
PARTS = {"compute": "computing", "PCIe": "PCIe", "Disk": "the disk tier"}
ADDS = {"PCIe": " (adds PCIe)", "Disk": " (adds disk reads)", None: ""}
FRONT, BACK = ("q1-1", "q1-2", "q1-3"), ("q1-3", "q1-4", "q1-5")  # each: a PCIe step, then a disk step


STEPS = (*itertools.pairwise(FRONT), *itertools.pairwise(BACK))


def number(row: QuestionRow | str) -> str:
    """(1) for q1-1, as the homework writes it."""
    return row.label if isinstance(row, QuestionRow) else f"({row[-1]})"


@dataclass(frozen=True)
class Terms:
    """The most seconds of a pass that each part takes."""

    compute: float
    host_to_device: float
    disk: float

    @property
    def by_name(self) -> dict[str, float]:
        return {"compute": self.compute, "PCIe": self.host_to_device, "Disk": self.disk}


@dataclass(frozen=True)
class Step:
    """The boundary between two splits. Times are seconds of a pass."""

    before: QuestionRow
    after: QuestionRow
    link: Link | None  # the link that gets more bytes to move; None: FlexGen places both splits alike
    bytes_added: int
    ratio: Value  # throughput before / after
    seconds_added: float
    link_interval_s: Interval | None  # what the added bytes take at the link's rate
    may_be_longest_after: tuple[str, ...]
    ratio_at_one_disk_rate: float | None  # were both rows' reads as slow as the all-disk row's; None: they are

    @property
    def link_seconds(self) -> float | None:
        """The most that the added bytes take."""
        return self.link_interval_s.high if self.link_interval_s else None

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

    steps: tuple[Step, ...]
    rates: LinkRates

    @property
    def terms(self) -> dict[str, Terms]:
        return {i: Terms(p.compute.high, p.pcie.high, p.disk.high) for i, p in self.rates.parts.items()}

    @property
    def parts_of_pass(self) -> dict[str, PassParts]:
        """By row id."""
        return self.rates.parts

    def step(self, before: str, after: str) -> Step | None:
        """The boundary between two of the homework's rows, by their ids."""
        return next((step for step in self.steps if (step.before.id, step.after.id) == (before, after)), None)


def analyze(runs: Iterable[Run]) -> OffloadSweep:
    """The answer to question 1 from whichever splits have figures."""
    rows = homework_rows(runs)
    shown = [row for row in rows.question("q1") if row.done and throughput(row.run)]
    rates = link_rates(shown)
    steps = tuple(_step(before, after, rates, rows) for before, after in _boundaries(shown))
    answer = OffloadSweep(question="q1", parts=(), gaps=gaps(rows, "q1"), steps=steps, rates=rates)
    parts = [_within_class(answer, rows), _within_pair(answer, rows)]
    homework = {*itertools.pairwise(FRONT), *itertools.pairwise(BACK)}
    if others := [step for step in steps if (step.before.id, step.after.id) not in homework]:
        parts.append(_other_steps(others))
    return OffloadSweep(question="q1", parts=tuple(parts), gaps=answer.gaps, steps=steps, rates=rates)


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
    parts = rates.parts[after.id]
    link_rate = parts.disk_rate if link == "Disk" else rates.pcie
    speed_before, speed_after = throughput(before.run), throughput(after.run)
    time_before, time_after = pass_time(before.run), pass_time(after.run)
    assert speed_before and speed_after and time_before and time_after  # `shown` holds no other rows
    return Step(
        before,
        after,
        link,
        added,
        speed_before.over(speed_after),
        time_after.value - time_before.value,
        link_rate.under(added) if link and link_rate else None,
        parts.may_be_longest,
        _at_one_disk_rate(before, after, rates, rows),
    )


def _at_one_disk_rate(before: QuestionRow, after: QuestionRow, rates: LinkRates, rows: Rows) -> float | None:
    """The step's ratio if page cache had served neither row better than the all-disk row."""
    if rates.disk_row is None:
        return None
    slow = pass_time(rates.disk_row.run)
    assert slow
    bytes_per_s = rates.disk_row.run.placement.disk_bytes_per_pass / slow.value
    corrected, cached = [], False
    for row in (before, after):
        time = pass_time(row.run)
        assert time
        if _helped_by_page_cache(row, rates, rows):
            cached = True
            corrected.append(max(time.value, row.run.placement.disk_bytes_per_pass / bytes_per_s))
        else:
            corrected.append(time.value)
    return corrected[1] / corrected[0] if cached else None


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


def _within_class(sweep: OffloadSweep, rows: Rows) -> Part:
    classes: list[tuple[str, Step, Step]] = []
    missing = []
    for name, position in (("PCIe", 0), ("disk", 1)):
        front, back = sweep.step(*FRONT[position : position + 2]), sweep.step(*BACK[position : position + 2])
        if front and back:
            classes.append((name, front, back))
        else:
            missing.append(name)
    if not classes:
        return Part("(a)", "Can't tell: neither class has both of its ratios.")
    verdict = _class_verdict(classes)
    if missing:
        verdict += f" {missing[0]}: can't tell, a ratio is missing."
    cached = _page_cache_share(sweep, [step for _, *steps in classes for step in steps])
    first, *others = _class_reasons(sweep, classes) or [""]
    return visible_part("(a)", verdict, (first, cached, *others), _derivation(sweep, rows))


def _larger(front: Step, back: Step) -> str:
    """Which of two ratios is larger: "front", "back" or "" where they are close."""
    if front.ratio.is_close_to(back.ratio):
        return ""
    return "front" if front.ratio.value > back.ratio.value else "back"


def _class_verdict(classes: list[tuple[str, Step, Step]]) -> str:
    figures = {name: f"{_times(front.ratio)} vs {_times(back.ratio)}" for name, front, back in classes}
    larger = {name: _larger(front, back) for name, front, back in classes}
    both = ", ".join(f"{name} {words}" for name, words in figures.items())
    if len(classes) == 2 and len(set(larger.values())) == 1:
        position = larger["PCIe"]
        if not position:
            return f"Yes, both pairs of ratios are close: {both}."
        return f"No. The {position} ratio is larger in both classes: {both}."
    sentences = []
    for name, position in larger.items():
        answer = f"No for {name}: the {position} ratio is larger" if position else f"Yes for {name}"
        sentences.append(f"{answer} ({figures[name]}).")
    return " ".join(sentences)


def _class_reasons(sweep: OffloadSweep, classes: list[tuple[str, Step, Step]]) -> list[str]:
    """Why the ratios differ: how long the passes are that the steps start from, and how much the steps add."""
    apart = [(front, back) for _, front, back in classes if _larger(front, back)]
    fronts, backs = [front for front, _ in apart], [back for _, back in apart]
    still = [step.name for step in (*fronts, *backs) if not step.slows]
    idle = [f"{listed(still)} {'adds' if len(still) == 1 else 'add'} no measurable time."] if still else []
    shorter_front = all(_base(front) < _base(back) for front, back in apart)
    if apart and shorter_front and {_larger(*pair) for pair in apart} == {"front"}:
        dominated = all(sweep.rates.parts[back.before.id].longest == "Disk" for back in backs)
        which = " that the disk tier already dominates" if dominated else ""
        words = f"The back pair starts from {_bases(backs)}{which}, the front pair from only {_bases(fronts)}."
        more = [
            f"{front.name} also adds more ({seconds(front.seconds_added, 2)} vs {seconds(back.seconds_added, 2)})."
            for front, back in apart
            if back.slows and front.seconds_added > 1.25 * back.seconds_added
        ]
        return [words, *idle, *more]
    return [*idle, *(f"{step.name} {_adds(step)}." for pair in apart for step in pair)]


def _base(step: Step) -> float:
    time = pass_time(step.before.run)
    assert time
    return time.value


def _bases(steps: list[Step]) -> str:
    times_ = [seconds(_base(step), 2) for step in steps]
    return f"passes of {listed(times_)}" if len(times_) > 1 else f"a pass of {times_[0]}"


def _adds(step: Step) -> str:
    if step.seconds_added < 0:
        return f"takes {seconds(-step.seconds_added, 2)} off a pass of {seconds(_base(step), 2)}"
    return f"adds {seconds(step.seconds_added, 2)} to a pass of {seconds(_base(step), 2)}"


def _page_cache_share(sweep: OffloadSweep, steps: list[Step]) -> str:
    """How much of a ratio comes from page cache that served one row better than the all-disk row."""
    for step in sorted(steps, key=lambda step: step.link == "Disk"):
        corrected = step.ratio_at_one_disk_rate
        if corrected is not None and sweep.rates.disk_row and not Value.of(corrected).is_close_to(step.ratio):
            helped = step.after if corrected > step.ratio.value else step.before
            at = f"At {sweep.rates.disk_row.label}'s disk rate {step.name} is {plain(corrected, 4)}"
            return f"{at}: page cache served part of {helped.label}."
    return ""


# ---- (b) within a pair ----------------------------------------------------------------------------------------------


def _within_pair(sweep: OffloadSweep, rows: Rows) -> Part:
    found: dict[str, tuple[str, str]] = {}  # pair: the larger link, "" for neither; figures
    for name, ids in (("front", FRONT), ("back", BACK)):
        pcie, disk = sweep.step(ids[0], ids[1]), sweep.step(ids[1], ids[2])
        if pcie and disk:
            larger = "" if not pcie.ratio.differs_from(disk.ratio) else "disk"
            larger = "PCIe" if larger and pcie.ratio.value > disk.ratio.value else larger
            ordered = (pcie, disk) if larger == "PCIe" else (disk, pcie)
            found[name] = larger, " vs ".join(_times(step.ratio) for step in ordered)
    if not found:
        return Part("(b)", "Can't tell: neither pair has both of its ratios.", _rates_in_words(sweep, set(), rows))
    winners = {larger for larger, _ in found.values()}
    if len(found) == 2 and len(winners) == 1:
        figures = " and ".join(words for _, words in found.values())
        winner = next(iter(winners))
        verdict = (
            f"{winner[:1].upper()}{winner[1:]}, in both pairs: {figures}."
            if winner
            else f"Neither: the ratios differ by less than the figures spread ({figures})."
        )
    else:
        sentences = [f"{name.capitalize()} pair: {larger or 'neither'} ({f})." for name, (larger, f) in found.items()]
        sentences += [f"{n.capitalize()} pair: can't tell." for n in ("front", "back") if n not in found]
        verdict = " ".join(sentences)
    return Part("(b)", verdict, _rates_in_words(sweep, winners, rows))


def _rates_in_words(sweep: OffloadSweep, winners: set[str], rows: Rows) -> str:
    rates = sweep.rates
    if rates.pcie is None or rates.disk is None or rates.disk_row is None or rates.pcie_over_disk is None:
        return "" if rates.pcie or rates.disk else "No row shows a link's rate."
    reads = reads_of(rates.disk_row, rows)
    tier = "the disk" + (f" tier ({_page_cache(reads)})" if reads and reads.partly_cached and not reads.paced else "")
    words = f"PCIe sustains {rates.pcie.words(_rate)} here and {tier} {rates.disk.words(_rate)}"
    factor = rates.pcie_over_disk
    if rates.faster_link is None:
        return f"{words}: too close to say which link is slower."
    low, high = factor.low, factor.high
    words += f", {factor.words(lambda value: plain(value, 2))} times less"
    if low >= 10:
        words += f": {orders(low, high)}"
    elif high < 10:
        words += ": less than an order of magnitude"
    words += "."
    if "PCIe" in winners:
        words += " A PCIe ratio can still be larger, because its step starts from a shorter pass."
    return words


def _page_cache(reads: DiskReads) -> str:
    share = reads.share_from_disk
    if share is None:
        return "partly page cache"
    return "page cache" if share == 0 else f"{plain(100 * share, 2)} % from the disk itself"


# ---- details --------------------------------------------------------------------------------------------------------


def _derivation(sweep: OffloadSweep, rows: Rows) -> str:
    rates, lines = sweep.rates, []
    if rates.pcie:
        tier = (
            f", disk tier {rates.disk.words(_rate)} in {rates.disk_row.label}" if rates.disk and rates.disk_row else ""
        )
        lines.append(
            "Each row bounds each link: bytes / pass time from below, bytes / (pass time - other parts) from above. "
            f"Together: PCIe {rates.pcie.words(_rate)}{tier}. Computing, kernel launches included, takes "
            f"{rates.compute.words(lambda value: seconds(value, 2))} of each pass.\n"
        )
    lines += [f"- {_bound(step)}" for step in sweep.steps]
    for row in rows.question("q1"):
        own = rates.parts[row.id].disk_rate if row.id in rates.parts else None
        if own and rates.disk and rates.disk_row and own.low > rates.disk.high:
            cause = ": page cache served part of its reads." if _helped_by_page_cache(row, rates, rows) else "."
            lines.append(f"- {row.label} read at {own.words(_rate)}, faster than {rates.disk_row.label}{cause}")
    return "\n".join(lines)


def _bound(step: Step) -> str:
    where = f"{step.name}, ratio {times(step.ratio)}: "
    if step.link is None:
        return where + "FlexGen places the weights alike for both, so the step moves nothing."
    more = f"{size(step.bytes_added)} more per pass over {'PCIe' if step.link == 'PCIe' else 'the disk'}"
    if not step.slows:
        change = "not slower" if not Value.of(1.0).exceeds(step.ratio) else "faster"
        return where + f"{more}, and the run is {change}."
    words = where + f"{more}; a pass takes {seconds(step.seconds_added, 2)} longer"
    if step.link_interval_s is not None:
        words += f", and those bytes take {step.link_interval_s.words(lambda value: seconds(value, 2))}"
        if step.link_interval_s.high < 0.5 * step.seconds_added:
            words += ", so most of the step isn't that link"
    if step.longest_after:
        return words + f". Longest part of a pass then: {PARTS[step.longest_after]}."
    return words + f". Longest part of a pass then: {' or '.join(PARTS[n] for n in step.may_be_longest_after)}."


def _other_steps(steps: list[Step]) -> Part:
    sentences = [f"{step.name} {_times(step.ratio)}{ADDS[step.link]}" for step in steps]
    return Part("Other steps:", f"{listed(sentences)}.")


def _times(value: Value) -> str:
    return times(value.value)


def _rate(bytes_per_s: float) -> str:
    return rate(bytes_per_s, 2)
