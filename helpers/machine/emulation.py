"""The machine that the emulated GPU plays: a Colab T4 in slow motion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EmulationProfile:
    """The emulated GPU's memory in GiB, and the links of its machine in GB/s (10^9 bytes)."""

    name: str
    gpu_mem_gib: float
    host_link_gb_s: float
    disk_gb_s: float
    based_on: str


# opt-mini computes a decode pass in about 8 ms on one CPU core, where a T4 computes OPT-1.3B's in 60 ms, and it has
# 1/340 of the weights. The host link is slowed so that it stands to that pass as PCIe stands to the T4's; the disk
# stands 7 to 1 below it, not 40 to 1 as on Colab, so that a sweep takes half a minute and not two.
EMULATED_T4 = EmulationProfile(
    name="slow-motion T4",
    gpu_mem_gib=14.56,
    host_link_gb_s=0.2,
    disk_gb_s=0.03,
    based_on="Colab T4: PCIe 10.2 GB/s, disk 0.25 GB/s, 14.56 GiB (from the figures in outputs/reference/t4-colab)",
)
