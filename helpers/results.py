"""The record of a run, and the log with one record per line."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from helpers import paths
from helpers.errors import Refused
from helpers.models import OptModel
from helpers.placement import asked_and_achieved
from helpers.settings import Frozen, RunSettings, in_one_line

LOG_NAME = "results.jsonl"
SCHEMA_VERSION = 1
# Raised whenever a change to the lab changes what a figure means, so that known results are measured again.
METHOD_VERSION = 5

FailureKind = Literal[
    "refused", "gpu_oom", "host_pin_oom", "host_oom", "killed", "timeout", "disk_full", "interrupted", "error"
]
MOST_NAMED = 10  # of each broken line shown in the warning
# Figures outside these bounds mean a damaged record.
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Gib = Annotated[float, Field(ge=0, le=1e6)]
Bytes = Annotated[int, Field(ge=-(2**60), le=2**60)]  # differences of counters that others may reset
Sample = Annotated[float, Field(ge=0, le=1e12)]
SERIES = ("reads_per_s", "read_kib_per_s", "request_kib", "util_percent")
Kind = Literal[
    "measured on CUDA", "measured on the emulated GPU", "measured by you", "projected by FlexGen", "predicted", "quoted"
]
KIND_OF_DEVICE: dict[str, Kind] = {"cuda": "measured on CUDA", "emulated": "measured on the emulated GPU"}


class DiskSeries(Frozen):
    """Reads from the disk behind the offload folder, by interval. Times count from the run's start."""

    source: str  # "iostat 12.6.1", "/proc/diskstats" or "psutil"
    device: str
    device_found_by: str
    interval_s: Sample
    time_s: tuple[Sample, ...]
    reads_per_s: tuple[Sample, ...]
    read_kib_per_s: tuple[Sample, ...]
    request_kib: tuple[Sample | None, ...]  # mean size of a read; None where there was none
    util_percent: tuple[Sample | None, ...]
    idle_read_kib_per_s: Sample | None  # before the run: other processes' reads

    @model_validator(mode="after")
    def _one_value_per_interval(self) -> DiskSeries:
        lengths = {len(getattr(self, name)) for name in ("time_s", *SERIES)}
        if len(lengths) > 1:
            raise ValueError(f"disk samples of unequal length: {', '.join(map(str, sorted(lengths)))}")
        return self


class MemorySeries(Frozen):
    """Memory in GiB over time; `what` names the statistic and who counts it."""

    what: str
    time_s: tuple[float, ...]
    used_gib: tuple[float, ...]

    @property
    def peak_gib(self) -> float | None:
        return max(self.used_gib, default=None)


class Samples(Frozen):
    """Everything sampled during a run. Parts that this machine can't provide are None, and `notes` says why."""

    disk: DiskSeries | None = None
    gpu: MemorySeries | None = None
    host: MemorySeries | None = None
    notes: tuple[str, ...] = ()


class Repeat(Frozen):
    """One measured generation, in a process of its own. Latencies are FlexGen's own `generate` timer: prefill, then
    each decode pass.

    `disk_read_bytes` comes from the disk's counter, `own_read_bytes` from this process's; both are None where the
    kernel doesn't report them. `core_speed` is the speed of the main thread's CPU core right after the generation, as
    a share of its fastest in the busy second before.

    On the emulated GPU `paced_s` has the seconds that each part of the emulated machine was busy, pass by pass, and
    `passes_behind` counts the passes in which this CPU was too slow to keep the pace.
    """

    started_s: float
    ended_s: float
    pass_latencies_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    peak_gpu_mem_gib: Gib
    disk_read_bytes: Bytes | None = None
    own_read_bytes: Bytes | None = None
    timers_s: dict[str, tuple[Annotated[float, Field(ge=0, le=1e9)], ...]] = {}
    core_speed: Annotated[float, Field(gt=0, le=1)] | None = None
    paced_s: dict[str, tuple[Annotated[float, Field(ge=0, le=1e9)], ...]] = {}
    passes_behind: Annotated[int, Field(ge=0)] = 0

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
    """Why a run has no figures: the kind of failure, the first real error in one line, and the end of its output."""

    kind: FailureKind
    message: str
    log_tail: str = ""


