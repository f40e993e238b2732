"""Memory that ran out, in words: what a run needed, what there was, what to change."""

from __future__ import annotations

from helpers.machine import limits
from helpers.machine.limits import MemoryAllowance
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import copy_buffer_elements, host_memory_here
from helpers.results import Failure
from helpers.settings import RunSettings
from helpers.units import GIB, MIB

LESS_ON_GPU = "put less on the GPU (--percent), or take a smaller batch (--gpu-batch-size)"
LESS_ON_HOST = "put less on the CPU (--percent), take a smaller batch, or end what else holds memory"


def explained(failure: Failure, settings: RunSettings, before: MemoryAllowance) -> Failure:
    """A failure for want of memory, with the run's needs and a way out; any other as it is.

    `before`: what this process might use before the run.
    """
    if failure.kind == "gpu_oom":
        # The workspace is the smaller GPUs': a few MiB beside weights and cache.
        needed = peak_gpu_memory(settings, 0).likeliest_bytes
        more = f"this run's tensors need about {_size(needed)} on the GPU at their peak: {LESS_ON_GPU}"
    elif failure.kind == "host_pin_oom":
        pinned = _size(host_memory_here(settings).pinned_bytes)
        more = (
            f"host memory could not be pinned, the GPU itself may be empty: this run pins {pinned}, "
            f"{_there_was(before)}: {_less_on_host(settings)}, or do not pin weights (--pin-weight false)"
        )
    elif failure.kind == "host_oom":
        more = f"{_needed_on_host(settings)}, {_there_was(before)}: {_less_on_host(settings)}"
    else:
        return failure
    return failure.model_copy(update={"message": f"{failure.message.rstrip('.')}; {more}"})


def killed(whom: str, settings: RunSettings, before: MemoryAllowance, kills_before: int | None) -> Failure:
    """A run ended by SIGKILL: by the kernel's OOM killer if its count has risen, or else by someone.

    `whom` begins the sentence: who was killed. `kills_before`: `limits.oom_kills()` before the run.
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


def _needed_on_host(settings: RunSettings) -> str:
    needed = host_memory_here(settings).total_bytes
    if settings.device == "emulated":
        needed += peak_gpu_memory(settings, 0).likeliest_bytes
        return f"this run's tensors and copy buffers ask for up to {_size(needed)}, the emulated GPU's among them"
    return f"this run's tensors and copy buffers need {_size(needed)} of host memory"


def _there_was(before: MemoryAllowance) -> str:
    return f"{_size(before.free_bytes)} of {_size(before.total_bytes)} were free before it ({before.free_limited_by})"


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
