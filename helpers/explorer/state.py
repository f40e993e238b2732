"""What is set, and what a move of one control makes of it: every state is one that FlexGen can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helpers import models
from helpers.settings import SHORTEST_PROMPT, RunSettings

if TYPE_CHECKING:
    from helpers.explorer.bench import Bench

# GPU and CPU share of what lives on one tier.
HOMES = {"GPU": (100, 0), "CPU": (0, 100), "disk": (0, 0)}
# Where the sliders of the batch stop.
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BATCH_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class State:
    """A machine's name and a run on it."""

    machine: str
    settings: RunSettings


def home(gpu: int, cpu: int) -> str:
    """The tier that holds all of something, by name."""
    return next(tier for tier, shares in HOMES.items() if shares == (gpu, cpu))


def values(state: State) -> dict[str, Any]:
    """What each control stands at."""
    settings, split, work = state.settings, state.settings.split, state.settings.workload
    return {
        "machine": state.machine,
        "model": settings.model,
        "weights_gpu": split.weights_gpu,
        "weights_cpu": split.weights_cpu,
        "cache": home(split.cache_gpu, split.cache_cpu),
        "activations": home(split.activations_gpu, split.activations_cpu),
        "gpu_batch_size": work.gpu_batch_size,
        "num_gpu_batches": work.num_gpu_batches,
        "prompt_len": work.prompt_len,
        "gen_len": work.gen_len,
        "compress_weight": settings.compress_weight,
        "compress_cache": settings.compress_cache,
        "cpu_cache_compute": settings.cpu_cache_compute,
        "pin_weight": settings.pin_weight,
    }


def moved(state: State, control: str, value: Any, bench: Bench) -> State:
    """The state after one control is set to `value`; what can then no longer be, gives way.

    The shares of the weights add up to 100: the one not moved yields what the moved one takes beyond the disk's.
    So do prompt and generated length, within the model's positions.
    """
    set_to = values(state) | {control: value}
    if set_to["model"] not in bench.models[set_to["machine"]]:
        set_to["model"] = bench.first_model(set_to["machine"])
    _keep_within(set_to, control, ("weights_gpu", "weights_cpu"), 100)
    positions = models.resolve(set_to["model"]).max_positions
    set_to["prompt_len"] = min(set_to["prompt_len"], positions - 1)
    set_to["gen_len"] = min(set_to["gen_len"], positions - SHORTEST_PROMPT)
    _keep_within(set_to, control, ("gen_len", "prompt_len"), positions)
    if set_to["cache"] == "GPU":  # attention is computed where the cache is
        set_to["cpu_cache_compute"] = False
    return State(set_to["machine"], _settings(state.settings, set_to, bench))


def _keep_within(set_to: dict[str, Any], control: str, pair: tuple[str, str], most: int) -> None:
    """Keep two values within `most` together: the one that was not moved gives way, else the second."""
    stays, gives = pair[::-1] if control == pair[1] else pair
    set_to[gives] = min(set_to[gives], most - set_to[stays])


def _settings(before: RunSettings, set_to: dict[str, Any], bench: Bench) -> RunSettings:
    """The run that the controls say; what they do not say stays as it was. Raises Refused if it could not be one."""
    cache_gpu, cache_cpu = HOMES[set_to["cache"]]
    activations_gpu, activations_cpu = HOMES[set_to["activations"]]
    fields = {name: getattr(before, name) for name in RunSettings.model_fields}
    switches = ("model", "compress_weight", "compress_cache", "cpu_cache_compute", "pin_weight")
    fields |= {name: set_to[name] for name in switches}
    fields["device"] = bench.device_of(set_to["machine"])
    fields["split"] = type(before.split)(
        weights_gpu=set_to["weights_gpu"],
        weights_cpu=set_to["weights_cpu"],
        cache_gpu=cache_gpu,
        cache_cpu=cache_cpu,
        activations_gpu=activations_gpu,
        activations_cpu=activations_cpu,
    )
    fields["workload"] = type(before.workload)(
        **{name: set_to[name] for name in ("gpu_batch_size", "num_gpu_batches", "prompt_len", "gen_len")}
    )
    return RunSettings(**fields)