class Machine(Frozen):
    """The machine of a run, as far as its figures depend on it."""

    name: str  # GPU name, or "emulated <profile>"
    cpu: str = ""
    cpu_count: int | None = None
    ram_gib: float | None = None
    gpu_mem_gib: float | None = None
    platform: str = ""  # with the kernel's release
    mglru: str | None = None  # /sys/kernel/mm/lru_gen/enabled: another way of evicting page cache
    disk_read_gb_s: float | None = None  # as stated by the person
    profile: str | None = None  # the emulated tier's machine profile


class RunRecord(Frozen):
    """One run: its settings, its machine, how it was measured, and its figures or failure."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    method_version: int = METHOD_VERSION
    key: str
    kind: Kind
    status: Literal["done", "failed"]
    settings: RunSettings
    command: str
    machine: Machine
    versions: dict[str, str]
    started_at: str  # ISO 8601, UTC
    duration_s: float
    phases_s: dict[str, float] = {}  # start, context, pinning, weights, warm-up, measured, end: seconds of each
    model_shape: OptModel | None = None  # for a model folder, which may be gone before the record is
    weights: str = ""  # where the weights came from
    prompt: str = ""  # where the prompt's token ids came from
    repeats: tuple[Repeat, ...] = ()
    generated_tokens: tuple[tuple[int, ...], ...] = ()
    bytes_by_tier: dict[str, int] = {}
    bytes_expected_from_disk: Bytes = 0  # weights of one repeat, with nothing in the page cache
    peak_gpu_reserved_gib: float | None = None
    samples: Samples = Samples()
    failure: Failure | None = None
    notes: tuple[str, ...] = Field(default=())

    @property
    def projected(self) -> bool:
        """Whether FlexGen timed a few layer-steps and projected the rest (`--debug-mode`)."""
        return self.settings.debug_mode is not None

    @property
    def counted(self) -> tuple[Repeat, ...]:
        """The repeats that count: those in which the emulated GPU kept its pace, or all if none did."""
        return tuple(repeat for repeat in self.repeats if not repeat.passes_behind) or self.repeats

    @property
    def throughputs_tok_s(self) -> tuple[float, ...]:
        tokens = self.settings.workload.generated_tokens
        return tuple(tokens / repeat.total_latency_s for repeat in self.counted)

    @property
    def total_throughput_tok_s(self) -> float | None:
        """Generated tokens over prefill + decode time: the median of the repeats."""
        return statistics.median(self.throughputs_tok_s) if self.repeats else None

    @property
    def total_latency_s(self) -> float | None:
        return statistics.median(r.total_latency_s for r in self.counted) if self.repeats else None

    @property
    def prefill_latency_s(self) -> float | None:
        return statistics.median(r.prefill_latency_s for r in self.counted) if self.repeats else None

    @property
    def decode_latency_s(self) -> float | None:
        return statistics.median(r.decode_latency_s for r in self.counted) if self.repeats else None

    @property
    def peak_gpu_mem_gib(self) -> float | None:
        """FlexGen's statistic, over start, warm-up and the first generation, as its own command reports it."""
        return self.repeats[0].peak_gpu_mem_gib if self.repeats else None

    @property
    def bytes_from_disk(self) -> int | None:
        """Bytes read from the disk in one repeat (median), by the device's counter or else the process's own."""
        for counts in ([r.disk_read_bytes for r in self.repeats], [r.own_read_bytes for r in self.repeats]):
            known = [count for count in counts if count is not None]
            if known and len(known) == len(counts):
                return int(statistics.median(known))
        return None

    def as_json(self) -> dict[str, Any]:
        """The figures that `measure --json` prints."""
        settings = self.settings
        return {
            "status": self.failure.kind if self.failure else self.status,
            "device": settings.device,
            "kind": self.kind,
            "machine": self.machine.name,
            **settings_as_json(settings),
            "started_at": self.started_at,
            "total_throughput_tok_s": self.total_throughput_tok_s,
            "total_throughputs_tok_s": list(self.throughputs_tok_s),
            "prefill_latency_s": self.prefill_latency_s,
            "decode_latency_s": self.decode_latency_s,
            "total_latency_s": self.total_latency_s,
            "peak_gpu_mem_gib": self.peak_gpu_mem_gib,
            "bytes_from_disk": self.bytes_from_disk,
            "bytes_expected_from_disk": self.bytes_expected_from_disk,
            "projected": self.projected,
            "weights": self.weights,
            "command": settings.flexgen_command,
            "notes": [*self.notes, *self.samples.notes],
            "reason": self.failure.message if self.failure else None,
        }


