"""Is this machine ready? One line a check: GPU, memory, disk, packages, iostat, weights."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from helpers import homework, lab, machine, models, weights
from helpers.sampling.disk import iostat_version

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


def check(offload_root: Path | None = None) -> list[Check]:
    """Every check, in the order in which a person would ask."""
    root = offload_root or weights.home() / "offload"
    return [_gpu(), _memory(), _disk(root), *_packages(), _iostat(), _weights(root)]


def as_json(checks: list[Check]) -> dict:
    return {"ready": all(c.status != "FAIL" for c in checks), "checks": [asdict(c) for c in checks]}


def _gpu() -> Check:
    if not machine.cuda_available():
        return Check(
            "warn", "GPU",
            "none that CUDA can use: runs go to the emulated GPU, on the CPU, and every figure says so "
            "(in Colab: Runtime > Change runtime type > T4 GPU)",
        )
    gpus = machine.gpus()
    if not gpus:
        return Check("warn", "GPU", "one that NVML does not describe")
    first = gpus[0]
    text = f"{first.name}, {first.total_gib:.1f} GiB, {first.free_gib:.1f} GiB free"
    if len(gpus) > 1:
        text += f"; the first of {len(gpus)}, FlexGen uses one"
    if first.other_processes:
        return Check("warn", "GPU", f"{text}; {first.other_processes} other processes use it and disturb figures")
    return Check("OK", "GPU", text)


def _memory() -> Check:
    allowance = machine.memory_allowance()
    free = allowance.free_bytes / machine.GIB
    text = f"{free:.1f} GiB free of {allowance.total_bytes / machine.GIB:.1f} GiB ({allowance.total_limited_by})"
    if machine.cuda_available() and free < PINNED_COPY_BUFFERS_GIB + 2:
        return Check("warn", "RAM", f"{text}; FlexGen pins {PINNED_COPY_BUFFERS_GIB:.0f} GiB for its copy threads")
    return Check("OK", "RAM", text)


def _disk(root: Path) -> Check:
    disk = machine.disk_of(root)
    text = f"{disk.filesystem} at {root}, {machine.free_bytes(root) / machine.GIB:.1f} GiB free"
    if disk.is_memory:
        return Check("FAIL", "disk", f"{text}: that is memory, not a disk; set OFFLOAD_LAB_HOME to a folder on a disk")
    if disk.is_network:
        return Check("warn", "disk", f"{text}: a network or FUSE file system; its figures are not a disk's")
    counters = f"counters of {disk.device}" if disk.device else f"no counters ({disk.found_by})"
    return Check("OK" if disk.device else "warn", "disk", f"{text}, {counters}")


def _packages() -> list[Check]:
    wanted = {}
    for line in (lab.ROOT / "requirements.txt").read_text().splitlines():
        found = re.match(r"([A-Za-z0-9_.-]+)", line)
        if found:
            wanted[found[1]] = line.split("#")[0].strip()
    missing = []
    for name, requirement in wanted.items():
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
    if missing:
        return [Check("FAIL", "packages", f"missing: {' '.join(missing)}; pip install them")]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("flexgen", "torch", "papermill"))
    return [Check("OK", "packages", versions)]


def _iostat() -> Check:
    if shutil.which("iostat") is None:
        return Check("warn", "iostat", "not installed (package sysstat): /proc/diskstats is read instead")
    return Check("OK", "iostat", iostat_version())


def _weights(root: Path) -> Check:
    device = lab.choose_device("auto")
    model = models.resolve(homework.MODEL[device])
    need = model.weight_bytes * 2  # as downloaded and as FlexGen reads them
    free = machine.free_bytes(root)
    text = f"{model.name} is {model.weight_bytes / machine.GIB:.2f} GiB in FlexGen's layout"
    if free < need:
        return Check("FAIL", "weights", f"{text}; {free / machine.GIB:.1f} GiB free of {need / machine.GIB:.1f} needed")
    return Check("OK", "weights", text)
