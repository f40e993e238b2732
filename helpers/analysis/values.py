"""A figure with the range of its repeats, how two are compared, and how figures are put into words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from helpers.analysis.matching import Rows
from helpers.homework import QUESTIONS
from helpers.runs import Run

# The emulation paces both links: where a read comes from makes no difference to its times.
EMULATED = "measured on the emulated GPU"
# Figures without repeats: a smaller relative difference is not called one (rounded figures hide as much).
SAME_WITHIN = 0.02
# From this ratio on orders of magnitude are spoken of.
FAR = 10.0
# Two ratios nearer than this are called close.
CLOSE_WITHIN = 0.10


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

    def scaled(self, factor: float) -> Value:
        return Value(self.value * factor, self.low * factor, self.high * factor)

    def differs_from(self, other: Value) -> bool:
        """Whether a difference may be called one: outside both ranges, and outside SAME_WITHIN."""
        if self.low <= other.high and other.low <= self.high:
            return False
        return abs(self.value - other.value) > SAME_WITHIN * max(abs(self.value), abs(other.value))

    def exceeds(self, other: Value) -> bool:
        return self.value > other.value and self.differs_from(other)

    def is_close_to(self, other: Value) -> bool:
        if self.low <= other.high and other.low <= self.high:
            return True
        return abs(self.value - other.value) <= CLOSE_WITHIN * max(self.value, other.value)


def ratio(a: Value | None, b: Value | None) -> Value | None:
    """a / b, or None where either is not known or b is 0."""
    return a.over(b) if a and b and b.value else None


def throughput(point: Run | None) -> Value | None:
    """Token/s of a point that has it."""
    if point is None:
        return None
    if point.total_throughput_tok_s:
        return Value.of(point.total_throughput_tok_s, point.total_throughput_tok_s_range)
    if point.latency_s:
        return Value.of(point.workload.generated_tokens).over(latency(point))
    return None


def latency(point: Run | None) -> Value | None:
    """Seconds of one generation of a point that has them."""
    if point is None or not point.latency_s:
        return None
    return Value.of(point.latency_s, point.wall_time_s_range)


def pass_time(point: Run | None) -> Value | None:
    """Seconds of a forward pass (the prefill is one of them), from the throughput, so that it agrees with
    ratios of throughputs."""
    speed = throughput(point)
    return Value.of(point.workload.effective_batch).over(speed) if speed else None


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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The worded answer to a question: first what is missing or was disturbed, then each part."""

    question: str
    parts: tuple[Part, ...]
    gaps: tuple[str, ...] = ()

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
    disturbed: dict[str, list[str]] = {}
    for row in shown:
        if row.disturbance:
            disturbed.setdefault(row.disturbance, []).append(row.label)
    sentences += [f"Disturbed: {listed(labels)} ({what})." for what, labels in disturbed.items()]
    return tuple(sentences)


# ---- words ----------------------------------------------------------------------------------------------------------


def in_line(text: str) -> str:
    """Someone else's text on one line, with nothing that Markdown or HTML would act on."""
    text = " ".join(text.split())
    for character in "\\`*_[]<>|":
        text = text.replace(character, "\\" + character)
    return text


def listed(items: Iterable[str]) -> str:
    items = list(items)
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1] if items else ""


def plain(value: float, digits: int = 3) -> str:
    """A number to `digits` significant digits, never with an exponent: 0.0054, 35.5, 6,740."""
    if value == 0:
        return "0"
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
    """Bytes per second in GB/s, below 10 MB/s in MB/s."""
    if bytes_per_s >= 1e7:
        return f"{plain(bytes_per_s / 1e9, digits)} GB/s"
    return f"{plain(bytes_per_s / 1e6, digits)} MB/s"


def gib(value: float) -> str:
    """GPU memory to three decimals as FlexGen prints it; three digits where that would leave none."""
    return plain(value) if value < 0.1 else f"{value:,.3f}"


def nearest_power_of_ten(value: float) -> float:
    """1, 10, 100 ..., whichever is nearest: 39 is of the order of 10, 63 of the order of 100."""
    below = 10.0 ** math.floor(math.log10(value))
    return below if value < 5.5 * below else 10 * below


def orders(ratio: float) -> str:
    """A ratio as orders of magnitude, rounded and as it is: 6,737 times are about 4, 10^3.8."""
    exponent = math.log10(ratio)
    return f"about {exponent:.0f} order{'s' if exponent >= 1.5 else ''} of magnitude (10^{exponent:.1f})"


def percent(share: float) -> str:
    return f"{plain(100 * share, 3 if share > 1 else 2)} %"


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def uncapital(words: str) -> str:
    return words[:1].lower() + words[1:]
