"""Question 1: what each step of the offload sweep costs, which link it adds, and what bounds the run after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.disk_reads import DiskReads, of_point
from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import (
    FAR,
    Answer,
    Part,
    Value,
    capital,
    gaps,
    listed,
    nearest_power_of_ten,
    orders,
    pass_time,
    plain,
    rate,
    ratio,
    seconds,
    size,
    throughput,
    times,
)
from helpers.homework import QUESTIONS
from helpers.runs import Run

PARTS = {"compute": "computing", "PCIe": "PCIe", "Disk": "the disk tier"}
STEPS = (("q1-1", "q1-2"), ("q1-2", "q1-3"), ("q1-3", "q1-4"), ("q1-4", "q1-5"))


def number(row_id: str) -> str:
    """(1) for q1-1, as the homework writes it."""
    return f"({row_id[-1]})"


@dataclass(frozen=True)
class Rates:
    """Rates that the sweep itself shows, bytes/s, from its 50 % CPU and 100 % disk rows.

    FlexGen copies while it computes, so a row that takes T seconds a pass shows at least bytes / T; if
    nothing overlapped the rate would be bytes / (T - compute), the `_most` figure.
    """

    host_to_device: float | None = None
    host_to_device_most: float | None = None
    host_to_device_hidden: bool = False  # the copies added no time: the link may be faster than this
    disk: float | None = None
    disk_most: float | None = None
    disk_hidden: bool = False
    repeated: bool = False  # the rows had repeats, which spread

    @property
    def digits(self) -> int:
        """Significant digits to give: repeats spread too much for a third."""
        return 2 if self.repeated else 3


@dataclass(frozen=True)
class Terms:
    """Seconds of a pass that each part would take alone; None where it cannot be worked out.

    Those of a link are the most: were nothing overlapped where its rate is from, it would take the `_least`.
    """

    compute: float | None
    host_to_device: float | None
    disk: float | None
    host_to_device_least: float = 0.0
    disk_least: float = 0.0

    @property
    def by_name(self) -> dict[str, float | None]:
        return {"compute": self.compute, "PCIe": self.host_to_device, "Disk": self.disk}

    @property
    def may_be_longest(self) -> tuple[str, ...]:
        """The longest part, or the parts that are, by how much overlaps; none unless all are known."""
        most = self.by_name
        if None in most.values():
            return ()
        least = {"compute": self.compute, "PCIe": self.host_to_device_least, "Disk": self.disk_least}
        longest = max(most, key=lambda name: most[name])
        return (longest, *(name for name in most if name != longest and most[name] > least[longest]))

    @property
    def longest(self) -> str | None:
        """The longest part; None unless all are known, and it is the longest however much overlaps."""
        return self.may_be_longest[0] if len(self.may_be_longest) == 1 else None


@dataclass(frozen=True)
class Step:
    """The boundary between two settings of the sweep."""

    before: str
    after: str
    link: str | None  # the link that gets more bytes to move: PCIe or Disk
    bytes_added: int | None
    ratio: Value | None
    seconds_added: float | None  # a pass, measured
    link_seconds: float | None  # a pass: the added bytes at the link's rate
    may_be_longest_after: tuple[str, ...]

    @property
    def longest_after(self) -> str | None:
        return self.may_be_longest_after[0] if len(self.may_be_longest_after) == 1 else None

    @property
    def name(self) -> str:
        return f"{number(self.before)}→{number(self.after)}"

    @property
    def slows(self) -> bool:
        return self.ratio is not None and self.ratio.exceeds(Value.of(1.0))


@dataclass(frozen=True, kw_only=True)
class OffloadSweep(Answer):
    """The steps, the rates and the parts of a pass behind the answer to question 1."""

    steps: tuple[Step, ...]
    rates: Rates
    terms: dict[str, Terms]


def analyze(points: Iterable[Run]) -> OffloadSweep:
    """The answer to question 1 from whichever of its five rows are there."""
    rows = homework_rows(points)
    rates = _rates(rows)
    terms = {
        row.id: _terms(rows.done(row.id), rates, pass_time(rows.done("q1-1")))
        for row in QUESTIONS["q1"]
        if rows.done(row.id)
    }
    steps = tuple(_step(rows, before, after, rates, terms) for before, after in STEPS)
    parts = (
        Part("What each step adds, and what bounds the run after it", "", _what_bounds(rows, steps, rates, terms)),
        Part(
            "(a) Within a class: are the two PCIe ratios close, and the two disk ratios?",
            "",
            _within_class(rows, steps, terms),
        ),
        Part("(b) Within a pair: which ratio is larger, PCIe or disk?", "", _within_pair(steps, rates)),
    )
    return OffloadSweep(question="q1", parts=parts, gaps=gaps(rows, "q1"), steps=steps, rates=rates, terms=terms)


def _rates(rows: Rows) -> Rates:
    compute, half_cpu, all_disk = (pass_time(rows.done(f"q1-{n}")) for n in (1, 2, 5))
    found: dict = {"repeated": any(time.repeated for time in (compute, half_cpu, all_disk) if time)}
    if half_cpu:
        moved = rows.done("q1-2").placement.host_to_device_bytes_per_pass
        if compute and not half_cpu.exceeds(compute):
            found["host_to_device"] = moved / compute.value  # the copies take no longer than computing
            found["host_to_device_hidden"] = True
        else:
            found["host_to_device"] = moved / half_cpu.value
            if compute:
                found["host_to_device_most"] = moved / (half_cpu.value - compute.value)
    if all_disk:
        found["disk_hidden"] = bool(compute) and not all_disk.exceeds(compute)
        slowest = compute if found["disk_hidden"] else all_disk
        read = rows.done("q1-5").placement.disk_bytes_per_pass
        found["disk"] = read / slowest.value
        if compute and not found["disk_hidden"]:
            found["disk_most"] = read / (all_disk.value - compute.value)
    return Rates(**found)


def _terms(point: Run, rates: Rates, compute: Value | None) -> Terms:
    placement = point.placement

    def part(count: int, bytes_per_s: float | None) -> float | None:
        return 0.0 if not count else count / bytes_per_s if bytes_per_s else None

    copied, read = placement.host_to_device_bytes_per_pass, placement.disk_bytes_per_pass
    return Terms(
        compute.value if compute else None,
        part(copied, rates.host_to_device),
        part(read, rates.disk),
        part(copied, rates.host_to_device_most) or 0.0,
        part(read, rates.disk_most) or 0.0,
    )


def _step(rows: Rows, before: str, after: str, rates: Rates, terms: dict[str, Terms]) -> Step:
    a, b = rows.done(before), rows.done(after)
    link = added = slower = link_seconds = None
    if a and b:
        growth = {
            "PCIe": b.placement.host_to_device_bytes_per_pass - a.placement.host_to_device_bytes_per_pass,
            "Disk": b.placement.disk_bytes_per_pass - a.placement.disk_bytes_per_pass,
        }
        # Bytes new on the disk always cross PCIe too; a step belongs to PCIe if the disk gets no more.
        link = "Disk" if growth["Disk"] > 0 else "PCIe" if growth["PCIe"] > 0 else None
        added = growth[link] if link else 0
        link_rate = {"PCIe": rates.host_to_device, "Disk": rates.disk}.get(link)
        link_seconds = added / link_rate if link_rate else None
        if pass_time(a) and pass_time(b):
            slower = pass_time(b).value - pass_time(a).value
    return Step(
        before,
        after,
        link,
        added,
        ratio(throughput(a), throughput(b)),
        slower,
        link_seconds,
        terms[after].may_be_longest if after in terms else (),
    )


def _what_bounds(rows: Rows, steps: tuple[Step, ...], rates: Rates, terms: dict[str, Terms]) -> str:
    paragraphs = []
    if "q1-1" in terms and terms["q1-1"].compute is not None:
        paragraphs.append(
            f"With every weight on the GPU a pass takes {seconds(terms['q1-1'].compute)}: that is computing, launching "
            "kernels included."
        )
    if rates.host_to_device:
        moved = size(rows.done("q1-2").placement.host_to_device_bytes_per_pass)
        if rates.host_to_device_hidden:
            words = (
                f"Setting (2) copies {moved} to the GPU in each pass and is not slower for it: the copies hide "
                f"behind computing, and PCIe gives at least {rate(rates.host_to_device, rates.digits)}."
            )
        elif rates.host_to_device_most:
            words = (
                f"Setting (2) copies {moved} to the GPU in each pass: "
                f"{rate(rates.host_to_device, rates.digits)} if the copies overlap computing wholly (taken "
                "below, where a link's part is thus the longest that it can be), "
                f"{rate(rates.host_to_device_most, rates.digits)} if not at all."
            )
        else:
            words = (
                f"Setting (2) copies {moved} to the GPU in each pass, at "
                f"{rate(rates.host_to_device, rates.digits)} or more (how much of the pass "
                "is computing is not known without setting (1))."
            )
        paragraphs.append(words)
    if rates.disk:
        reads = of_point("Setting (5)", rows.done("q1-5"), rows)
        pacing = ", which the emulation's pacing makes up for" if reads.paced else ""
        warm = f" Those reads were {reads.verdict}{pacing}." if reads.partly_cached else ""
        paragraphs.append(
            f"Setting (5) takes {size(reads.bytes_needed / rows.done('q1-5').passes)} from the disk tier in each pass, "
            f"at {'least ' if rates.disk_hidden else ''}{rate(rates.disk, rates.digits)}.{warm}"
        )
    known = [_bound(step) for step in steps if step.ratio]
    text = " ".join(paragraphs)
    if known:
        text += "\n\n" + "\n".join(f"- {sentence}" for sentence in known)
    return text or "No setting has figures."


def _bound(step: Step) -> str:
    where = f"{step.name}, ratio {times(step.ratio)}: "
    if step.link is None:
        return where + "FlexGen places the weights the same way for both, so the step moves nothing."
    more = f"{size(step.bytes_added)} more a pass over {'PCIe' if step.link == 'PCIe' else 'the disk'}"
    if not step.slows:
        change = "is not slower" if not Value.of(1.0).exceeds(step.ratio) else "is faster"
        return where + f"{more}, and the run {change}."
    words = where + f"{more}; a pass takes {seconds(step.seconds_added)} longer"
    if step.link_seconds is not None:
        if step.link_seconds < 0.5 * step.seconds_added:
            words += (
                f", of which those bytes explain {seconds(step.link_seconds)} at the rate above: the step adds "
                f"{step.link}, but most of its time is something else"
            )
        else:
            words += f", and those bytes take {seconds(step.link_seconds)} at the rate above"
    if not step.may_be_longest_after:
        return words + ". What bounds the run after it cannot be said: a setting is missing."
    if step.longest_after is None:
        may_be = " or ".join(PARTS[name] for name in step.may_be_longest_after)
        return words + f". The longest part of the pass after it is {may_be}: that depends on how much overlaps."
    longest = PARTS[step.longest_after]
    if step.longest_after == step.link:
        return words + f". {capital(longest)} is added and is also the longest part of the pass after it."
    return words + f". The longest part of the pass after it is {longest}, not {step.link}."


def _within_class(rows: Rows, steps: tuple[Step, ...], terms: dict[str, Terms]) -> str:
    pairs = (("PCIe", steps[0], steps[2]), ("disk", steps[1], steps[3]))
    return "\n\n".join(_front_and_back(rows, terms, *pair) for pair in pairs)


def _front_and_back(rows: Rows, terms: dict[str, Terms], link: str, front: Step, back: Step) -> str:
    missing = [step.name for step in (front, back) if not step.ratio]
    if missing:
        return f"The two {link} ratios cannot be compared: no figures for {listed(missing)}."
    f, b = front.ratio, back.ratio
    words = f"{capital(link)}: {front.name} is {times(f)}, {back.name} is {times(b)}"
    bases = [pass_time(rows.done(step.before)).value for step in (front, back)]
    costs = listed(
        f"{step.name} {'adds' if step.seconds_added >= 0 else 'takes off'} {seconds(abs(step.seconds_added))} "
        f"{'to' if step.seconds_added >= 0 else 'from'} a pass of {seconds(base)}"
        for step, base in zip((front, back), bases)
    )
    if f.is_close_to(b):
        return f"{words}: close to each other. {costs}."
    larger, smaller = (front, back) if f.value > b.value else (back, front)
    position = "front" if larger is front else "back"
    factor = plain(larger.ratio.value / smaller.ratio.value, 2)
    words += f": not close, the {position} pair's is the larger, {factor} times the other."
    return f"{words} {_base_effect(rows, terms, costs, link, larger, smaller, bases, larger is front)}"


def _base_effect(
    rows: Rows,
    terms: dict[str, Terms],
    costs: str,
    link: str,
    larger: Step,
    smaller: Step,
    bases: list[float],
    front_is_larger: bool,
) -> str:
    base_larger, base_smaller = bases if front_is_larger else bases[::-1]
    if not (larger.slows and smaller.slows):
        idle = smaller if not smaller.slows else larger
        return f"{costs}. {idle.name} does not lengthen the pass measurably{_hidden(': ', idle, terms)}."
    alike = max(larger.seconds_added, smaller.seconds_added) <= 1.25 * min(larger.seconds_added, smaller.seconds_added)
    if base_larger < base_smaller:
        shorter = f"{plain(base_smaller / base_larger, 2)} times shorter"
        if alike:
            words = (
                f"The reason is the base: {costs}. That is about the same seconds, and {larger.name} starts from "
                f"a pass that is {shorter}."
            )
        elif larger.seconds_added < smaller.seconds_added:
            words = (
                f"The reason is the base: {costs}. {larger.name} adds fewer seconds, and yet, to a pass that is "
                f"{shorter}, more in proportion."
            )
        else:
            more = plain(larger.seconds_added / smaller.seconds_added, 2)
            words = (
                f"There are two reasons: {costs}. {larger.name} starts from a pass that is {shorter}, and it adds "
                f"{more} times the seconds{_hidden(f': in {smaller.name} ', smaller, terms)}."
            )
    else:
        words = (
            f"{costs}. {larger.name} adds {plain(larger.seconds_added / smaller.seconds_added, 2)} times the "
            "seconds, which outweighs its longer base."
        )
    cached_ids = [
        row_id
        for row_id in sorted({smaller.before, smaller.after, larger.before, larger.after})
        if (reads := _reads(rows, row_id)) and reads.partly_cached
    ]
    cached = [number(row_id) for row_id in cached_ids]
    if cached:
        who = f"Setting {cached[0]} took reads" if len(cached) == 1 else f"Settings {listed(cached)} took reads"
        paced = all(_reads(rows, row_id).paced for row_id in cached_ids)
        words += f" {who} from the page cache (see below), " + (
            "which makes no difference here: the emulation paces the disk tier."
            if paced
            else "so what the figures say of the disk tier there is not the disk's alone."
        )
    return words


def _hidden(lead: str, step: Step, terms: dict[str, Terms]) -> str:
    """Behind which longer part the copies over the link that a step adds hide, where the figures show it."""
    link, after = step.link, terms.get(step.after)
    if link is None or after is None or after.longest in (None, link):
        return ""
    what = "the copies over PCIe" if link == "PCIe" else "the disk tier's reads"
    behind = {**PARTS, "PCIe": "the copies over PCIe"}[after.longest]
    return (
        f"{lead}{what}, {seconds(after.by_name[link])} at the rate above, hide behind {behind}, "
        f"{seconds(after.by_name[after.longest])}, the longest part of the pass"
    )


def _reads(rows: Rows, row_id: str) -> DiskReads | None:
    point = rows.done(row_id)
    return of_point(number(row_id), point, rows) if point else None


def _within_pair(steps: tuple[Step, ...], rates: Rates) -> str:
    paragraphs, disk_wins = [], []
    for name, pcie, disk in (("Front", steps[0], steps[1]), ("Back", steps[2], steps[3])):
        missing = [step.name for step in (pcie, disk) if not step.ratio]
        if missing:
            paragraphs.append(f"{name} pair: cannot be compared, no figures for {listed(missing)}.")
            continue
        words = f"{name} pair: PCIe {pcie.name} is {times(pcie.ratio)}, disk {disk.name} is {times(disk.ratio)}: "
        if not pcie.ratio.differs_from(disk.ratio):
            paragraphs.append(words + "no difference outside the spread of the figures.")
        else:
            disk_is_larger = disk.ratio.value > pcie.ratio.value
            disk_wins.append(disk_is_larger)
            paragraphs.append(words + f"{'disk' if disk_is_larger else 'PCIe'} is the larger.")
    if rates.host_to_device and rates.disk:
        paragraphs.append(_bandwidths(rates, disk_wins))
    else:
        needed = [label for label, known in (("(2)", rates.host_to_device), ("(5)", rates.disk)) if not known]
        paragraphs.append(f"The bandwidths cannot be worked out without setting {listed(needed)}.")
    return "\n\n".join(paragraphs)


def _bandwidths(rates: Rates, disk_wins: list[bool]) -> str:
    faster = rates.host_to_device / rates.disk
    words = (
        f"From these figures PCIe gives at least {rate(rates.host_to_device, rates.digits)} and the disk tier "
        f"{rate(rates.disk, rates.digits)}"
    )
    if faster > 1:
        far = faster >= FAR
        if far:
            words += f" (orders of {_power(rates.host_to_device)} and {_power(rates.disk)} GB/s)"
        gap = f", {orders(faster)}" if far else ", less than an order of magnitude"
        words += f": PCIe is {plain(faster, 2)} times as fast{gap}."
        if disk_wins and all(disk_wins):
            words += (
                " The same share of the weights moved one tier down therefore costs far more from CPU to disk "
                "than from GPU to CPU."
                if far
                else " The same share of the weights moved one tier down costs more from CPU to disk than from GPU "
                "to CPU, but not by orders of magnitude."
            )
        elif disk_wins:
            words += (
                " That alone would make disk the larger in both pairs; where PCIe is the larger, its step "
                "starts from a shorter pass or holds something else besides the copies (see above)."
            )
    else:
        words += (
            f": the disk tier is {plain(1 / faster, 2)} times as fast as the copies to the GPU, "
            "so on this machine its reads are not the slower link (page cache is memory, not disk)."
        )
    return words


def _power(bytes_per_s: float) -> str:
    return plain(nearest_power_of_ten(bytes_per_s / 1e9), 1)
