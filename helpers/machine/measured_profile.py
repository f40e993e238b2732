"""The profile of a machine whose ceilings were measured."""

from __future__ import annotations

import re

from helpers.errors import Refused
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.profiles import T4_COLAB, T4_GCP, T4_GCP_CPUS, MachineProfile, numbers


def from_ceilings(ceilings: MachineCeilings) -> MachineProfile:
    """The profile of a measured machine: its ceilings, and t4-colab's numbers for the rest, so marked. A few probe
    runs improve it (`calibration.calibrate`). Raises Refused for a missing ceiling.
    """
    machine = ceilings.machine
    ceiling_of = {
        "gpu_mem_gib": machine.gpu_mem_gib,
        "host_ram_gib": machine.ram_gib,
        "gpu_mem_gb_s": ceilings.gpu_copy_gb_s,
        "gpu_fp16_tflop_s": ceilings.matmul_tflop_s,
        "h2d_gb_s": ceilings.host_to_device_gb_s,
        "d2h_gb_s": ceilings.device_to_host_gb_s,
        "host_copy_gb_s": ceilings.page_cache_read_gb_s,
        "page_cache_gb_s": ceilings.page_cache_read_gb_s,
        "large_file_gb_s": ceilings.page_cache_read_gb_s,
        "disk_gb_s": ceilings.disk_read_gb_s,
        "direct_disk_gb_s": ceilings.disk_read_gb_s,
    }
    measured: dict[str, float] = {}
    for field, value in ceiling_of.items():
        if value is None:
            raise Refused(f"{machine.name}: {field} was not measured, and a machine profile needs it")
        measured[field] = value
    hopper_or_later = re.search(r"\b(G?H[12]00|G?B[23]00|GH200)\b", machine.name)
    derived = {
        # Decompression moves the same bytes through GPU memory on every GPU.
        "dequantize_gb_s": T4_COLAB.dequantize_gb_s * measured["gpu_mem_gb_s"] / T4_COLAB.gpu_mem_gb_s,
        "disk_write_gb_s": measured["disk_gb_s"],
        "cpu_attention_gb_s": T4_GCP.cpu_attention_gb_s * (machine.cpu_count or 1) / T4_GCP_CPUS,
        "cublas_workspace_mib": 32.0 if hopper_or_later else T4_COLAB.cublas_workspace_mib,
    }
    how = {
        "dequantize_gb_s": "t4-colab's, by GPU memory",
        "disk_write_gb_s": "not measured: as it reads",
        "cpu_attention_gb_s": "t4-gcp's, by CPUs",
        "cublas_workspace_mib": "torch's default for this GPU's name",
    }
    others = {field: getattr(T4_COLAB, field) for field in numbers() if field not in measured | derived}
    sources = (
        dict.fromkeys(measured, f"measured on this machine, {ceilings.folder}")
        | how
        | dict.fromkeys(others, "not measured: t4-colab's")
    )
    return MachineProfile(name=machine.name, sources=sources, **measured, **derived, **others)
