"""Disk reads over time, from sysstat's iostat if installed, else from the kernel's counters."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from helpers.machine import disks
from helpers.results import DiskSeries
from helpers.units import KIB, MIB

DISKSTATS = Path("/proc/diskstats")
IOSTAT_INTERVAL_S = 1.0
# A run's reads and the device's may differ by this much before others count as readers.
OTHERS_BYTES = 64 * MIB
OTHERS_SHARE = 0.10


# ---------------------------------------------------------------- the kernel's counters


@dataclass(frozen=True)
class Reading:
    """A device's counters at one time.monotonic(). `counts` is False where all of them are zero."""

    time_s: float
    reads: int
    read_bytes: int
    busy_ms: int | None
    counts: bool


@dataclass(frozen=True)
class Rates:
    """A disk's rates in the interval that ended at `end_s`; None: unknown, or the request size without a read."""

    end_s: float
    reads_per_s: float
    read_kib_per_s: float
    request_kib: float | None
    util_percent: float | None


def disk_counter(device: str | None) -> int | None:
    """Bytes read from a device since boot, or None without a counter. Cheap: reads one small file."""
    reading = _from_diskstats(device)
    return reading.read_bytes if reading and reading.counts else None


def own_read_bytes() -> int | None:
    """Bytes that this process has read from storage so far (read_bytes, proc_pid_io(5)); None if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        read_bytes = int(dict(line.split(": ") for line in lines)["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
    # A kernel without a block layer (gVisor) has the file too, but counts nothing.
    return read_bytes if read_bytes or DISKSTATS.exists() else None


def _from_diskstats(device: str | None) -> Reading | None:
    try:
        text = DISKSTATS.read_text()
    except OSError:
        return None
    now_s = time.monotonic()
    for row in disks.parse_diskstats(text):
        if row.name == device:
            return Reading(now_s, row.reads, row.read_bytes, row.busy_ms, row.counts)
    return None


def _from_psutil(device: str | None) -> Reading | None:
    try:
        row = (psutil.disk_io_counters(perdisk=True, nowrap=False) or {}).get(device or "")
    except (OSError, RuntimeError):  # NotImplementedError among them
        return None
    return Reading(time.monotonic(), row.read_count, row.read_bytes, None, any(row)) if row else None


COUNTERS = {"/proc/diskstats": _from_diskstats, "psutil": _from_psutil}


def rates_between(first: Reading, second: Reading) -> Rates | None:
    """The rates from two readings; None if no time passed, or the counters went back (the device was replaced)."""
    seconds = second.time_s - first.time_s
    reads = second.reads - first.reads
    read_kib = (second.read_bytes - first.read_bytes) / KIB
    if seconds <= 0 or reads < 0 or read_kib < 0:
        return None
    util_percent = None
    if first.busy_ms is not None and second.busy_ms is not None and second.busy_ms >= first.busy_ms:
        util_percent = (second.busy_ms - first.busy_ms) / 1000 / seconds * 100
    return Rates(second.time_s, reads / seconds, read_kib / seconds, read_kib / reads if reads else None, util_percent)


# ---------------------------------------------------------------- iostat


@dataclass(frozen=True)
class IostatRow:
    """One device in one report of `iostat -x -k`."""

    reads_per_s: float
    read_kib_per_s: float
    request_kib: float | None
    util_percent: float | None


def parse_iostat(lines: Iterable[str], device: str) -> Iterator[IostatRow]:
    """Yield the device's rows as they arrive, except the first, which is the mean since boot.

    Looks columns up by the header above them, since versions rename, drop and reorder them. Skips everything but whole
    rows of the device with r/s and rkB/s.
    """
    columns: list[str] = []
    is_first = True
    for line in lines:
        words = line.split()
        if words and words[0] in ("Device", "Device:"):
            columns = words
        elif line.endswith("\n") and words and words[0] == device and len(words) == len(columns):
            row = _iostat_row(dict(zip(columns[1:], words[1:])))
            if row and not is_first:
                yield row
            is_first = False


def _iostat_row(words: dict[str, str]) -> IostatRow | None:
    reads_per_s, read_kib_per_s = _number(words.get("r/s")), _number(words.get("rkB/s"))
    if reads_per_s is None or read_kib_per_s is None:
        return None
    request_kib = _number(words.get("rareq-sz"))
    if request_kib is None and reads_per_s:
        # Up to 11.6 there is only avgrq-sz, reads and writes mixed.
        request_kib = read_kib_per_s / reads_per_s
    return IostatRow(reads_per_s, read_kib_per_s, request_kib or None, _number(words.get("%util")))


def _number(word: str | None) -> float | None:
    try:
        number = float((word or "").replace(",", "."))
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


class Iostat:
    """A running `iostat` on one device, and its rows so far."""

    def __init__(self, device: str) -> None:
        """Raises OSError if it can't be started."""
        # One process group, so that stop() also ends what a wrapper script started.
        self._process = subprocess.Popen(
            ["iostat", "-d", "-x", "-k", device, f"{IOSTAT_INTERVAL_S:.0f}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=_plain_environment(),
            start_new_session=True,
        )
        self.rates: list[Rates] = []
        self._reader = threading.Thread(target=self._read, args=(device,), name="iostat", daemon=True)
        self._reader.start()

    def _read(self, device: str) -> None:
        assert self._process.stdout
        for row in parse_iostat(self._process.stdout, device):
            self.rates.append(
                Rates(time.monotonic(), row.reads_per_s, row.read_kib_per_s, row.request_kib, row.util_percent)
            )

    def stop(self) -> int | None:
        """End it and wait for it. Returns its exit status if it had already ended, else None."""
        ended_early = self._process.poll()
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # all of it has ended
                os.killpg(self._process.pid, how)
            try:
                self._process.wait(timeout=2)
                self._reader.join(timeout=2)
            except subprocess.TimeoutExpired:
                continue
            if not self._reader.is_alive():
                assert self._process.stdout
                self._process.stdout.close()
                break
        return ended_early


def iostat_version() -> str | None:
    """The installed iostat's name and version, such as `iostat 12.6.1`; None without sysstat's (BusyBox and macOS have
    another one, with other columns)."""
    try:
        said = subprocess.run(
            ["iostat", "-V"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_plain_environment(),
            timeout=2,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    words = said.split()
    return f"iostat {words[2]}" if words[:2] == ["sysstat", "version"] and len(words) > 2 else None


def _plain_environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "S_COLORS": "never"}


# ---------------------------------------------------------------- the series


class DiskReads:
    """Samples the disk behind a folder. Raises LookupError, with the reason, where no disk or no counter is known."""

    def __init__(self, folder: Path) -> None:
        disk = disks.disk_of(folder)
        if disk.device is None:
            raise LookupError(f"no disk is known behind {folder} ({disk.found_by})")
        self._device, self._found_by = disk.device, disk.found_by
        for name, read in COUNTERS.items():
            if read(self._device):
                self._source, self._read = name, read
                break
        else:
            raise LookupError(f"nothing counts the reads of {self._device} (neither /proc/diskstats nor psutil)")
        self._iostat_version: str | None = None
        self._idle_read_kib_per_s: float | None = None
        self._iostat: Iostat | None = None
        self._readings: list[Reading] = []
        # Per process of the run, in time: bytes by it and its children, bytes by the device.
        self._run_reads: list[list[tuple[int, int]]] = [[]]
        self.notes: list[str] = []

    def baseline(self, seconds: float) -> None:
        """Measure other processes' reads for some seconds before the run."""
        first = self._reading()
        time.sleep(seconds)
        rates = rates_between(first, self._reading())
        self._idle_read_kib_per_s = rates.read_kib_per_s if rates and first.counts else None

    def start(self) -> None:
        if not shutil.which("iostat"):
            return
        self._iostat_version = iostat_version()
        if not self._iostat_version:
            self.notes.append(f"the installed iostat is not sysstat's; {self._source} instead")
            return
        try:
            self._iostat = Iostat(self._device)
        except OSError as error:
            self.notes.append(f"iostat can't be started ({error}); {self._source} instead")

    def sample(self, processes: Sequence[psutil.Process]) -> None:
        reading = self._reading()
        self._readings.append(reading)
        run_bytes = _read_by(processes)
        if run_bytes is not None:
            self._run_reads[-1].append((run_bytes, reading.read_bytes))

    def next_process(self) -> None:
        """Note that the run continues in another process, whose reads count from zero."""
        self._run_reads.append([])

    def series(self, origin_s: float, interval_s: float) -> DiskSeries | None:
        """Everything sampled; stops iostat. None, with a note, where the device's counters count nothing."""
        readings = list(self._readings)
        if not readings:
            return None
        source, interval_s, rates = self._with_iostat(readings, interval_s)
        if not any(reading.counts for reading in readings):
            self.notes.append(
                f"disk reads unknown: every counter of {self._device} in {self._source} is zero since boot"
            )
            return None
        if others := sum(map(read_by_others, self._run_reads)):
            self.notes.append(f"{others / MIB:,.0f} MiB were read from {self._device} by something other than this run")
        return DiskSeries(
            source=source,
            device=self._device,
            device_found_by=self._found_by,
            interval_s=interval_s,
            time_s=tuple(round(r.end_s - origin_s, 6) for r in rates),
            reads_per_s=tuple(round(r.reads_per_s, 2) for r in rates),
            read_kib_per_s=tuple(round(r.read_kib_per_s, 2) for r in rates),
            request_kib=tuple(_rounded(r.request_kib) for r in rates),
            util_percent=tuple(_rounded(r.util_percent) for r in rates),
            idle_read_kib_per_s=_rounded(self._idle_read_kib_per_s),
        )

    def close(self) -> None:
        if self._iostat:
            self._iostat.stop()

    def _reading(self) -> Reading:
        reading = self._read(self._device)
        if reading is None:
            raise LookupError(f"{self._device} is gone from {self._source}")
        return reading

    def _with_iostat(self, readings: list[Reading], interval_s: float) -> tuple[str, float, list[Rates]]:
        """iostat's rows, and the kernel's counters for the time that they don't cover: source, interval, rates."""
        own = _rates(readings)
        if self._iostat is None:
            return self._source, interval_s, own
        iostat, self._iostat = self._iostat, None
        exit_status = iostat.stop()
        rates = list(iostat.rates)
        why = f"ended by itself with exit status {exit_status}" if exit_status is not None else "was still running"
        if not rates:
            self.notes.append(f"iostat gave no report (it {why}); {self._source} instead")
            return self._source, interval_s, own
        left_out = [reading for reading in readings if reading.time_s >= rates[-1].end_s]
        fell_silent = bool(left_out) and left_out[-1].time_s - rates[-1].end_s > 2 * IOSTAT_INTERVAL_S
        source = self._iostat_version or "iostat"
        rest = _rates(_thinned(left_out, IOSTAT_INTERVAL_S)) if exit_status is not None or fell_silent else []
        if rest:
            reports = f"{len(rates)} report{'s' if len(rates) > 1 else ''}"
            self.notes.append(f"iostat gave {reports} and no more (it {why}); the rest is from {self._source}")
            source = f"{source}, then {self._source}"
        return source, IOSTAT_INTERVAL_S, rates + rest


def read_by_others(run_reads: Sequence[tuple[int, int]]) -> int:
    """Bytes read from a device by something other than a run, from pairs (the run's bytes, the device's bytes) in order
    of time; 0 if they differ by less than 64 MiB or 10 %. Ends at the last pair that saw the most of the run, since
    reads of ended processes are no longer visible."""
    if not run_reads:
        return 0
    run_bytes, device_bytes = (last - first for first, last in zip(run_reads[0], max(run_reads)))
    others = device_bytes - run_bytes
    return others if others > OTHERS_BYTES and others > OTHERS_SHARE * run_bytes else 0


def _rates(readings: Sequence[Reading]) -> list[Rates]:
    between = (rates_between(first, second) for first, second in itertools.pairwise(readings))
    return [rates for rates in between if rates]


def _thinned(readings: Sequence[Reading], interval_s: float) -> list[Reading]:
    """Readings at least an interval apart, or nearly, since a thread wakes a little early or late."""
    kept: list[Reading] = []
    for reading in readings:
        if not kept or reading.time_s - kept[-1].time_s > 0.95 * interval_s:
            kept.append(reading)
    return kept


def _read_by(processes: Sequence[psutil.Process]) -> int | None:
    """Bytes that processes read from storage; None if unknown for any of them."""
    read_bytes = None
    for process in processes:
        try:
            read_bytes = (read_bytes or 0) + process.io_counters().read_bytes
        except psutil.NoSuchProcess:
            continue  # ended since the tree was listed
        except (psutil.Error, AttributeError, OSError, RuntimeError):
            return None
    return read_bytes


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 2)
