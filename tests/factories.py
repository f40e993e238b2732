"""What several tests start from: small runs, records with known figures, the reference's points with some changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import psutil

from helpers import lab
from helpers.analysis import readers
from helpers.engine import launcher
from helpers.report.comparison import REFERENCE
from helpers.results import DiskSeries, Machine, Repeat, RunRecord
from helpers.runs import Run
from helpers.settings import OffloadSplit, RunSettings, Workload

T4 = readers.read(REFERENCE)
WORK = Workload(gpu_batch_size=4, prompt_len=32, gen_len=8)
MACHINE = Machine(name="Tesla T4", cpu="a CPU", cpu_count=2, ram_gib=12.7, gpu_mem_gib=14.6, platform="Linux")


def make_record(percent="0 0 100 0 100 0", latencies=((1.0, 0.5, 0.5), (1.2, 0.5, 0.5), (1.0, 0.4, 0.4)), **fields):
    options = {"model": "opt-mini", "split": OffloadSplit.parse(percent), "device": "cuda", "workload": WORK}
    settings = RunSettings(**(options | fields.pop("settings", {})))
    repeats = tuple(
        Repeat(
            started_s=10.0 * i + 10,
            ended_s=10.0 * i + 15,
            pass_latencies_s=passes,
            peak_gpu_mem_gib=0.5 + i,
            disk_read_bytes=1000 * (i + 1),
        )
        for i, passes in enumerate(latencies)
    )
    return RunRecord(
        **(
            {
                "key": settings.key,
                "kind": "measured on CUDA",
                "status": "done",
                "settings": settings,
                "command": "python ...",
                "machine": MACHINE,
                "versions": {"torch": "2.11"},
                "started_at": "2026-01-01T00:00:00Z",
                "duration_s": 60.0,
                "repeats": repeats,
                "bytes_expected_from_disk": 4000,
            }
            | fields
        )
    )


def disk_series(**fields):
    return DiskSeries(
        **(
            {
                "source": "/proc/diskstats",
                "device": "sda",
                "device_found_by": "st_dev",
                "interval_s": 1.0,
                "time_s": (1.0, 10.5, 12.0, 40.0),
                "reads_per_s": (9e3, 10.0, 20.0, 8e3),
                "read_kib_per_s": (9e5, 100.0, 200.0, 8e5),
                "request_kib": (512.0, None, 16.0, 512.0),
                "util_percent": (99.0, 1.0, 2.0, 99.0),
                "idle_read_kib_per_s": 0.0,
            }
            | fields
        )
    )


def changed(**rows):
    """The T4's points with fields of some rows replaced; a row given as None is left out."""
    found = []
    for point in T4:
        change = rows.get(point.run_id.replace("-", "_"), {})
        if change is not None:
            found.append(point.model_copy(update=change))
    return tuple(found)


def variant(run: Run, run_id: str, batch: int = 0, prompt_len: int = 0, percent: str = "", **fields) -> Run:
    """The same figures as those of other settings."""
    settings = {"split": OffloadSplit.parse(percent)} if percent else {}
    work = {name: value for name, value in (("gpu_batch_size", batch), ("prompt_len", prompt_len)) if value}
    settings["workload"] = run.workload.model_copy(update=work)
    return run.model_copy(update={"run_id": run_id, "settings": run.settings.model_copy(update=settings), **fields})


# Short enough that a run takes a second; the prompt is padded on the left.
SMALL = Workload(gpu_batch_size=2, num_gpu_batches=1, prompt_len=16, gen_len=4)


def mini(percent: str = "100 0 100 0 100 0", workload: Workload = SMALL, **options) -> RunSettings:
    """Settings of a short run on the emulated GPU."""
    fields = {"model": "opt-mini", "device": "emulated", "repeats": 1} | options
    return RunSettings(split=OffloadSplit.parse(percent), workload=workload, **fields)


def quiet(text: str) -> None:
    """Where a test wants no messages."""


def run_one(settings: RunSettings, output: Path, **options) -> RunRecord:
    """One run as the lab makes it, a process of its own."""
    (record,) = lab.run(settings, output, say=quiet, **options).records.values()
    return record


def done(record: RunRecord) -> RunRecord:
    """The record, if its run has figures; what went wrong otherwise."""
    assert record.failure is None, f"{record.failure.kind}: {record.failure.message}\n{record.failure.log_tail}"
    return record


def workers() -> list[psutil.Process]:
    """The processes of runs at this moment: the children of the server that they are forked from."""
    server = forkserver._forkserver._forkserver_pid
    return psutil.Process(server).children() if server else []


def at_phase(monkeypatch, phase: str, action: Callable[[], None], occurrence: int = 1) -> None:
    """Do something when a run's process says that it has reached this phase (for the first, second, ... time)."""
    original, seen = launcher.run, []

    def run(*arguments, on_phase, **options):
        def reached(name):
            on_phase(name)
            seen.append(name)
            if name == phase and seen.count(phase) == occurrence:
                action()

        return original(*arguments, on_phase=reached, **options)

    monkeypatch.setattr(launcher, "run", run)


def save_config(folder: Path, hidden_size: int = 64) -> None:
    """A transformers folder of a tiny OPT, as far as its shape goes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "opt",
                "hidden_size": hidden_size,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "ffn_dim": 4 * hidden_size,
                "vocab_size": 100,
                "max_position_embeddings": 256,
            }
        )
    )
