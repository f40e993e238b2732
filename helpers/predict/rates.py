"""Fit a machine's rates to measured runs, so that each run's predicted time matches the measured one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from helpers.errors import Refused
from helpers.machine.profiles import MachineProfile
from helpers.predict.schedule import TERMS, G
from helpers.predict.time_model import KERNEL_LOADING, latencies, predict, single
from helpers.settings import RunSettings


def calibrate(profile: MachineProfile, throughputs_tok_s: Mapping[RunSettings, float]) -> MachineProfile:
    """The profile with rates fitted to these measured runs, each of which determines the rate of its bottleneck.

    Raises Refused if two runs have the same bottleneck, or if no rate makes a run as fast or slow as measured.
    """
    shown_by: dict[str, RunSettings] = {}
    for settings in throughputs_tok_s:
        bottleneck = predict(settings, profile).bottleneck
        if bottleneck == KERNEL_LOADING:
            raise Refused(f"calibration: --percent {settings.split} is too short a run to show a rate")
        field = TERMS[bottleneck]
        if field in shown_by:
            raise Refused(
                f"calibration: --percent {shown_by[field].split} and --percent {settings.split} both show only "
                f"{field}; leave one out"
            )
        shown_by[field] = settings
    for _ in range(10):  # each rate moves the others' runs a little
        before = profile
        for field, settings in shown_by.items():
            profile = _with_throughput(profile, field, settings, throughputs_tok_s[settings])
        if all(abs(getattr(profile, f) / getattr(before, f) - 1) < 1e-6 for f in shown_by):
            break
    sources = profile.sources | {
        field: f"calibrated on --percent {settings.split}"
        f"{' --compress-weight' if settings.compress_weight else ''}: {throughputs_tok_s[settings]:g} token/s"
        for field, settings in shown_by.items()
    }
    return profile.model_copy(update={"sources": sources})


def _with_throughput(profile: MachineProfile, field: str, settings: RunSettings, tok_s: float) -> MachineProfile:
    return with_seconds(
        profile,
        field,
        lambda tried: float(latencies(settings, tried)[0].sum()),
        settings.workload.generated_tokens / tok_s,
        f"--percent {settings.split}",
    )


def with_seconds(
    profile: MachineProfile, field: str, seconds_of: Callable[[MachineProfile], float], measured_s: float, what: str
) -> MachineProfile:
    """The profile with `field` such that `seconds_of(profile)` is `measured_s`, by bisection; `what` is measured.

    Raises Refused if no value of `field` does it.
    """

    def with_value(value: float) -> MachineProfile:
        return profile.model_copy(update={field: value})

    def too_slow(value: float) -> bool:
        return seconds_of(with_value(value)) > measured_s

    slow, fast = (1e5, 1e-3) if field.endswith("_us") else (1e-4, 1e5)
    if not too_slow(slow) or too_slow(fast):
        raise Refused(f"calibration: no {field} makes {what} take {measured_s:.4g} s on {profile.name}")
    for _ in range(60):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if too_slow(middle) else (slow, middle)
    return with_value(fast)


@dataclass(frozen=True)
class Loads:
    """Seconds to load an attention layer's and an MLP's weights to the GPU, each without overlap."""

    attention_s: float
    mlp_s: float

    @property
    def block_s(self) -> float:
        return self.attention_s + self.mlp_s


def loads(settings: RunSettings, profile: MachineProfile) -> Loads:
    """Predicted values of FlexGen's own load_weight timer (`--debug-mode breakdown`)."""
    run = single(settings, profile)
    attention_s, mlp_s = (
        float(load.main_thread.item() + load.seconds.item()) for load in map(run.load_weights, (run.attention, run.mlp))
    )
    return Loads(attention_s, mlp_s)


def with_page_cache_of(profile: MachineProfile, settings: RunSettings, measured: Loads) -> MachineProfile:
    """The profile with the overhead per file and the page cache's rate that two kinds of layer show together: attention
    has more and smaller matrices than the MLP. Raises Refused if no rate fits.
    """
    run = single(settings, profile)
    layers = (run.attention, run.mlp)
    steps = np.array([layer.disk_files.item() + 1 for layer in layers])  # a wait for the layer, too
    gigabytes = np.array([layer.disk_bytes.item() for layer in layers]) / G
    seconds = np.array([measured.attention_s, measured.mlp_s]) - gigabytes / profile.h2d_gb_s
    overhead_s, s_per_gb = np.linalg.solve(np.stack([steps, gigabytes], axis=1), seconds)
    if overhead_s > 0 and s_per_gb > 0:
        return profile.model_copy(
            update={"file_overhead_us": 1e6 * float(overhead_s), "page_cache_gb_s": 1 / float(s_per_gb)}
        )
    return with_seconds(
        profile.model_copy(update={"file_overhead_us": 0.0}),
        "page_cache_gb_s",
        lambda tried: loads(settings, tried).block_s,
        measured.block_s,
        "a block's loads",
    )
