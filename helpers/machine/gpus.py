"""The GPUs that CUDA may use, through NVML: no torch, no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from helpers.machine.data_sheets import Nameplate
from helpers.units import GIB


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA may use here; `index` counts as CUDA does. `other_processes`: None where NVML won't say."""

    index: int
    name: str
    total_gib: float
    free_gib: float
    other_processes: int | None


def cuda_available() -> bool:
    """Whether CUDA may use a GPU here: a driver, a GPU, and not hidden by CUDA_VISIBLE_DEVICES."""
    return bool(visible())


def visible() -> tuple[Gpu, ...]:
    """The GPUs that CUDA may use here; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(index, handle) for index, handle in enumerate(visible_handles()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = gpu_process_ids(handle)
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        total_gib=memory.total / GIB,
        free_gib=memory.free / GIB,
        other_processes=None if processes is None else len(processes - {os.getpid()}),
    )


def compute_capability() -> tuple[int, int] | None:
    """The generation of the GPU that is CUDA's device 0, as CUDA counts; None where NVML won't say."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = visible_handles()
        return tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handles[0])) if handles else None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def nameplate() -> Nameplate:
    """What NVML says of the GPU that is CUDA's device 0, and of its link; where it says nothing at all, nothing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Nameplate()
    try:
        handles = visible_handles()
        return _nameplate(handles[0]) if handles else Nameplate()
    except pynvml.NVMLError:
        return Nameplate()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nameplate(handle: Any) -> Nameplate:
    def asked(function: str, *arguments: int) -> Any:
        try:
            return getattr(pynvml, function)(handle, *arguments) or None  # a virtual GPU may say 0
        except (pynvml.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py
            return None

    capability = asked("nvmlDeviceGetCudaComputeCapability")
    return Nameplate(
        name=asked("nvmlDeviceGetName"),
        pcie_generation=asked("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=asked("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation_now=asked("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width_now=asked("nvmlDeviceGetCurrPcieLinkWidth"),
        memory_clock_mhz=asked("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
        sm_clock_mhz=asked("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        memory_bus_bits=asked("nvmlDeviceGetMemoryBusWidth"),
        cuda_cores=asked("nvmlDeviceGetNumGpuCores"),
        compute_capability=tuple(capability) if capability else None,
    )


def visible_handles() -> list[Any]:
    """NVML handles of the GPUs that CUDA may use, CUDA's device 0 first. Needs nvmlInit; raises pynvml.NVMLError."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    visible = visible_uuids(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in visible]


def visible_uuids(uuids: Sequence[str], cuda_visible_devices: str | None) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA shows, in its order, from all the GPUs' UUIDs and CUDA_VISIBLE_DEVICES.

    As in NVIDIA's CUDA programming guide: indices or (abbreviated) UUIDs, up to the first that is neither.
    An index counts in PCI order here; CUDA's own default, fastest first, differs where GPUs of several kinds
    are mixed and CUDA_DEVICE_ORDER is not PCI_BUS_ID.
    """
    if cuda_visible_devices is None:
        return tuple(uuids)
    visible: list[str] = []
    for entry in cuda_visible_devices.split(","):
        entry = entry.strip()
        if entry.isdecimal() and int(entry) < len(uuids):
            visible.append(uuids[int(entry)])
        elif entry.startswith("MIG-"):
            visible.append(entry)
        elif entry.startswith("GPU-") and len(matches := [uuid for uuid in uuids if uuid.startswith(entry)]) == 1:
            visible += matches
        else:
            break
    return tuple(visible)


def gpu_process_ids(handle: Any) -> set[int] | None:
    """Ids of the processes that hold memory on a GPU; None where NVML won't say. In a container the ids are
    the host's, and others' processes may not be listed."""
    found: set[int] | None = None
    for running in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            found = (found or set()) | {process.pid for process in running(handle)}
        except pynvml.NVMLError:
            continue
    return found
