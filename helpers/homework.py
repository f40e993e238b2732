"""The homework as data: the runs behind each row of each question, in the order of its tables.

`QUESTIONS` is the homework as set. `offload_sweep`, `batch_size`, `weight_compression` and `disk_io` build such rows
for other splits, batches and scenarios; `plan` turns rows into runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from helpers.errors import Refused
from helpers.models import EMULATED_MODEL
from helpers.settings import OffloadSplit, RunSettings, Workload

GPU = "100 0 100 0 100 0"
DISK = "0 0 100 0 100 0"


@dataclass(frozen=True)
class Row:
    """One run of a question. Options left unset here are the same for all rows."""

    id: str
    label: str
    percent: str
    gpu_batch_size: int = 4
    compress_weight: bool = False
    debug_mode: Literal["breakdown", "fewer_batch"] | None = None
    page_cache: Literal["natural", "cold"] | None = None  # None: like the other rows
    disk_reader: Literal["stock", "direct"] = "stock"
    copy_buffer: Literal["stock", "fit"] = "stock"

    def settings(self, **common: Any) -> RunSettings:
        """This row's run; `common` holds the other options: model, device, workload, page_cache, repeats."""
        workload = common.pop("workload", Workload())
        if self.page_cache:
            common["page_cache"] = self.page_cache
        return RunSettings(
            split=OffloadSplit.parse(self.percent),
            workload=Workload(**(workload.model_dump() | {"gpu_batch_size": self.gpu_batch_size})),
            compress_weight=self.compress_weight,
            debug_mode=self.debug_mode,
            disk_reader=self.disk_reader,
            copy_buffer=self.copy_buffer,
            **common,
        )


# ---- the homework as set

_OFFLOAD_SWEEP = (
    Row("q1-1", "100 % GPU", GPU),
    Row("q1-2", "50 % GPU + 50 % CPU", "50 50 100 0 100 0"),
    Row("q1-3", "50 % GPU + 50 % disk", "50 0 100 0 100 0"),
    Row("q1-4", "50 % CPU + 50 % disk", "0 50 100 0 100 0"),
    Row("q1-5", "100 % disk", DISK),
)
_ALL_ON_DISK = _OFFLOAD_SWEEP[4]

# A row that two questions share is listed in both and run once.
QUESTIONS: dict[str, tuple[Row, ...]] = {
    "q1": _OFFLOAD_SWEEP,
    "q2": (
        Row("q2-b1", "batch 1", DISK, gpu_batch_size=1),
        _ALL_ON_DISK,
        Row("q2-b16", "batch 16", DISK, gpu_batch_size=16),
    ),
    "q3": (
        _OFFLOAD_SWEEP[0],
        Row("q3-gpu-4bit", "100 % GPU, 4-bit weights", GPU, compress_weight=True),
        _ALL_ON_DISK,
        Row("q3-disk-4bit", "100 % disk, 4-bit weights", DISK, compress_weight=True),
    ),
    "q4": (
        _ALL_ON_DISK,
        Row("q4-disk-cold", "100 % disk, page cache dropped", DISK, page_cache="cold"),
        Row("q4-breakdown-gpu", "100 % GPU, breakdown", GPU, debug_mode="breakdown"),
        Row("q4-breakdown-disk", "100 % disk, breakdown", DISK, debug_mode="breakdown"),
    ),
}

# Logs may hold these next to a question's rows. Neither its tables nor `plan` include them: notebook 06 goes further.
EXTRAS: dict[str, tuple[Row, ...]] = {
    "q4": (
        Row(
            "q4-disk-direct",
            "100 % disk, page cache dropped, direct reader",
            DISK,
            page_cache="cold",
            disk_reader="direct",
        ),
    )
}

# Optional runs, in tables or not, skipped where they would take long.
BESIDE = ("q4-disk-cold",)

# How fast can all weights on disk be? Each rung changes one thing (notebook 06).
FASTER = (
    Row("faster-stock", "FlexGen as is", DISK),
    Row("faster-fit", "copy buffers that fit", DISK, copy_buffer="fit"),
    Row("faster-direct", "direct reader", DISK, disk_reader="direct"),
    Row("faster-4bit", "copy buffers that fit, 4-bit weights", DISK, compress_weight=True, copy_buffer="fit"),
    Row("faster-direct-4bit", "direct reader, 4-bit weights", DISK, compress_weight=True, disk_reader="direct"),
    Row("faster-cpu", "weights on the CPU", "0 100 100 0 100 0", copy_buffer="fit"),
    Row("faster-b16", "batch 16", "0 100 100 0 100 0", gpu_batch_size=16, copy_buffer="fit"),
)

