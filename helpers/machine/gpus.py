"""The GPUs that CUDA may use, from NVML or, where NVML fails, from torch in a child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from helpers.machine import torch_check
from helpers.machine.data_sheets import Nameplate
from helpers.units import GIB

NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
# A driver's device files: NVIDIA's, Tegra's (whose NVML may be missing) and WSL's.
DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap", "/dev/dxg")


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA may use here; `index` counts as CUDA does. None: NVML doesn't say."""

    index: int
    uuid: str
    name: str
    total_gib: float | None
    free_gib: float | None
    other_processes: int | None


@dataclass(frozen=True)
class Found:
    """NVML's answer: the healthy GPUs that CUDA may use, and its reasons for the missing ones, a line each."""

    gpus: tuple[Gpu, ...] = ()
    faults: tuple[str, ...] = ()


def cuda_available() -> bool:
    """Whether CUDA can use a GPU that CUDA_VISIBLE_DEVICES doesn't hide. Asks torch if NVML fails."""
    found = look()
    return bool(found.gpus or (found.faults and torch_check.run().gpus))


def visible() -> tuple[Gpu, ...]:
    """The healthy GPUs that CUDA may use here; none without a driver."""
    return look().gpus


def look() -> Found:
    """Ask NVML for the GPUs that CUDA may use here."""
    gpus: list[Gpu] = []
    faults: list[str] = []
    try:
        with nvml():
            for index, handle in visible_handles(faults):
                try:
                    gpus.append(_gpu(index, handle))
                except pynvml.NVMLError as error:
                    faults.append(f"GPU {index}: {error}")
    except pynvml.NVMLError as error:
        if error.value not in NO_DRIVER or any(map(os.path.exists, DEVICE_FILES)):
            faults.append(f"NVML: {error}")
    return Found(tuple(gpus), tuple(faults))


def environment() -> dict[str, str]:
    """Environment variables that hide faulty GPUs from CUDA, which might otherwise use no GPU at all."""
    found = look()
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in found.gpus)} if found.gpus and found.faults else {}


@contextmanager
def nvml() -> Iterator[None]:
    """NVML, initialised. Raises pynvml.NVMLError if it can't be."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpu(index: int, handle: Any) -> Gpu:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:  # GPU and host share one memory
            raise
        memory = None
    processes = memory_by_process(handle)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        total_gib=memory.total / GIB if memory else None,
        free_gib=memory.free / GIB if memory else None,
        other_processes=None if processes is None else len(processes.keys() - {os.getpid()}),
    )


def compute_capability() -> tuple[int, int] | None:
    """The compute capability of CUDA's device 0; None where NVML doesn't say."""
    return _ask_first(lambda handle: tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)))


def nameplate() -> Nameplate:
    """NVML's description of CUDA's device 0 and of its link; empty where NVML says nothing at all."""
    return _ask_first(_nameplate) or Nameplate()


def others_holding_memory() -> list[tuple[str, float | None]]:
    """Other processes on CUDA's device 0: name and id as far as they can be seen from here, GiB that they hold (None
    where NVML doesn't say)."""
    processes = _ask_first(memory_by_process) or {}
    found = []
    for pid, held in sorted(processes.items(), key=lambda item: -(item[1] or 0)):
        if pid == os.getpid():
            continue
        try:
            name = f"{psutil.Process(pid).name()} ({pid})"
        except psutil.Error:  # the id is the host's, and this is a container
            name = f"process {pid}"
        found.append((name, None if held is None else held / GIB))
    return found


def _ask_first(question: Callable[[Any], Any]) -> Any:
    with suppress(pynvml.NVMLError), nvml():
        handles = visible_handles([])
        return question(handles[0][1]) if handles else None
    return None


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


def visible_handles(faults: list[str]) -> list[tuple[int, Any]]:
    """CUDA's indices and NVML's handles of the GPUs that CUDA may use. Needs nvml(); adds NVML's reason for each GPU
    that it can't give to `faults`."""
    uuids: list[str] = []
    lost: dict[str, str] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as error:
            uuids.append(f"lost {index}")
            lost[uuids[-1]] = f"GPU {index}: {error}"
    handles = []
    for index, uuid in enumerate(visible_uuids(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))):
        try:
            if uuid in lost:
                faults.append(lost[uuid])
            else:
                handles.append((index, pynvml.nvmlDeviceGetHandleByUUID(uuid)))
        except pynvml.NVMLError as error:
            faults.append(f"GPU {index}: {error}")
    return handles


def visible_uuids(uuids: Sequence[str], cuda_visible_devices: str | None) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA shows, in its order, from all the GPUs' UUIDs and CUDA_VISIBLE_DEVICES.

    As in NVIDIA's CUDA programming guide: indices or (abbreviated) UUIDs, up to the first that is neither.
    An index counts in PCI order here; CUDA's own default, fastest first, differs where GPUs of several kinds
    are mixed and CUDA_DEVICE_ORDER is not PCI_BUS_ID.
    """
    if cuda_visible_devices is None:
        return tuple(uuids)
    visible: list[str] = []
    for entry in map(str.strip, cuda_visible_devices.split(",")):
        abbreviated = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
        if entry.isdecimal() and int(entry) < len(uuids):
            visible.append(uuids[int(entry)])
        elif entry.startswith("MIG-"):
            visible.append(entry)
        elif len(abbreviated) == 1:
            visible += abbreviated
        else:
            break
    return tuple(visible)


def memory_by_process(handle: Any) -> dict[int, int | None] | None:
    """Bytes that each process holds on a GPU, by its id; None where NVML doesn't say. In a container the ids are the
    host's, and others' processes may be missing."""
    found: dict[int, int | None] | None = None
    for running in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            found = (found or {}) | {process.pid: process.usedGpuMemory for process in running(handle)}
        except pynvml.NVMLError:
            continue
    return found
