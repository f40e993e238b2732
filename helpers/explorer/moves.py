"""The state after one control has moved: always one that FlexGen can run."""

from __future__ import annotations

from typing import Any

from helpers import homework, models
from helpers.explorer.bench import Bench
from helpers.explorer.state import HOMES, State, WhatIf, values
from helpers.settings import SHORTEST_PROMPT, OffloadSplit, RunSettings

# Controls that set an option of the same name.
_WORKLOAD = ("gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len")
_SWITCHES = ("compress_weight", "compress_cache", "cpu_cache_compute", "pin_weight", "overlap")


def moved(state: State, control: str, value: Any, bench: Bench) -> State:
    """The state with one control set to `value`; whatever contradicts it gives way.

    The shares of the weights add up to 100: the one that was not moved yields what the moved one takes beyond the
    disk's. So do prompt and generated length, within the model's positions. Between the emulated GPU and real ones
    the workload changes to the homework's, at which measured runs are known.
    """
    set_to = values(state) | {control: value}
    device = bench.device_of(set_to["machine"])
    if set_to["model"] not in bench.models[set_to["machine"]]:
        set_to["model"] = homework.MODEL[device]
    if control == "machine" and device != state.settings.device:
        set_to |= homework.WORKLOAD[device].model_dump()
    _keep_within(set_to, control, ("weights_gpu", "weights_cpu"), 100)
    positions = models.resolve(set_to["model"]).max_positions
    set_to["prompt_len"] = min(set_to["prompt_len"], positions - 1)
    set_to["gen_len"] = min(set_to["gen_len"], positions - SHORTEST_PROMPT)
    _keep_within(set_to, control, ("gen_len", "prompt_len"), positions)
    if set_to["cache"] == "GPU":  # attention is computed where the cache is
        set_to["cpu_cache_compute"] = False
    what_if = WhatIf(*(set_to[name] for name in ("disk_gb_s", "h2d_gb_s", "host_ram_gib")))
    return State(set_to["machine"], _settings(state.settings, set_to, device), what_if)


def _keep_within(set_to: dict[str, Any], control: str, pair: tuple[str, str], most: int) -> None:
    """Keep two values within `most` together: the one that was not moved gives way, else the second."""
    stays, gives = pair[::-1] if control == pair[1] else pair
    set_to[gives] = min(set_to[gives], most - set_to[stays])


def _settings(before: RunSettings, set_to: dict[str, Any], device: str) -> RunSettings:
    """The run that the controls describe; its other options stay as they were."""
    (cache_gpu, cache_cpu), (activations_gpu, activations_cpu) = HOMES[set_to["cache"]], HOMES[set_to["activations"]]
    split = OffloadSplit(
        weights_gpu=set_to["weights_gpu"],
        weights_cpu=set_to["weights_cpu"],
        cache_gpu=cache_gpu,
        cache_cpu=cache_cpu,
        activations_gpu=activations_gpu,
        activations_cpu=activations_cpu,
    )
    return before.replace(
        device=device,
        split=split,
        copy_buffer="fit" if set_to["fitted_buffers"] else "stock",
        disk_reader="direct" if set_to["direct_reader"] else "stock",
        page_cache="cold" if set_to["cold"] else "natural",
        **{name: set_to[name] for name in ("model", *_WORKLOAD, *_SWITCHES)},
    )