# Defaults by device.
MODEL = {"cuda": "opt-1.3b", "emulated": EMULATED_MODEL.name}
# CUDA: the hand-in's workload, which its figures determine (64 tokens in 179.3 s; the peaks of its first two splits).
# Emulated: the same shape, small enough for a CPU that plays the GPU.
WORKLOAD = {
    "cuda": Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=128, gen_len=16),
    "emulated": Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=16, gen_len=4),
}


# ---- the same questions with other values


def offload_sweep(splits: Mapping[str, str]) -> tuple[Row, ...]:
    """Q1's rows for other splits by name: `{"(1)": "100 0 100 0 100 0", "(6)": "20 80 100 0 100 0"}`."""
    return _distinct("splits", [_row("q1", percent) for percent in _percents("splits", splits)])


def batch_size(batches: Sequence[int]) -> tuple[Row, ...]:
    """Q2's rows for other batch sizes: `[1, 4, 16, 64]`."""
    if isinstance(batches, str) or not isinstance(batches, Iterable) or not batches:
        raise Refused(f"batches {batches!r}: not a list of batch sizes, such as [1, 4, 16]")
    for batch in batches:
        if type(batch) is not int or batch < 1:
            raise Refused(f"batches {batch!r}: not a whole number above 0")
    return _distinct("batches", [_known(Row(f"q2-b{n}", f"batch {n}", DISK, gpu_batch_size=n)) for n in batches])


def weight_compression(scenarios: Mapping[str, str]) -> tuple[Row, ...]:
    """Q3's rows for other splits by name, each without and with 4-bit weights."""
    percents = _percents("scenarios", scenarios)
    rows = [_row("q3", percent, compress_weight=compressed) for percent in percents for compressed in (False, True)]
    return _distinct("scenarios", rows)


def disk_io(scenarios: Mapping[str, str]) -> tuple[Row, ...]:
    """Q4's rows: all weights on disk with the page cache natural and dropped, then the breakdown of each split."""
    percents = _percents("scenarios", scenarios)
    breakdowns = [_row("q4", percent, debug_mode="breakdown") for percent in percents]
    return (*QUESTIONS["q4"][:2], *_distinct("scenarios", breakdowns))


def _percents(what: str, splits: Mapping[str, str]) -> list[str]:
    """The six numbers of each named split, normalised. Raises Refused with the name."""
    if not isinstance(splits, Mapping) or not splits:
        raise Refused(f'{what} {splits!r}: not named splits, such as {{"(1)": "{GPU}"}}')
    percents = []
    for name, percent in splits.items():
        try:
            percents.append(str(OffloadSplit.parse(percent)))
        except (Refused, TypeError) as error:
            raise Refused(f"{what}[{name!r}] {percent!r}: {error}") from None
    return percents


def _row(question: str, percent: str, **options: Any) -> Row:
    """The homework's row with this split and these options, or a new one named after them."""
    where = OffloadSplit.parse(percent).in_words
    words = [where] if percent.endswith(" 100 0 100 0") else [where, f"--percent {percent}"]
    words += ["4-bit weights"] if options.get("compress_weight") else []
    words += [options["debug_mode"]] if options.get("debug_mode") else []
    return _known(Row(f"{question} {', '.join(words)}", ", ".join(words), percent, **options))


def _known(row: Row) -> Row:
    """The homework's own row for the same run, if it has one."""
    rows = (own for own_rows in QUESTIONS.values() for own in own_rows)
    return next((own for own in rows if replace(own, id=row.id, label=row.label) == row), row)


def _distinct(what: str, rows: Sequence[Row]) -> tuple[Row, ...]:
    for row in rows:
        if rows.count(row) > 1:
            raise Refused(f"{what}: {row.label} is listed twice")
    return tuple(rows)


# ---- runs


def plan(
    question: str | Sequence[Row],
    device: Literal["cuda", "emulated"],
    model: str = "",
    page_cache: Literal["natural", "cold"] = "natural",
    repeats: int = 3,
    prompt_len: int | None = None,
    gen_len: int | None = None,
) -> dict[str, RunSettings]:
    """The runs of a question (q1 to q4, or "faster"), or of some rows, by row id.

    Empty values stand for the homework's own on this device. Raises Refused for an unknown question or a wrong value.
    """
    if not isinstance(model, str):
        raise Refused(f"model {model!r}: not a name or a folder")
    if isinstance(question, str):
        known = QUESTIONS | {"faster": FASTER}
        if question not in known:
            raise Refused(f"question {question!r}: choose from {', '.join(known)}")
        rows: Sequence[Row] = known[question]
    else:
        rows = question
    lengths = {"prompt_len": prompt_len, "gen_len": gen_len}
    workload = WORKLOAD[device].model_dump() | {name: given for name, given in lengths.items() if given is not None}
    return {
        row.id: row.settings(
            model=model or MODEL[device],
            device=device,
            workload=Workload(**workload),
            page_cache=page_cache,
            repeats=repeats,
        )
        for row in rows
    }
