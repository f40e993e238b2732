"""Explain an out-of-memory failure: what the run needed, what was available, and a way out."""

from __future__ import annotations

from helpers.machine import gpus, limits
from helpers.machine.limits import MemoryAllowance
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import copy_buffer_elements, host_memory_here
from helpers.results import Failure, FailureKind
from helpers.settings import RunSettings
from helpers.units import GIB, MIB

LESS_ON_GPU = "put less on the GPU (--percent), or take a smaller batch (--gpu-batch-size)"
LESS_ON_HOST = "put less on the CPU (--percent), take a smaller batch, or end other programs that hold memory"
CUDA_CONTEXT_GIB = 0.6  # a process's own share of the GPU, next to its tensors


def explained(
    failure: Failure, settings: RunSettings, before: MemoryAllowance, mapped_bytes: int | None = None
) -> Failure:
    """A failure for lack of memory, with the run's needs and a way out; any other failure unchanged.

    `before`: the memory that this process could use before the run. `mapped_bytes`: the address space that the run had
    mapped when it failed. Call right after the run's process has ended: the GPU's memory is then what others left.
    """
    kind: FailureKind = failure.kind
    # The workspace is the smaller GPUs': a few MiB next to weights and cache.
    needed_on_gpu = peak_gpu_memory(settings, 0).likeliest_bytes
    if kind == "gpu_oom":
        more = _taken_by_others(needed_on_gpu) or (
            f"this run's tensors need about {_size(needed_on_gpu)} on the GPU at their peak: {LESS_ON_GPU}"
        )
    elif kind == "host_pin_oom":
        pinned_bytes = host_memory_here(settings).pinned_bytes
        # CUDA says the same where the GPU has no room for its own tables.
        taken = _taken_by_others(needed_on_gpu) if limits.memory_allowance().free_bytes > pinned_bytes else None
        if taken:
            kind, more = "gpu_oom", f"host memory is free, the GPU is full: {taken}"
        else:
            more = (
                f"host memory could not be pinned, the GPU itself may be empty: this run pins {_size(pinned_bytes)}, "
                f"{_there_was(before)}: {_less_on_host(settings)}, or do not pin weights (--pin-weight false)"
            )
    elif kind == "host_oom":
        address_space = limits.address_space_limit()
        if address_space is not None and mapped_bytes is not None:
            # Copy buffers are mapped whole, however little passes through them.
            buffers = 8 * GIB if settings.copy_buffer == "stock" and copy_buffer_elements(settings) else 0
            more = (
                f"ulimit -v allows {_size(address_space)} of address space, {_size(mapped_bytes)} were mapped, most "
                f"by torch and FlexGen; FlexGen's copy buffers take up to {_size(buffers)} and this run's tensors "
                f"{_size(_host_bytes(settings))}: raise it to {_size(mapped_bytes + buffers + _host_bytes(settings))}"
            )
        else:
            more = f"{_needed_on_host(settings)}, {_there_was(before)}: {_less_on_host(settings)}"
    else:
        return failure
    return failure.model_copy(update={"kind": kind, "message": f"{failure.message.rstrip('.')}; {more}"})


def _taken_by_others(needed_bytes: int) -> str | None:
    """Name the processes that hold the GPU's memory, if the run would fit without them."""
    found = gpus.visible()
    if not found or found[0].total_gib is None or found[0].free_gib is None:
        return None
    total_gib, free_gib, needed_gib = found[0].total_gib, found[0].free_gib, needed_bytes / GIB + CUDA_CONTEXT_GIB
    if not free_gib < needed_gib <= total_gib:
        return None
    others = gpus.others_holding_memory()
    named = ", ".join(name if gib is None else f"{name} holds {gib:.2f} GiB" for name, gib in others[:3])
    return (
        f"others have taken {total_gib - free_gib:.2f} GiB of the GPU's {total_gib:.2f} GiB, and this run needs about "
        f"{needed_gib:.2f} GiB: end {named or 'those processes, which cannot be seen from here'}, or wait for the end"
    )


def killed(whom: str, settings: RunSettings, before: MemoryAllowance, kills_before: int | None) -> Failure:
    """A run ended by SIGKILL: from the kernel's OOM killer if its count has risen, else from somebody.

    `whom` begins the sentence. `kills_before`: `limits.oom_kills()` before the run.
    """
    kills = limits.oom_kills()
    memory = f"{_needed_on_host(settings)}, {_there_was(before)}"
    if kills is None or kills_before is None:
        how = "killed from outside (SIGKILL), as the kernel does when memory runs out; nothing here counts that"
    elif kills > kills_before:
        how, memory = "killed by the kernel's OOM killer: memory ran out", f"{memory}: {_less_on_host(settings)}"
    else:
        how = "killed from outside (SIGKILL), by a person or a program, not by the kernel's OOM killer"
    return Failure(kind="killed", message=f"{whom} {how}; {memory}")


def _less_on_host(settings: RunSettings) -> str:
    if settings.copy_buffer == "stock" and copy_buffer_elements(settings):
        return f"fit FlexGen's copy buffers of 8 GiB to what passes through them (--copy-buffer fit), {LESS_ON_HOST}"
    return LESS_ON_HOST


def _host_bytes(settings: RunSettings) -> int:
    on_host = host_memory_here(settings).total_bytes
    return on_host + (peak_gpu_memory(settings, 0).likeliest_bytes if settings.device == "emulated" else 0)


def _needed_on_host(settings: RunSettings) -> str:
    emulated = ", the emulated GPU's among them" if settings.device == "emulated" else ""
    return f"this run's tensors and copy buffers need up to {_size(_host_bytes(settings))} of host memory{emulated}"


def _there_was(before: MemoryAllowance) -> str:
    return f"{_size(before.free_bytes)} of {_size(before.total_bytes)} were free before it ({before.free_limited_by})"


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
