"""Refuse runs that don't fit in memory before they start, and note where it will be tight."""

from __future__ import annotations

from helpers.errors import Refused
from helpers.machine.limits import MemoryAllowance
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import HostMemory, host_memory, host_memory_here
from helpers.results import Machine
from helpers.settings import RunSettings
from helpers.units import GIB, MIB

# torch's default workspace of cuBLAS (CublasHandlePool.cpp): :4096:8 from Hopper on, :4096:2:16:8 before.
WORKSPACE_BYTES, HOPPER_WORKSPACE_BYTES = int(8.125 * MIB), 32 * MIB
HOPPER = (9, 0)
# On top of FlexGen's tensors a process holds Python, torch and CUDA: about this much on an H200.
PROCESS_BYTES = 2 * GIB


def check_gpu(settings: RunSettings, where: Machine, compute_capability: tuple[int, int] | None) -> None:
    """Raises Refused if even the least peak that FlexGen can reach is more than the GPU's memory."""
    if where.gpu_mem_gib is None:
        return
    workspace = HOPPER_WORKSPACE_BYTES if compute_capability and compute_capability >= HOPPER else WORKSPACE_BYTES
    if settings.device == "emulated":
        workspace = 0
    peak = peak_gpu_memory(settings, workspace)
    if peak.range_gib[0] > where.gpu_mem_gib:
        largest = max(peak.parts, key=peak.parts.__getitem__)
        raise Refused(
            f"the run needs {peak.range_gib[0]:.1f} GiB of GPU memory or more (at its peak: {peak.step}; most of it: "
            f"{largest}, {peak.parts[largest] / GIB:.1f} GiB), {where.name} has {where.gpu_mem_gib:.1f} GiB: "
            "take a smaller batch, or put less on the GPU"
        )


def check_host(settings: RunSettings, allowance: MemoryAllowance) -> list[str]:
    """A note where the run will be tight in host memory. Raises Refused if its tensors and buffers alone are more
    than this process may still use; where fitted copy buffers would do, it says so.
    """
    needed = host_memory_here(settings)
    free = allowance.free_bytes
    fitted = host_memory(settings.model_copy(update={"copy_buffer": "fit"}))
    if needed.total_bytes > free:
        way_out = "put less on the CPU, or take a smaller batch"
        if fitted.total_bytes + PROCESS_BYTES <= free:
            way_out = f"--copy-buffer fit needs {_gib(fitted.total_bytes)}"
        raise Refused(
            f"the run needs {_gib(needed.total_bytes)} of host memory ({_parts(needed)}), {_gib(free)} are free "
            f"({allowance.free_limited_by}): {way_out}"
        )
    if needed.total_bytes + PROCESS_BYTES > free:
        return [
            f"host memory is tight: the run takes {_gib(needed.total_bytes)} plus its process, {_gib(free)} were "
            f"free ({allowance.free_limited_by}); little is left for page cache"
        ]
    return []


def _parts(memory: HostMemory) -> str:
    largest_first = sorted(memory.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{part} {_gib(counted)}" for part, counted in largest_first[:3])


def _gib(counted: int) -> str:
    return f"{counted / GIB:.1f} GiB"
