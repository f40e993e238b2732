"""A figure with the range of its repeats, how two are compared, and how figures are put into words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

from helpers.analysis.matching import QuestionRow, Rows
from helpers.homework import QUESTIONS
from helpers.runs import Run
from helpers.units import GIB, MIB

# The emulation paces both links, so page cache makes no difference to its times.
EMULATED = "measured on the emulated GPU"
# Relative differences below this count as equal: rounded figures hide as much.
SAME_WITHIN = 0.02
# Ratios closer than this count as close.
CLOSE_WITHIN = 0.10
# Rows of question 1 whose passes other answers compare their own with.
COMPARED_WITH = {"q2": ("q1-1",), "q4": ("q1-1",)}
MOST_VISIBLE_WORDS = 60  # of a part's verdict and reason
FAR = 10.0  # an upper bound this many times the lower one says nothing
NUMBER = r"\d[\d,.]*"


@dataclass(frozen=True)
class Value:
    """A figure: the median of its repeats with the lowest and highest, all equal where there was one."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, value_range: tuple[float, float] | None = None) -> Value:
        low, high = value_range or (value, value)
        return cls(value, low, high)

    @property
    def repeated(self) -> bool:
        return self.low < self.high

    def over(self, other: Value) -> Value:
        """The ratio, from the lowest to the highest that the two ranges allow."""
        return Value(
            self.value / other.value,
            self.low / other.high if other.high else self.value / other.value,
            self.high / other.low if other.low else self.value / other.value,
        )

    def differs_from(self, other: Value) -> bool:
        """Whether the ranges are apart, and by more than SAME_WITHIN."""
        if self.low <= other.high and other.low <= self.high:
            return False
        return abs(self.value - other.value) > SAME_WITHIN * max(abs(self.value), abs(other.value))

    def exceeds(self, other: Value) -> bool:
        return self.value > other.value and self.differs_from(other)

    def is_close_to(self, other: Value) -> bool:
        if self.low <= other.high and other.low <= self.high:
            return True
        return abs(self.value - other.value) <= CLOSE_WITHIN * max(self.value, other.value)

    @property
    def interval(self) -> Interval:
        """Where the figure lies: the range of its repeats, and at least SAME_WITHIN wide."""
        margin = SAME_WITHIN / 2
        return Interval(min(self.low, self.value * (1 - margin)), max(self.high, self.value * (1 + margin)))


@dataclass(frozen=True)
class Interval:
    """Bounds of a quantity that the figures don't pin down; `high` may be infinite."""

    low: float
    high: float = math.inf

    def under(self, dividend: float) -> Interval:
        """dividend / self: bytes at a rate become seconds."""
        return Interval(dividend / self.high, dividend / self.low if self.low else math.inf) if dividend else ZERO

    def words(self, put: Callable[[float], str]) -> str:
        """10 to 18 GB/s, at least 10 GB/s, or 10 GB/s where both ends read the same."""
        low, high = put(self.low), put(self.high) if self.high < math.inf else ""
        if not high or (self.low and self.high > FAR * self.low):
            return f"at least {low}"
        if not self.low:
            return f"at most {high}"
        if low == high:
            return low
        number, unit = low.rpartition(" ")[::2]
        return f"{number} to {high}" if number and high.endswith(f" {unit}") else f"{low} to {high}"


ZERO = Interval(0.0, 0.0)


def ratio(a: Value | None, b: Value | None) -> Value | None:
    """a / b, or None where either is not known or b is 0."""
    return a.over(b) if a and b and b.value else None


def possible(figure: float | None) -> TypeGuard[float]:
    """Whether a figure is known and physically possible: 1e300 token/s is a typo."""
    return figure is not None and 1e-9 <= figure <= 1e12


def throughput(run: Run | None) -> Value | None:
    """Token/s of a run that has it."""
    if run is None:
        return None
    if possible(run.total_throughput_tok_s):
        return Value.of(run.total_throughput_tok_s, run.total_throughput_tok_s_range)
    time = latency(run)
    return Value.of(run.workload.generated_tokens).over(time) if time else None


def latency(run: Run | None) -> Value | None:
    """Seconds of one generation of a run that has them."""
    if run is None or not possible(run.latency_s):
        return None
    return Value.of(run.latency_s, run.wall_time_s_range)


def pass_time(run: Run | None) -> Value | None:
    """Seconds of a forward pass (the prefill is one), from the throughput, to agree with ratios of throughputs."""
    speed = throughput(run)
    return Value.of(run.workload.effective_batch).over(speed) if run and speed else None


@dataclass(frozen=True)
class Part:
    """One lettered sub-question and its answer.

    `verdict` answers in one or two sentences, shown in bold; `reason` is the rest of what stays visible. Together they
    have at most 60 words. `details` (Markdown) is folded.
    """

    title: str  # "(a)", or "" for a question's only part
    verdict: str
    reason: str = ""
    details: str = ""

    @property
    def markdown(self) -> str:
        bold = f"**{f'{self.title} {self.verdict}'.strip()}**"
        visible = f"{bold} {self.reason}".strip()
        if not self.details:
            return visible
        return f"{visible}\n\n<details><summary>Details</summary>\n\n{self.details}\n\n</details>"


