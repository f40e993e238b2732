"""The record of a run, and the log that keeps one record a line."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from helpers import models, paths
from helpers.errors import Refused
from helpers.models import OptModel
from helpers.settings import Frozen, RunSettings, in_one_line

LOG_NAME = "results.jsonl"
SCHEMA_VERSION = 1
# Raised whenever a change to the laboratory changes what a figure means; known results are then
# measured again.
METHOD_VERSION = 4

FailureKind = Literal[
    "refused", "gpu_oom", "host_pin_oom", "host_oom", "killed", "timeout", "disk_full", "interrupted", "error"
]
MOST_NAMED = 10  # of a log's broken lines
# What a figure can be: beyond it a record is damaged.
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Gib = Annotated[float, Field(ge=0, le=1e6)]
KIND_OF_DEVICE = {"cuda": "measured on CUDA", "emulated": "measured on the emulated GPU"}


class DiskSeries(Frozen):
    """What the disk behind the offload folder read, interval by interval. Times count from the run's start."""

    source: str  # "iostat 12.6.1", "/proc/diskstats" or "psutil"
    device: str
    device_found_by: str
    interval_s: float
    time_s: tuple[float, ...]
    reads_per_s: tuple[float, ...]
    read_kib_per_s: tuple[float, ...]
    request_kib: tuple[float | None, ...]  # mean size of a read; None where there was none
    util_percent: tuple[float | None, ...]
    idle_read_kib_per_s: float | None  # before the run: what others read


class MemorySeries(Frozen):
    """Memory in GiB over time; `what` names the statistic and who counts it."""

    what: str
    time_s: tuple[float, ...]
    used_gib: tuple[float, ...]

    @property
    def peak_gib(self) -> float | None:
        return max(self.used_gib, default=None)


class Samples(Frozen):
    """Everything sampled beside a run; a part that this machine cannot give is None, and `notes` says why."""

    disk: DiskSeries | None = None
    gpu: MemorySeries | None = None
    host: MemorySeries | None = None
    notes: tuple[str, ...] = ()


class Repeat(Frozen):
    """One measured generation, in a process of its own. Latencies are FlexGen's own `generate` timer: prefill, then
    each decode pass.

    `disk_read_bytes` is what the disk's counter gave in the window, `own_read_bytes` what this process
    had to take from storage; both None where the kernel does not say. `core_speed` is the main thread's
    processor core's right before or after the window, whichever is less, of the fastest seen on this machine.
    """

    started_s: float
    ended_s: float
    pass_latencies_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    peak_gpu_mem_gib: Gib
    disk_read_bytes: int | None = None
    own_read_bytes: int | None = None
    timers_s: dict[str, tuple[Annotated[float, Field(ge=0, le=1e9)], ...]] = {}
    core_speed: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def prefill_latency_s(self) -> float:
        return self.pass_latencies_s[0]

    @property
    def decode_latency_s(self) -> float:
        return sum(self.pass_latencies_s[1:])

    @property
    def total_latency_s(self) -> float:
        return sum(self.pass_latencies_s)


class Failure(Frozen):
    """Why a run gave no figures: its kind, the first real error in one line, and the log's end."""

    kind: FailureKind
    message: str
    log_tail: str = ""


class Machine(Frozen):
    """The machine of a run, as far as its figures depend on it."""

    name: str  # GPU name, or "emulated <profile>"
    cpu: str
    cpu_count: int
    ram_gib: float
    gpu_mem_gib: float | None
    platform: str
    profile: str | None = None  # the emulated tier's machine profile


class RunRecord(Frozen):
    """One run: what it was, where and how, and what came of it."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    method_version: int = METHOD_VERSION
    key: str
    kind: str
    status: Literal["done", "failed"]
    settings: RunSettings
    command: str
    machine: Machine
    versions: dict[str, str]
    started_at: str  # ISO 8601, UTC
    duration_s: float
    phases_s: dict[str, float] = {}  # start, context, pinning, weights, warm-up, measured, end: seconds of each
    model_shape: OptModel | None = None  # of a model from a folder: the record outlives it
    weights: str = ""  # where the weights came from
    prompt: str = ""  # where the prompt's token ids came from
    repeats: tuple[Repeat, ...] = ()
    generated_tokens: tuple[tuple[int, ...], ...] = ()
    bytes_by_tier: dict[str, int] = {}
    bytes_expected_from_disk: int = 0  # of weights, by one repeat, were nothing in the page cache
    peak_gpu_reserved_gib: float | None = None
    samples: Samples = Samples()
    failure: Failure | None = None
    notes: tuple[str, ...] = Field(default=())

    @property
    def projected(self) -> bool:
        """Whether FlexGen timed a few layer-steps and projected the rest (`--debug-mode`)."""
        return self.settings.debug_mode is not None

    @property
    def throughputs_tok_s(self) -> tuple[float, ...]:
        tokens = self.settings.workload.generated_tokens
        return tuple(tokens / repeat.total_latency_s for repeat in self.repeats)

    @property
    def total_throughput_tok_s(self) -> float | None:
        """Generated tokens over prefill + decode time: the median of the repeats."""
        return statistics.median(self.throughputs_tok_s) if self.repeats else None

    @property
    def total_latency_s(self) -> float | None:
        return statistics.median(r.total_latency_s for r in self.repeats) if self.repeats else None

    @property
    def prefill_latency_s(self) -> float | None:
        return statistics.median(r.prefill_latency_s for r in self.repeats) if self.repeats else None

    @property
    def decode_latency_s(self) -> float | None:
        return statistics.median(r.decode_latency_s for r in self.repeats) if self.repeats else None

    @property
    def peak_gpu_mem_gib(self) -> float | None:
        """FlexGen's statistic, over start, warm-up and the first generation, as its own command sees it."""
        return self.repeats[0].peak_gpu_mem_gib if self.repeats else None

    @property
    def bytes_from_disk(self) -> int | None:
        """Bytes that the disk gave in one repeat (median): the device's counter, else the process's own."""
        for counts in ([r.disk_read_bytes for r in self.repeats], [r.own_read_bytes for r in self.repeats]):
            if counts and None not in counts:
                return int(statistics.median(counts))
        return None


