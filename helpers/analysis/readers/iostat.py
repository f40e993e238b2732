"""iostat's extended disk reports, as text or JSON, of any sysstat from 11 on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from helpers.analysis.readers.found import Where, clean, line_of
from helpers.errors import Refused
from helpers.results import DiskSeries

HOW = "iostat -x -t 1 > iostat.txt"
_SECTOR_KIB = 0.5
_READ_UNITS = {"rkB/s": 1.0, "rMB/s": 1024.0, "rsec/s": _SECTOR_KIB}
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)?[kMGT]?%?$")
# A heading that tells another program or another report; the first match counts.
_OTHERS = (
    (re.compile(r"capacity\s+operations\s+bandwidth"), "`zpool iostat`"),
    (re.compile(r"^\s*KB/t\s+tps\s+MB/s|^\s+disk\d+\s.*\n\s+KB/t", re.MULTILINE), "macOS's or FreeBSD's iostat"),
    (
        re.compile(r"kr/s\s+kw/s.*(?:qlen|ms/r)|extended device statistics.*\n.*kr/s\s+kw/s\s+(?:ms/r|qlen)"),
        "FreeBSD's",
    ),
    (re.compile(r"kr/s\s+kw/s\s+wait\s+actv"), "Solaris's"),
    (re.compile(r"tps\s+Blk_read/s"), "`iostat` without -x (BusyBox's has no -x)"),
    (re.compile(r"tps\s+(?:kB|MB)_read/s"), "`iostat` without -x"),
)
_TIME = re.compile(r"\b(\d{1,2})[:.](\d{2})[:.](\d{2})(?:\s*([AaPp])\.?[Mm])?")
_NOT_A_DISK = re.compile(r"(loop|ram|sr|fd|zram)\d+$")


@dataclass(frozen=True)
class Sample:
    """One device in one report."""

    device: str
    reads_per_s: float
    read_kib_per_s: float
    request_kib: float | None
    util_percent: float | None


@dataclass(frozen=True)
class DiskLog:
    """The busiest disk of an iostat log: one sample per report, without the average since boot."""

    where: Where
    series: DiskSeries
    remarks: tuple[str, ...] = ()


def is_iostat(text: str) -> bool:
    return '"disk_device"' in text or bool(_heading(text)) or any(other.search(text) for other, _ in _OTHERS)


def read(text: str, file: str) -> DiskLog:
    """The samples of a log. Raises Refused, with what to do, for other programs and for logs without samples."""
    text = clean(text)
    reports, begins, times_s = _from_json(text) if '"disk_device"' in text else _from_text(text)
    if not begins:
        for other, name in _OTHERS:
            if other.search(text):
                raise Refused(f"{file}: {name}, which has no r/s and request size; sysstat's `{HOW}` has them")
        raise Refused(f"{file}: no extended report of iostat; record one with `{HOW}`")
    if len(begins) < 2:
        raise Refused(f"{file}: only the average since boot, no samples; record some with `{HOW}`")
    samples = reports[1:]
    device = _busiest(samples)
    if device is None:
        raise Refused(f"{file}: no disk in its reports; if -z left it out, nothing was read")
    interval_s, known = _interval(times_s)
    chosen = [next((s for s in report if s.device == device), Sample(device, 0, 0, None, 0)) for report in samples]
    remarks = [] if known else ["iostat log without timestamps: its interval is taken to be 1 s"]
    others = sorted({s.device for report in samples for s in report if s.read_kib_per_s} - {device})
    if others:
        remarks.append(f"iostat: {device} read the most; {', '.join(others)} not counted")
    where = Where(file, line_of(text, begins[1]))
    return DiskLog(where, _series(device, chosen, interval_s, str(where)), tuple(remarks))


def _series(device: str, samples: Sequence[Sample], interval_s: float, where: str) -> DiskSeries:
    return DiskSeries(
        source="iostat",
        device=device,
        device_found_by=f"the disk that read the most in {where}",
        interval_s=interval_s,
        time_s=tuple(round(interval_s * (i + 1), 3) for i in range(len(samples))),
        reads_per_s=tuple(s.reads_per_s for s in samples),
        read_kib_per_s=tuple(s.read_kib_per_s for s in samples),
        request_kib=tuple(s.request_kib for s in samples),
        util_percent=tuple(s.util_percent for s in samples),
        idle_read_kib_per_s=None,
    )


def _busiest(reports: Sequence[Sequence[Sample]]) -> str | None:
    """The whole disk that read the most; a partition counts only without its disk."""
    totals: dict[str, float] = {}
    for report in reports:
        for sample in report:
            if not _NOT_A_DISK.match(sample.device):
                totals[sample.device] = totals.get(sample.device, 0.0) + sample.read_kib_per_s
    whole = {
        name: total
        for name, total in totals.items()
        if not any(name != disk and re.fullmatch(rf"{re.escape(disk)}p?\d+", name) for disk in totals)
    }
    return max(whole, key=lambda name: whole[name], default=None)


def _interval(times_s: Sequence[int]) -> tuple[float, bool]:
    """Seconds between reports by their timestamps, else 1."""
    steps = sorted((later - earlier) % 86400 for earlier, later in itertools.pairwise(times_s[1:]))
    return (float(steps[len(steps) // 2]), True) if steps and steps[len(steps) // 2] > 0 else (1.0, False)


# ---- text


def _words(line: str) -> list[str]:
    return line.replace("|", " ").split()


def _heading(text: str) -> str | None:
    for line in text.splitlines():
        words = _words(line)
        if "r/s" in words and any(unit in words for unit in _READ_UNITS):
            return line
    return None


def _from_text(text: str) -> tuple[list[list[Sample]], list[int], list[int]]:
    """The reports, where each begins, and the times printed above them in seconds of the day."""
    columns: list[str] = []
    reports: list[list[Sample]] = []
    begins: list[int] = []
    times_s: list[int] = []
    seen: set[str] = set()
    device_last = False
    for offset, line in _unwrapped(text):
        words = _words(line)
        if "r/s" in words and any(unit in words for unit in _READ_UNITS):
            device_last = words[0] == "r/s"
            columns = words[:-1] if device_last else words[1:]
            reports.append([])
            begins.append(offset)
            seen = set()
        elif (
            columns
            and len(words) == len(columns) + 1
            and all(_NUMBER.match(word) for word in (words[:-1] if device_last else words[1:]))
        ):
            device, numbers = (words[-1], words[:-1]) if device_last else (words[0].rstrip(":"), words[1:])
            if device in seen:  # the heading was printed once, above the first report
                reports.append([])
                begins.append(offset)
                seen = set()
            seen.add(device)
            sample = _sample(device, dict(zip(columns, numbers)))
            if sample:
                reports[-1].append(sample)
        elif (time := _TIME.search(line)) and not words[0].startswith(("Linux", "avg-cpu")):
            hours, minutes, seconds = (int(time[i]) for i in (1, 2, 3))
            hours = hours % 12 + 12 * (time[4].lower() == "p") if time[4] else hours
            times_s.append(3600 * hours + 60 * minutes + seconds)
    return reports, begins, times_s


def _unwrapped(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their offsets; a table line that a mail program broke in two is put together again."""
    offset, lines = 0, []
    for line in text.splitlines(keepends=True):
        lines.append((offset, line.rstrip("\n")))
        offset += len(line)
    i, wanted = 0, 0
    while i < len(lines):
        begin, line = lines[i]
        words = _words(line)
        following = _words(lines[i + 1][1]) if i + 1 < len(lines) else []
        is_heading = "r/s" in words and words[0] != "avg-cpu:"
        if is_heading and "%util" not in words and "%util" in following:
            line, i = f"{line} {lines[i + 1][1]}", i + 1
        if is_heading:
            wanted = len(_words(line))
        elif (
            wanted
            and 1 < len(words) < wanted == len(words) + len(following)
            and all(_NUMBER.match(word) for word in (*words[1:], *following[:-1]))
        ) or (wanted and len(words) == 1 and len(following) == wanted - 1 and _NUMBER.match(following[0])):
            line, i = f"{line} {lines[i + 1][1]}", i + 1
        yield begin, line
        i += 1


