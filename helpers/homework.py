"""The homework as data: which run each row of each question asks for, in the order of its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from helpers.errors import Refused
from helpers.models import EMULATED_MODEL
from helpers.settings import OffloadSplit, RunSettings, Workload

GPU = "100 0 100 0 100 0"
DISK = "0 0 100 0 100 0"


@dataclass(frozen=True)
class Row:
    """One run of the homework; what is not said here is the workload's."""

    id: str
    label: str
    percent: str
    gpu_batch_size: int = 4
    compress_weight: bool = False
    debug_mode: Literal["breakdown", "fewer_batch"] | None = None
    page_cache: Literal["natural", "cold"] | None = None  # None: as the whole homework is run
    disk_reader: Literal["stock", "direct"] = "stock"

    def settings(self, **common: Any) -> RunSettings:
        """The run itself; `common` is what all rows share: model, device, workload, page_cache, repeats."""
        workload = common.pop("workload", Workload())
        if self.page_cache:
            common["page_cache"] = self.page_cache
        return RunSettings(
            split=OffloadSplit.parse(self.percent),
            workload=workload.model_copy(update={"gpu_batch_size": self.gpu_batch_size}),
            compress_weight=self.compress_weight,
            debug_mode=self.debug_mode,
            disk_reader=self.disk_reader,
            **common,
        )


_OFFLOAD_SWEEP = (
    Row("q1-1", "100 % GPU", GPU),
    Row("q1-2", "50 % GPU + 50 % CPU", "50 50 100 0 100 0"),
    Row("q1-3", "50 % GPU + 50 % disk", "50 0 100 0 100 0"),
    Row("q1-4", "50 % CPU + 50 % disk", "0 50 100 0 100 0"),
    Row("q1-5", "100 % disk", DISK),
)
_ALL_ON_DISK = _OFFLOAD_SWEEP[4]

# A row that two questions share stands in both and is run once.
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

# Run with a question, beside its rows: the homework does not ask for them, and its tables do not hold them.
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

# What the homework does not ask for, in its tables or not: left out where it is dear.
BESIDE = ("q4-disk-cold", "q4-disk-direct")

# What is run where nothing else is asked for.
MODEL = {"cuda": "opt-1.3b", "emulated": EMULATED_MODEL.name}
# The hand-in's workload: its figures fix it (64 tokens in 179.3 s; the peaks of its first two splits).
# The emulated one is the same shape, small enough for a CPU that plays the GPU.
WORKLOAD = {
    "cuda": Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=128, gen_len=16),
    "emulated": Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=32, gen_len=8),
}


def plan(
    question: str,
    device: Literal["cuda", "emulated"],
    model: str = "",
    page_cache: Literal["natural", "cold"] = "natural",
    repeats: int = 3,
) -> dict[str, RunSettings]:
    """The runs of a question by row id, in the order of its tables, then its extras. Raises Refused for an unknown
    question.

    An empty `model` is the homework's own on this device.
    """
    if not isinstance(model, str):
        raise Refused(f"model {model!r}: not a name, nor a folder")
    if question not in QUESTIONS:
        raise Refused(f"question {question!r}: choose from {', '.join(QUESTIONS)}")
    return {
        row.id: row.settings(
            model=model or MODEL[device],
            device=device,
            workload=WORKLOAD[device],
            page_cache=page_cache,
            repeats=repeats,
        )
        for row in (*QUESTIONS[question], *EXTRAS.get(question, ()))
    }
