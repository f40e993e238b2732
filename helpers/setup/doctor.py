"""Check whether this machine is ready and how long the homework will take: one line per check."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from helpers import forecast, home, homework, lab, models, paths
from helpers.errors import Refused
from helpers.machine import disks, gpus, limits, torch_check
from helpers.machine.torch_check import TorchCheck
from helpers.sampling.disk import iostat_version
from helpers.setup import packages
from helpers.units import GIB
from helpers.weights import store

Status = Literal["OK", "warn", "FAIL"]
PINNED_COPY_BUFFERS_GIB = 8.0  # FlexGen's four copy threads pin 2 GiB each


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    status: Status
    name: str
    text: str

    def __str__(self) -> str:
        return f"[{self.status}]".ljust(7) + f"{self.name}: {self.text}"


def check(offload_root: Path | None = None, output_dir: Path | None = None) -> list[Check]:
    """Every check, then each question's time without the results that the output folder already has."""
    root = offload_root or home.home() / "offload"
    found = gpus.look()  # before choosing a device, which hides GPUs in trouble
    device = lab.choose_device("auto")
    torch = torch_check.run()
    gpu, installed = _gpu(device, found, torch), _packages(torch)
    checks = [gpu, _memory(device), _disk(root), installed, _iostat(), _weights(device, root)]
    return checks + _homework(device, output_dir or paths.DEFAULT_OUTPUT)


def as_json(checks: list[Check]) -> dict[str, Any]:
    return {"ready": all(c.status != "FAIL" for c in checks), "checks": [asdict(c) for c in checks]}


def _gpu(device: str, found: gpus.Found, torch: TorchCheck) -> Check:
    trouble = "; ".join(found.faults)
    name, total_gib, free_gib = "", None, None
    if found.gpus:
        first = found.gpus[0]
        name, total_gib, free_gib = first.name, first.total_gib, first.free_gib
    if torch.gpus and free_gib is None:
        name, total_gib, free_gib = torch.gpus[0]
    if not name:
        hint = " (Runtime > Change runtime type > T4 GPU)" if packages.on_colab() else ""
        text = f"none{f': {trouble}' if trouble else ''}{hint}"
        return Check("warn", "GPU", f"{text}; runs go to the emulated GPU, on the CPU, and every figure says so")
    text = name if free_gib is None else f"{name}, {free_gib:.1f} GiB free of {total_gib:.1f} GiB"
    if device == "emulated":
        why = torch.cuda_error or torch.import_error or "this torch is built without CUDA"
        return Check("warn", "GPU", f"{text}; {trouble or why}: runs go to the emulated GPU")
    if torch.cuda_error:
        return Check("FAIL", "GPU", f"{text}; torch can't use it: {torch.cuda_error}")
    if trouble:
        return Check("warn", "GPU", f"{text}; {trouble}")
    if len(found.gpus) > 1:
        text += f"; the first of {len(found.gpus)}, FlexGen uses one"
    if others := gpus.others_holding_memory():
        held = ", ".join(name if gib is None else f"{name} holds {gib:.1f} GiB" for name, gib in others[:3])
        return Check("warn", "GPU", f"{text}; {len(others)} other processes use it and disturb figures: {held}")
    return Check("OK", "GPU", text)


def _memory(device: str) -> Check:
    allowance = limits.memory_allowance()
    free = allowance.free_bytes / GIB
    text = f"{free:.1f} GiB free of {allowance.total_bytes / GIB:.1f} GiB ({allowance.total_limited_by})"
    if device == "cuda":
        text += f", of which FlexGen pins {PINNED_COPY_BUFFERS_GIB:.0f} GiB for its copy threads"
        if free < PINNED_COPY_BUFFERS_GIB + 2:
            return Check("warn", "RAM", f"{text}: restart the runtime, or close what else holds memory")
    return Check("OK", "RAM", text)


def _disk(root: Path) -> Check:
    disk = disks.disk_of(root)
    text = f"{disks.free_bytes(root) / GIB:.1f} GiB free at {root} ({disk.filesystem})"
    try:
        paths.try_out(root, "offload folder")
    except Refused as refused:
        return Check("FAIL", "disk", f"{refused}: set OFFLOAD_LAB_HOME to a folder on a disk")
    if disk.is_memory:
        return Check("FAIL", "disk", f"{text}: that is memory, not a disk; set OFFLOAD_LAB_HOME to a folder on a disk")
    if disk.is_network:
        return Check(
            "warn",
            "disk",
            f"{text}: a network or FUSE file system such as Google Drive; weights and offload files crawl or break "
            "there, set OFFLOAD_LAB_HOME to a folder on this machine's disk",
        )
    if not disk.device:
        return Check("warn", "disk", f"{text}; no counters of its reads ({disk.found_by})")
    return Check("OK", "disk", f"{text}; reads are counted by {disk.device}")


def _packages(torch: TorchCheck) -> Check:
    requirements = paths.ROOT / "requirements.txt"
    missing = packages.missing(requirements)
    if missing:
        return Check("FAIL", "packages", f"missing: {' '.join(missing)}; pip install them")
    wrong = []
    for requirement in map(Requirement, packages.wanted(requirements)):
        version = importlib.metadata.version(requirement.name)
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return Check("FAIL", "packages", f"{', '.join(wrong)}; take a fresh environment, see the README")
    if torch.import_error:
        return Check("FAIL", "packages", f"torch or FlexGen can't be imported: {torch.import_error}")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("flexgen", "torch", "papermill"))
    return Check("OK", "packages", f"Python {platform.python_version()}, {versions}")


def _iostat() -> Check:
    if shutil.which("iostat") is None:
        return Check("warn", "iostat", "not installed (package sysstat): /proc/diskstats is read instead")
    version = iostat_version()
    if version is None:
        return Check("warn", "iostat", "not sysstat's (BusyBox's or macOS's?): /proc/diskstats is read instead")
    return Check("OK", "iostat", version)


def _weights(device: Literal["cuda", "emulated"], root: Path) -> Check:
    model = models.resolve(homework.MODEL[device])
    size = f"{model.name}, {_size(model.weight_bytes)} in FlexGen's layout"
    source = store.kept(model.name)
    if source:
        return Check("OK", "weights", f"{size}, there already ({source})")
    if model in models.SYNTHETIC_MODELS:
        return Check("OK", "weights", f"{size}, made in a moment at the first run")
    free, need = disks.free_bytes(root), 2 * model.weight_bytes
    text = (
        f"{size}, downloaded and converted once (random ones where the hub cannot be had); with both copies "
        f"{_size(need)} of disk, {_size(free)} free"
    )
    return Check("FAIL" if free < need else "OK", "weights", text)


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.0f} MiB"


def _homework(device: Literal["cuda", "emulated"], output_dir: Path) -> list[Check]:
    forecasts = forecast.of_homework(device, output_dir)
    checks = [
        Check("warn" if found.refused else "OK", question.upper(), str(found)) for question, found in forecasts.items()
    ]
    seconds = [found.seconds for found in forecasts.values() if found.seconds is not None]
    total_s = sum(seconds, start=0.0)
    if len(seconds) == len(forecasts) and total_s:
        checks.append(Check("OK", "Q1 to Q4", forecast.in_words(total_s)))
    return checks