def _value(word: str | None) -> float | None:
    """A number in any locale, with -h's unit or percent sign."""
    if word is None or not _NUMBER.match(word):
        return None
    units = {"k": 1.0, "M": 1024.0, "G": 1024.0**2, "T": 1024.0**3}
    number = word.rstrip("%")
    unit = units.get(number[-1])
    value = float(number.rstrip("kMGT").replace(",", "."))
    return max(0.0, value if unit is None else value * unit)


def _sample(device: str, words: dict[str, str]) -> Sample | None:
    reads = _value(words.get("r/s"))
    unit = next((unit for unit in _READ_UNITS if unit in words), None)
    read = _value(words.get(unit)) if unit else None
    if reads is None or read is None or unit is None:
        return None
    human = words[unit][-1:] in "kMGT"
    read_kib = read if human else read * _READ_UNITS[unit]
    request = _value(words.get("rareq-sz"))
    if request is None and reads:  # before 11.7 there is avgrq-sz only, in sectors, with writes mixed in
        request = read_kib / reads
    return Sample(device, reads, read_kib, request or None, _value(words.get("%util")))


# ---- JSON


def _from_json(text: str) -> tuple[list[list[Sample]], list[int], list[int]]:
    """As for text. Reads object by object, so that a log that was cut off is read as far as it goes."""
    reports: list[list[Sample]] = []
    begins: list[int] = []
    times_s: list[int] = []
    seen: set[str] = set()
    token = re.compile(r'"timestamp"\s*:\s*"([^"]*)"|\{\s*"disk_device"[^{}]*\}')
    for match in token.finditer(text):
        if match[1] is not None:
            if time := _TIME.search(match[1]):
                times_s.append(3600 * int(time[1]) + 60 * int(time[2]) + int(time[3]))
            continue
        try:
            fields = json.loads(re.sub(r"(?<=\d),(?=\d)", ".", match[0]))
        except ValueError:
            continue
        device = str(fields.get("disk_device"))
        if not begins or device in seen:
            reports.append([])
            begins.append(match.start())
            seen = set()
        seen.add(device)
        words = {name: str(value) for name, value in fields.items()} | {"%util": str(fields.get("util", ""))}
        if sample := _sample(device, words):
            reports[-1].append(sample)
    return reports, begins, times_s