def settings_as_json(settings: RunSettings) -> dict[str, Any]:
    """The model, the splits asked for and achieved, and the workload, as `measure` and `predict` print them."""
    achieved = asked_and_achieved(settings.opt_model, settings.split, settings.compress_weight)["achieved"]
    return {
        "model": settings.model,
        "percent": str(settings.split),
        "achieved": achieved,
        **settings.workload.model_dump(),
    }


@dataclass(frozen=True)
class Sweep:
    """The records of some runs by the names they were requested under, in that order."""

    records: dict[str, RunRecord]

    @property
    def failed(self) -> dict[str, RunRecord]:
        return {name: record for name, record in self.records.items() if record.status == "failed"}


class _ModelShape(BaseModel):
    """The part of a record that keeps a folder's model shape."""

    model_shape: OptModel


class Log:
    """A JSON Lines file of records: one line each, appended and never rewritten."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def append(self, record: RunRecord) -> None:
        """Append a record and sync it to disk. Raises OSError if that fails."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = record.model_dump_json().encode() + b"\n"
        with open(self.path, "ab") as log:
            if self._last_line_is_torn():
                line = b"\n" + line
            log.write(line)
            log.flush()
            os.fsync(log.fileno())

    def __iter__(self) -> Iterator[RunRecord]:
        """Every readable record, oldest first. Other lines are skipped, with one warning at the end."""
        broken: dict[int, str] = {}
        for number, line in self._lines():
            try:
                kept = _ModelShape.model_validate_json(line).model_shape if b'"model_shape":{' in line else None
                record = RunRecord.model_validate_json(line, context={"model_shape": kept})
            except ValidationError as error:
                broken[number] = in_one_line(error) if line.endswith(b"\n") else "cut off while it was written"
            else:
                yield record
        self._warn_of(broken)

    def latest(self, keys: Collection[str] | None = None) -> dict[str, RunRecord]:
        """Each run's last finished record, or else its last failure, in the order in which runs first appear.

        `keys` limits this to some runs.
        """
        found: dict[str, RunRecord] = {}
        for record in self:
            known = found.get(record.key)
            if (keys is None or record.key in keys) and (
                known is None or record.status == "done" or known.status == "failed"
            ):
                found[record.key] = record
        return found

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that aren't empty, numbered. Raises Refused for a log that can't be read."""
        paths.check_file(self.path)
        try:
            with open(self.path, "rb") as log:
                yield from ((number, line) for number, line in enumerate(log, start=1) if line.strip())
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refused(f"{self.path} cannot be read ({error.strerror})") from error

    def _warn_of(self, broken: Mapping[int, str]) -> None:
        if broken:
            (first, cause), *others = sorted(broken.items())
            shown = [str(number) for number, _ in others[:MOST_NAMED]]
            more = f"; so {'is line' if len(others) == 1 else 'are lines'} {', '.join(shown)}" if others else ""
            more += f" and {len(others) - MOST_NAMED:,} others" if len(others) > MOST_NAMED else ""
            warnings.warn(f"{self.path}, line {first}: not a record, skipped ({cause}){more}", stacklevel=3)

    def _last_line_is_torn(self) -> bool:
        with open(self.path, "rb") as log:
            if log.seek(0, os.SEEK_END) == 0:
                return False
            log.seek(-1, os.SEEK_END)
            return log.read(1) != b"\n"