@dataclass(frozen=True)
class Sweep:
    """The records of some runs, by the name each was asked for under, in the order they were asked for."""

    records: dict[str, RunRecord]

    @property
    def failed(self) -> dict[str, RunRecord]:
        return {name: record for name, record in self.records.items() if record.status == "failed"}


# How `append` begins a line: enough to know whose record it is, and whether it is done, without reading all of it.
_HEAD = re.compile(
    rb'\{"schema_version":\d+,"method_version":\d+,"key":"(\w+)","kind":"[^"]*","status":"(done|failed)",'
)


class _OfAFolder(BaseModel):
    """What a record says of its model, if that was in a folder, which may be gone."""

    class Settings(BaseModel):
        model: str

    model_shape: OptModel
    settings: Settings


def _remember_model(line: bytes) -> None:
    """Raises ValidationError for a line that says nothing of it."""
    found = _OfAFolder.model_validate_json(line)
    models.remember(found.settings.model, found.model_shape)


class Log:
    """A JSON Lines file of records: appended to, one whole line a record, and never rewritten."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def append(self, record: RunRecord) -> None:
        """Add a record and put it on the disk before returning. Raises OSError if it cannot be kept."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = record.model_dump_json().encode() + b"\n"
        with open(self.path, "ab") as log:
            if self._last_line_is_torn():
                line = b"\n" + line
            log.write(line)
            log.flush()
            os.fsync(log.fileno())

    def __iter__(self) -> Iterator[RunRecord]:
        """Every readable record, oldest first; lines that are none are skipped, with one warning at the end."""
        broken: dict[int, str] = {}
        for number, _, line in self._lines():
            record = self._record(number, line, broken)
            if record:
                yield record
        self._warn_of(broken)

    def latest(self, keys: Collection[str] | None = None) -> dict[str, RunRecord]:
        """Of each run (of `keys` alone, if given) its last record that is done, else its last failure; in the order
        in which the runs first stand in the log.

        Only what is asked for is read whole: a log of 100,000 records is looked through in a second. Of lines passed
        over, those that are visibly no records are in the warning.
        """
        broken: dict[int, str] = {}
        wanted = None if keys is None else set(keys)
        places: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for number, offset, line in self._lines():
            head = _HEAD.match(line)
            if head and line.endswith(b"}\n"):
                key, status = head[1].decode(), head[2].decode()
            elif record := self._record(number, line, broken):
                key, status = record.key, record.status
            else:
                continue
            if wanted is None or key in wanted:
                places.setdefault(key, {"failed": [], "done": []})[status].append((number, offset))
        found = {}
        with open(self.path, "rb") if places else contextlib.nullcontext() as log:
            for key, by_status in places.items():
                for number, offset in reversed(by_status["failed"] + by_status["done"]):
                    log.seek(offset)
                    if record := self._record(number, log.readline(), broken):
                        found[key] = record
                        break
        self._warn_of(broken)
        return found

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Each line that is not empty: its number, where it begins, itself. Raises Refused for a log that may not be
        read."""
        offset = 0
        paths.check_file(self.path)
        try:
            with open(self.path, "rb") as log:
                for number, line in enumerate(log, start=1):
                    if line.strip():
                        yield number, offset, line
                    offset += len(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refused(f"{self.path} cannot be read ({error.strerror})") from error

    def _record(self, number: int, line: bytes, broken: dict[int, str]) -> RunRecord | None:
        """The record of a line; None if it is none, and then why in `broken`."""
        try:
            if b'"model_shape":{' in line:
                _remember_model(line)
            return RunRecord.model_validate_json(line)
        except ValidationError as error:
            broken[number] = "cut off while it was written" if not line.endswith(b"\n") else in_one_line(error)
            return None

    def _warn_of(self, broken: Mapping[int, str]) -> None:
        if broken:
            (first, cause), *others = sorted(broken.items())
            shown = [str(number) for number, _ in others[:MOST_NAMED]]
            more = f", nor {'is line' if len(others) == 1 else 'are lines'} {', '.join(shown)}" if others else ""
            more += f" and {len(others) - MOST_NAMED:,} others" if len(others) > MOST_NAMED else ""
            warnings.warn(f"{self.path}, line {first}: not a record, skipped ({cause}){more}", stacklevel=3)

    def _last_line_is_torn(self) -> bool:
        with open(self.path, "rb") as log:
            if log.seek(0, os.SEEK_END) == 0:
                return False
            log.seek(-1, os.SEEK_END)
            return log.read(1) != b"\n"
