"""The controls' state: a machine, hypothetical changes to it, and a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helpers.machine.profiles import MachineProfile
from helpers.settings import RunSettings

# GPU and CPU share of what lives on one tier.
HOMES = {"GPU": (100, 0), "CPU": (0, 100), "disk": (0, 0)}


@dataclass(frozen=True)
class WhatIf:
    """Hypothetical rates and sizes of a machine; 0 leaves the machine's own."""

    disk_gb_s: float = 0.0
    h2d_gb_s: float = 0.0
    host_ram_gib: float = 0.0

    def __bool__(self) -> bool:
        return self != WhatIf()

    def __str__(self) -> str:
        words = []
        if self.disk_gb_s:
            words.append(f"disk {self.disk_gb_s:g} GB/s")
        if self.h2d_gb_s:
            words.append(f"PCIe {self.h2d_gb_s:g} GB/s")
        if self.host_ram_gib:
            words.append(f"RAM {self.host_ram_gib:g} GiB")
        return ", ".join(words)

    def applied_to(self, profile: MachineProfile) -> MachineProfile:
        """The profile with these changes; writing to the disk and copying to the host change with their counterparts.

        A machine whose disk keeps its pace whatever is cached (the emulated one) gets no page cache from more RAM.
        """
        if not self:
            return profile
        changed: dict[str, Any] = {"name": f"{profile.name}, hypothetical: {self}"}
        if self.disk_gb_s:
            others = ("direct_disk_gb_s", "disk_write_gb_s")
            changed |= {name: getattr(profile, name) * self.disk_gb_s / profile.disk_gb_s for name in others}
            changed["disk_gb_s"] = self.disk_gb_s
        if self.h2d_gb_s:
            d2h_gb_s = profile.d2h_gb_s * self.h2d_gb_s / profile.h2d_gb_s
            changed |= {"h2d_gb_s": self.h2d_gb_s, "d2h_gb_s": d2h_gb_s}
        if self.host_ram_gib:
            changed["host_ram_gib"] = self.host_ram_gib
            if profile.mapped_files_gib >= profile.host_ram_gib:
                changed["mapped_files_gib"] = self.host_ram_gib
        return profile.model_copy(update=changed)


@dataclass(frozen=True)
class State:
    """A machine's name, a run on it, and hypothetical changes to the machine."""

    machine: str
    settings: RunSettings
    what_if: WhatIf = WhatIf()

    @property
    def where(self) -> str:
        """The machine as every label names it."""
        return f"{self.machine}, hypothetical: {self.what_if}" if self.what_if else self.machine


def values(state: State) -> dict[str, Any]:
    """The value of each control."""
    settings, split, work = state.settings, state.settings.split, state.settings.workload
    return {
        "machine": state.machine,
        "model": settings.model,
        "weights_gpu": split.weights_gpu,
        "weights_cpu": split.weights_cpu,
        "cache": _home(split.cache_gpu, split.cache_cpu),
        "activations": _home(split.activations_gpu, split.activations_cpu),
        "gpu_batch_size": work.gpu_batch_size,
        "num_gpu_batches": work.num_gpu_batches,
        "prompt_len": work.prompt_len,
        "gen_len": work.gen_len,
        "compress_weight": settings.compress_weight,
        "compress_cache": settings.compress_cache,
        "cpu_cache_compute": settings.cpu_cache_compute,
        "pin_weight": settings.pin_weight,
        "overlap": settings.overlap,
        "fitted_buffers": settings.copy_buffer == "fit",
        "direct_reader": settings.disk_reader == "direct",
        "cold": settings.page_cache == "cold",
        "disk_gb_s": state.what_if.disk_gb_s,
        "h2d_gb_s": state.what_if.h2d_gb_s,
        "host_ram_gib": state.what_if.host_ram_gib,
    }


def _home(gpu: int, cpu: int) -> str:
    """The tier that holds all of something."""
    return next(tier for tier, shares in HOMES.items() if shares == (gpu, cpu))