def visible_part(title: str, verdict: str, reasons: Iterable[str], details: str = "") -> Part:
    """A part that shows as many reasons as fit into MOST_VISIBLE_WORDS and folds the rest."""
    shown: list[str] = []
    folded: list[str] = []
    for reason in filter(None, reasons):
        words = len(" ".join((verdict, *shown, reason)).split())
        (shown if words <= MOST_VISIBLE_WORDS else folded).append(reason)
    return Part(title, verdict, " ".join(shown), "\n\n".join(filter(None, (" ".join(folded), details))))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The worded answer to a question: first any gaps and disturbances, then each part."""

    question: ClassVar[str]
    rows: Rows

    @property
    def gaps(self) -> tuple[str, ...]:
        return gaps(self.rows, self.question)

    @property
    def parts(self) -> tuple[Part, ...]:
        raise NotImplementedError

    @property
    def markdown(self) -> str:
        return "\n\n".join((*(f"*{gap}*" for gap in self.gaps), *(part.markdown for part in self.parts))) + "\n"

    def _repr_markdown_(self) -> str:
        return self.markdown


def gaps(rows: Rows, question: str) -> tuple[str, ...]:
    """A sentence for what is missing, failed, inconsistent or disturbed among a question's rows."""
    shown = rows.question(question)
    there = {row.id for row in shown}
    missing = [row.label for row in QUESTIONS[question] if row.id not in there and row.page_cache is None]
    sentences = [f"Missing: {listed(missing)}."] if missing else []
    for row in shown:
        run = row.run
        if not row.done:
            sentences.append(f"Failed: {row.name} ({in_line(run.reason or 'no reason given')}).")
        if run.figures_disagree and run.wall_time_s and run.total_throughput_tok_s:
            sentences.append(
                f"{row.name}: {plain(run.wall_time_s)} s at {plain(run.total_throughput_tok_s)} token/s is not the "
                f"{run.workload.generated_tokens} tokens of its workload; times here follow the throughput."
            )
    compared = [row for row in rows.question("q1") if row.id in COMPARED_WITH.get(question, ())]
    return (*sentences, *disturbed((*shown, *compared), question))


def disturbed(rows: Iterable[QuestionRow], question: str) -> list[str]:
    """One sentence for each kind of disturbance, with the rows and the range of its figure."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        for what in filter(None, row.disturbance.split("; ")):
            figure = re.search(NUMBER, what)
            kind = re.sub(NUMBER, "{}", what, count=1)
            found.setdefault(kind, []).append(
                (row.label if question == "q1" else row.name, figure[0] if figure else "")
            )
    sentences = []
    for kind, each in found.items():
        figures = sorted({figure for _, figure in each}, key=lambda text: float(text.replace(",", "") or 0))
        spread = " to ".join(dict.fromkeys((figures[0], figures[-1])))
        sentences.append(f"Disturbed: {listed(label for label, _ in each)} ({kind.format(spread)}).")
    return sentences


# ---- words ----------------------------------------------------------------------------------------------------------


def in_line(text: str) -> str:
    """Text from records and files on one line, with everything escaped that Markdown, MathJax or HTML would act on."""
    text = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return "".join(f"\\{character}" if character in "\\`*_[]<>|&$~#" else character for character in text)


def listed(items: Iterable[str]) -> str:
    items = list(items)
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1] if items else ""


def plain(value: float, digits: int = 3) -> str:
    """A number to `digits` significant digits, without an exponent: 0.0054, 35.5, 6,740."""
    if value == 0 or math.isinf(value):
        return f"{value:.0f}".replace("inf", "∞")
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, decimals)}f}"


def times(value: Value | float, sign: str = "") -> str:
    """A ratio, 2.28 (or 2.28x), with its range where there were repeats."""
    if isinstance(value, Value):
        spread = f" ({_ratio(value.low)} to {_ratio(value.high)})" if value.repeated else ""
        return _ratio(value.value) + sign + spread
    return _ratio(value) + sign


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.2f}" if value >= 0.1 else plain(value, 2)


def seconds(value: float, digits: int = 3) -> str:
    """A time in s, below 0.1 s in ms, below 10 µs in µs."""
    for unit, scale, least in (("s", 1.0, 0.1), ("ms", 1e3, 1e-5), ("µs", 1e6, 0.0)):
        if abs(value) >= least and value:
            return f"{plain(value * scale, digits)} {unit}"
    return "0 s"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{plain(count / scale)} {unit}"
    return f"{plain(count)} B"


def rate(bytes_per_s: float, digits: int = 3) -> str:
    """Bytes per second in GB/s, below 100 MB/s in MB/s."""
    if bytes_per_s >= 1e8:
        return f"{plain(bytes_per_s / 1e9, digits)} GB/s"
    return f"{plain(bytes_per_s / 1e6, digits)} MB/s"


def memory(gib: float) -> str:
    """GPU memory: 2.807 GiB, or 9.1 MiB where GiB would hide it."""
    return f"{gib:,.3f} GiB" if gib >= 0.1 else f"{plain(gib * GIB / MIB)} MiB"


def orders(low: float, high: float | None = None) -> str:
    """A factor of at least 10 as orders of magnitude: 6,737 is about 4; 39 to 72 is more than one."""
    exponents = [math.log10(factor) for factor in (low, high or low) if factor < math.inf]
    nearest = {round(exponent) for exponent in exponents}
    if len(nearest) == 1 and high != math.inf and all(abs(e - round(e)) <= 0.2 for e in exponents):
        return f"about {_count(nearest.pop())}"
    return f"more than {_count(math.floor(exponents[0]))}"


def _count(number: int) -> str:
    return "one order of magnitude" if number == 1 else f"{number} orders of magnitude"


def percent(share: float) -> str:
    return f"{plain(100 * share, 3 if share > 1 else 2)} %"


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]
