"""Time and space of a run on the emulated GPU before it starts: every rate but the CPU's own is fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from helpers.errors import Refused
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.limits import MemoryAllowance
from helpers.models import FP16_BYTES
from helpers.placement import place
from helpers.predict import time_model
from helpers.settings import RunSettings
from helpers.units import GIB

LONGEST_S = 300.0
MOST_WRITTEN_GIB = 4.0
# One EPYC core, roughly: a process's start, a layer's Python, weights read and converted, fp32 arithmetic.
START_S = 1.5
LAYER_S = 0.0006
WEIGHTS_PER_S = 1.5e9
FLOP_PER_S = 60e9
WRITE_BYTES_PER_S = 200e6  # synthetic weights, generated and written
PROCESS_GIB = 0.3


@dataclass(frozen=True)
class Cost:
    """One repeat's seconds, of which `measured_s` count towards the repeat budget; GiB written; GiB of RAM."""

    seconds: float
    measured_s: float
    written_gib: float
    host_gib: float


def cost(settings: RunSettings, weights_are_kept: bool) -> Cost:
    """The cost of one repeat, including writing weights that aren't kept yet."""
    model, work, split = settings.opt_model, settings.workload, settings.split
    placed = place(model, split.weights_gpu, split.weights_cpu, settings.compress_weight)
    predicted = time_model.predict(settings, EMULATED_T4)
    passes = work.gen_len
    if settings.debug_mode:  # FlexGen times 20 decode layer-steps and projects the rest
        passes = min(passes, 1 + math.ceil(20 / len(model.layers)))
    decode_s = predicted.decode_pass_latencies_s[: passes - 1]
    measured_s = max(predicted.prefill_latency_s, _cpu_s(settings, work.prompt_len))
    measured_s += sum(max(seconds, _cpu_s(settings, 1)) for seconds in decode_s)
    weights_bytes = FP16_BYTES * sum(math.prod(shape) for shape in model.files.values())
    cache_bytes = model.kv_cache_bytes(work.effective_batch, work.prompt_len, work.gen_len)
    written = 0 if weights_are_kept else weights_bytes
    written += placed.bytes_by_tier["disk"] if settings.compress_weight else 0  # fp16 files are linked, not copied
    written += cache_bytes * split.cache_disk // 100
    in_memory = placed.total_bytes - placed.bytes_by_tier["disk"] + cache_bytes * (100 - split.cache_disk) // 100
    largest = max(math.prod(shape) for shape in model.files.values())
    return Cost(
        seconds=START_S + written / WRITE_BYTES_PER_S + _cpu_s(settings, 32) + measured_s,
        measured_s=measured_s,
        written_gib=written / GIB,
        host_gib=PROCESS_GIB + (in_memory + 3 * FP16_BYTES * largest) / GIB,
    )


def _cpu_s(settings: RunSettings, tokens: int) -> float:
    """Seconds of a pass's arithmetic on this CPU, which computes in fp32."""
    model, sequences = settings.opt_model, settings.workload.effective_batch
    weights = model.weight_bytes / FP16_BYTES
    steps = len(model.layers) * settings.workload.num_gpu_batches
    return steps * LAYER_S + weights / WEIGHTS_PER_S + 2 * weights * sequences * tokens / FLOP_PER_S


def check(settings: RunSettings, weights_are_kept: bool, allowance: MemoryAllowance, allow_long: bool) -> None:
    """Raises Refused, with the figures, if the run does not fit in RAM, or takes long without `allow_long`."""
    found = cost(settings, weights_are_kept)
    takes = (
        f"{settings.opt_model.name} on the emulated GPU would take {in_words(found.seconds)} a repeat, write "
        f"{found.written_gib:.1f} GiB and need {found.host_gib:.1f} GiB of RAM"
    )
    if found.host_gib * GIB > allowance.free_bytes:
        free_gib = allowance.free_bytes / GIB
        raise Refused(
            f"{takes}; {free_gib:.1f} GiB are free ({allowance.free_limited_by}): take a smaller model or batch"
        )
    if not allow_long and (found.seconds > LONGEST_S or found.written_gib > MOST_WRITTEN_GIB):
        raise Refused(
            f"{takes}; over {in_words(LONGEST_S)} or {MOST_WRITTEN_GIB:g} GiB written needs --allow-long (or take a "
            "smaller model, batch or length)"
        )


def in_words(seconds: float) -> str:
    """A rough duration: "about 40 s", "about 9 min", "about 3 h"."""
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.0f} h"
