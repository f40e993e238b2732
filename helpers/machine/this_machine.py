"""This machine, as a record names it."""

from __future__ import annotations

import platform
from typing import Literal

from helpers.machine import gpus, limits
from helpers.machine.emulation import EMULATED_T4
from helpers.results import Machine
from helpers.units import GIB


def describe(device: Literal["cuda", "emulated"], profile_name: str | None) -> Machine:
    """This machine, for a record; RAM in GiB is what this process may use of it. Creates no CUDA context."""
    found = gpus.visible() if device == "cuda" else ()
    if device == "emulated":
        name = f"emulated {profile_name}" if profile_name else "emulated"
        gpu_mem_gib = EMULATED_T4.gpu_mem_gib
    else:
        name = found[0].name if found else "CUDA GPU that NVML does not name"
        gpu_mem_gib = round(found[0].total_gib, 3) if found else None
    return Machine(
        name=name,
        cpu=limits.cpu_name(),
        cpu_count=limits.cpu_count(),
        ram_gib=round(limits.memory_allowance().total_bytes / GIB, 3),
        gpu_mem_gib=gpu_mem_gib,
        platform=platform.platform(),
        profile=profile_name,
    )
