"""This machine, as stored in records."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal

from helpers.machine import gpus, limits, torch_check
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.kernel_files import read_text
from helpers.results import Machine
from helpers.units import GIB

MGLRU = Path("/sys/kernel/mm/lru_gen/enabled")


def describe(device: Literal["cuda", "emulated"], profile_name: str | None) -> Machine:
    """This machine, for a record; `ram_gib` is the RAM that this process may use. Creates no CUDA context here."""
    gpu_mem_gib: float | None
    if device == "emulated":
        name, gpu_mem_gib = f"emulated {profile_name}" if profile_name else "emulated", EMULATED_T4.gpu_mem_gib
    else:
        name, gpu_mem_gib = _gpu()
    return Machine(
        name=name,
        cpu=limits.cpu_name(),
        cpu_count=limits.cpu_count(),
        ram_gib=round(limits.memory_allowance().total_bytes / GIB, 3),
        gpu_mem_gib=None if gpu_mem_gib is None else round(gpu_mem_gib, 3),
        platform=platform.platform(),
        mglru=read_text(MGLRU).strip() or None,
        profile=profile_name,
    )


def _gpu() -> tuple[str, float | None]:
    """Name and memory in GiB of CUDA's device 0, from NVML, or from torch (in a child process) where NVML fails."""
    found = gpus.look()
    if found.gpus and found.gpus[0].total_gib is not None:
        return found.gpus[0].name, found.gpus[0].total_gib
    by_torch = torch_check.run().gpus if found.gpus or found.faults else ()
    if by_torch:
        return by_torch[0][0], by_torch[0][1]
    return found.gpus[0].name if found.gpus else "CUDA GPU that NVML does not name", None
