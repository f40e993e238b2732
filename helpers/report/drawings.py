"""Explanatory drawings, 700 px wide: `python -m helpers.report.drawings` redraws those in docs/drawings/."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from helpers import models, paths
from helpers.machine.profiles import T4_COLAB, MachineProfile
from helpers.placement import place
from helpers.predict.host_memory import COPY_THREADS, copy_buffer_bytes
from helpers.report.plots import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION
from helpers.settings import OffloadSplit, RunSettings
from helpers.units import GIB

FOLDER = paths.ROOT / "docs" / "drawings"
WIDTH_PX = 700
PIXELS_PER_INCH = 100
SHARPNESS = 2  # a picture has this many pixels a side for each that it is shown at
TIER_COLOURS = {"GPU": BLUE, "CPU": ORANGE, "disk": GREEN}
INK = "#222222"


@dataclass(frozen=True)
class Drawing:
    """A picture that notebooks show at its natural width, and its content in words."""

    name: str
    alt: str
    figure: Figure

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=SHARPNESS * PIXELS_PER_INCH, facecolor="white")
        return buffer.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"image/png": self.png(), "text/plain": self.alt}, {"image/png": {"alt": self.alt, "width": WIDTH_PX}}


def tiers(machine: MachineProfile = T4_COLAB, model_name: str = "opt-1.3b") -> Drawing:
    """The three tiers with their sizes, the links with their rates, and what reading the weights over each takes."""
    model_bytes = place(models.resolve(model_name), 100, 0, False).total_bytes
    figure, axes = _canvas(300)
    boxes = (
        ("GPU", f"{machine.gpu_mem_gib:.0f} GiB memory", 20),
        ("CPU", f"{machine.host_ram_gib:.0f} GiB RAM", 265),
        ("disk", "room for everything", 510),
    )
    links = (
        (machine.gpu_mem_gb_s, "GPU memory", BLUE, 20),
        (machine.h2d_gb_s, "over PCIe", ORANGE, 265),
        (machine.disk_gb_s, "from the disk", GREEN, 510),
    )
    for tier, size, x in boxes:
        _box(axes, x, 40, 170, 92, TIER_COLOURS[tier])
        _text(axes, x + 85, 74, tier, size=17, weight="bold", color="white")
        _text(axes, x + 85, 108, size, color="white", size=10.5)
    for x, rate in ((260, machine.h2d_gb_s), (505, machine.disk_gb_s)):
        _arrow(axes, x, 86, x - 65, 86)
        _text(axes, x - 32, 66, "PCIe" if x == 260 else "read", size=9)
        _text(axes, x - 32, 106, f"{_short(rate)} GB/s", size=9, weight="bold")
    _text(
        axes,
        350,
        172,
        f"Reading {model_name}'s weights once ({model_bytes / GIB:.2f} GiB), as every pass must:",
        size=11,
    )
    longest = model_bytes / 1e9 / machine.disk_gb_s
    for rate, where, colour, x in links:
        seconds = model_bytes / 1e9 / rate
        _box(axes, x, 212, max(3, 170 * seconds / longest), 20, colour, round_px=2)
        _text(axes, x, 200, where, size=10, ha="left")
        _text(axes, x, 252, _duration(seconds), size=14, weight="bold", color=colour, ha="left")
        _text(axes, x, 276, f"at {_short(rate)} GB/s", size=9.5, color=GREY, ha="left")
    _text(axes, 680, 20, f"machine: {machine.name}", size=9, color=GREY, ha="right")
    times = ", ".join(f"{where} {_duration(model_bytes / 1e9 / rate)}" for rate, where, *_ in links)
    alt = f"Three tiers of {machine.name}: GPU, CPU memory, disk. Reading {model_name}'s weights once takes: {times}."
    return Drawing("tiers", alt, figure)


def prefill_and_decode(prompt_len: int = 128, gen_len: int = 16) -> Drawing:
    """One prefill pass over the prompt, then one decode pass for each further token; all weights in every pass."""
    figure, axes = _canvas(290)
    _text(axes, 20, 24, "Prefill: the prompt, one pass", ha="left", size=11.5, weight="bold", color=VERMILION)
    _text(
        axes, 302, 24, f"Decode: {gen_len - 1} passes, one token each", ha="left", size=11.5, weight="bold", color=BLUE
    )
    for row in range(8):
        for column in range(8):
            _box(axes, 60 + 14 * column, 48 + 10 * row, 11, 7, VERMILION, round_px=1)
    _text(axes, 115, 142, f"{prompt_len} tokens", size=10)
    shown = 5
    for step in range(shown):
        x = 282 + 84 * step
        _box(axes, x + 20, 80, 14, 14, BLUE, round_px=2)
        _text(axes, x + 27, 142, "1 token", size=10)
        if step == 3:
            _text(axes, x + 69, 87, "...", size=16, weight="bold")
    for x, width, kind in ((40, 150, "prefill"), *((282 + 84 * step, 54, "decode") for step in range(shown))):
        _box(axes, x, 160, width, 30, "#dddddd", round_px=4)
        _text(axes, x + width / 2, 175, "all weights" if kind == "prefill" else "all", size=9.5)
    for x in (204, *(350 + 84 * step for step in range(shown - 1))):
        _arrow(axes, x - 6, 175, x + 8 + (50 if x == 204 else 0), 175)
    _text(axes, 20, 222, "KV cache", ha="left", size=10, weight="bold")
    for x, height in ((40, 20), *((282 + 84 * step, 20 + 2.5 * (step + 1)) for step in range(shown))):
        _box(axes, x, 270 - height, 150 if x == 40 else 54, height, SKY, round_px=2)
    _text(axes, 236, 258, "grows by\none token\nper pass", size=8.5, color=GREY)
    alt = (
        f"Prefill sends all {prompt_len} prompt tokens through the model in one pass; decoding then takes "
        f"{gen_len - 1} passes of one token each. Every pass needs all weights, and the KV cache grows by one token "
        "per pass."
    )
    return Drawing("prefill_and_decode", alt, figure)


def six_numbers(percent: str = "50 30 100 0 100 0") -> Drawing:
    """What each of the six numbers of --percent places, and that the rest of each pair goes to disk."""
    split = OffloadSplit.parse(percent)
    figure, axes = _canvas(270)
    _text(axes, 20, 30, "--percent", ha="left", size=13, family="monospace", weight="bold")
    shares = (split.percent[:2], split.percent[2:4], split.percent[4:])
    names = ("weights", "KV cache", "activations")
    roles = ("read whole in every pass", "grows with batch and tokens", "on one tier, unsplit")
    for i, ((gpu, cpu), name, role) in enumerate(zip(shares, names, roles)):
        x = 150 + 185 * i
        for share, tier, place_x in ((gpu, "GPU", x + 30), (cpu, "CPU", x + 95)):
            _text(axes, place_x, 30, str(share), size=16, family="monospace", weight="bold", color=TIER_COLOURS[tier])
            _text(axes, place_x, 54, tier, size=9.5, color=TIER_COLOURS[tier])
        axes.plot([x + 5, x + 5, x + 125, x + 125], [68, 76, 76, 68], color=GREY, linewidth=1.2)
        _text(axes, x + 65, 94, name, size=12, weight="bold")
        _text(axes, x + 65, 114, role, size=8.5, color=GREY)
        top = 132.0
        for share, tier in ((gpu, "GPU"), (cpu, "CPU"), (100 - gpu - cpu, "disk")):
            if not share:
                continue
            _box(axes, x + 15, top, 100, share, TIER_COLOURS[tier], round_px=2)
            if share >= 14:
                _text(axes, x + 65, top + share / 2, f"{share} % {tier}", size=10, color="white", weight="bold")
            top += share
    _text(axes, 20, 182, "the rest of\neach pair\ngoes to disk", ha="left", size=9.5, color=GREEN)
    _text(
        axes,
        350,
        254,
        "A threshold, not a percentage: FlexGen moves whole tensors, so compare the achieved split.",
        size=9.5,
    )
    words = "; ".join(f"{name} {gpu} % GPU, {cpu} % CPU, the rest disk" for (gpu, cpu), name in zip(shares, names))
    return Drawing("six_numbers", f"--percent {percent}: {words}.", figure)


def block_schedule(layers: int = 4, batches: int = 3) -> Drawing:
    """FlexGen's zig-zag over layers and micro-batches, and how a layer's loading hides behind another's computing."""
    figure, axes = _canvas(400)
    _text(
        axes,
        20,
        22,
        "Each layer computes every micro-batch before the next layer starts",
        ha="left",
        size=11.5,
        weight="bold",
    )
    left, top, wide, high = 130, 52, 110, 34
    for j in range(layers):
        _text(axes, left + wide * j + 45, top - 10, f"layer {j + 1}", size=9.5, color=GREY)
        for k in range(batches):
            x, y = left + wide * j, top + (high + 8) * k
            _box(axes, x, y, 90, high, BLUE, round_px=4, alpha=0.5 + 0.5 * (j * batches + k + 1) / (layers * batches))
            _text(axes, x + 45, y + high / 2, str(j * batches + k + 1), color="white", weight="bold", size=12)
        if j + 1 < layers:
            start = (left + wide * j + 92, top + (high + 8) * (batches - 1) + high / 2)
            _arrow(axes, *start, left + wide * (j + 1) - 3, top + high / 2, color=INK)
    for k in range(batches):
        _text(
            axes, left - 12, top + (high + 8) * k + high / 2, f"micro-batch {k + 1}", ha="right", size=9.5, color=GREY
        )
    _text(axes, 632, 106, "weights of a\nlayer are loaded\nonce and used\nfor all of them", size=9, color=GREY)

    _text(
        axes,
        20,
        206,
        "While a layer computes, the next one's weights are on their way",
        ha="left",
        size=11.5,
        weight="bold",
    )
    rows = (("load weights", ORANGE, 1), ("load KV cache", SKY, 0), ("compute", BLUE, 0), ("store KV cache", GREEN, 0))
    begin, slot = 130, 128
    for r, (name, colour, ahead) in enumerate(rows):
        y = 232 + 30 * r
        _text(axes, begin - 12, y + 11, name, ha="right", size=10)
        for j in range(4):
            layer = j + ahead
            x = begin + slot * j
            if name == "load weights":
                _box(axes, x, y, slot - 6, 22, colour, round_px=3)
                _text(axes, x + (slot - 6) / 2, y + 11, f"layer {layer + 1}", color="white", size=9.5, weight="bold")
                continue
            for k in range(batches):
                part = (slot - 6) / batches
                if name == "compute":
                    _box(axes, x + part * k, y, part - 3, 22, colour, round_px=3)
                    _text(axes, x + part * k + part / 2 - 1, y + 11, f"{layer + 1}.{k + 1}", color="white", size=8.5)
                elif name == "load KV cache":
                    _box(axes, x + part * k, y, 0.55 * part, 22, colour, round_px=3)
                else:
                    _box(axes, x + part * k + 0.4 * part, y, 0.5 * part, 22, colour, round_px=3)
    for j in range(1, 4):
        axes.plot([begin + slot * j - 3] * 2, [226, 356], color=GREY, linewidth=0.9, linestyle=":")
    _arrow(axes, begin, 366, begin + 4 * slot, 366, color=GREY)
    _text(axes, begin + 2 * slot, 384, "time of a slot = the slowest of the four (at best)", size=9.5, color=GREY)
    alt = (
        "FlexGen computes a layer for every micro-batch before the next layer, so weights loaded once serve all of "
        "them. Meanwhile it loads the next layer's weights and the next KV cache and stores the last one."
    )
    return Drawing("block_schedule", alt, figure)


def page_cache(machine: MachineProfile = T4_COLAB, model_name: str = "opt-1.3b") -> Drawing:
    """Where the page cache sits between disk and process, and what FlexGen's copy buffers leave of it."""
    figure, axes = _canvas(370)
    boxes = (
        (510, "disk", GREEN, "weights' files"),
        (275, "page cache", GREEN, "free RAM, kept by\nthe kernel"),
        (20, "process", ORANGE, "copy buffers,\nthen the GPU"),
    )
    for x, name, colour, what in boxes:
        _box(axes, x, 30, 170, 86, colour, alpha=0.75 if name == "page cache" else 1.0)
        _text(axes, x + 85, 55, name, size=14, weight="bold", color="white")
        _text(axes, x + 85, 90, what, size=9.5, color="white")
    _arrow(axes, 505, 73, 450, 73)
    _text(axes, 478, 52, "miss", size=10, weight="bold", color=VERMILION)
    _text(axes, 478, 94, f"{_short(machine.disk_gb_s)} GB/s", size=9)
    _arrow(axes, 270, 73, 195, 73)
    _text(axes, 232, 52, "hit", size=10, weight="bold", color=BLUE)
    _text(axes, 232, 94, f"{_short(machine.page_cache_gb_s)} GB/s", size=9)
    axes.plot([595, 595, 105, 105], [118, 138, 138, 124], color=GREY, linewidth=1.3, linestyle="--")
    _arrow(axes, 105, 130, 105, 118, color=GREY)
    _text(axes, 350, 138, "direct reader (O_DIRECT): past the page cache", size=9.5, color=GREY, background="white")

    weights_gib = place(models.resolve(model_name), 100, 0, False).total_bytes / GIB
    ram, process = machine.host_ram_gib, machine.host_overhead_gib + machine.mapped_files_gib
    _text(
        axes,
        20,
        178,
        f"RAM of {machine.name}, {ram:.1f} GiB, while {model_name} runs from disk",
        ha="left",
        size=11.5,
        weight="bold",
    )
    scale = 500 / ram
    on_disk = RunSettings(model=model_name, split=OffloadSplit.parse("0 0 100 0 100 0"), device="cuda")
    fitted = on_disk.model_copy(update={"copy_buffer": "fit"})
    for y, name, run in ((200, "FlexGen as is", on_disk), (268, "--copy-buffer fit", fitted)):
        pinned = COPY_THREADS * copy_buffer_bytes(run) / GIB
        _text(axes, 150, y + 18, name, ha="right", size=10)
        left = 160.0
        cache = max(0.0, ram - process - pinned)
        fits = cache >= weights_gib
        for gib, what, colour in (
            (process, "processes", GREY),
            (pinned, "pinned copy buffers", ORANGE),
            (cache, "page cache", GREEN),
        ):
            _box(axes, left, y, scale * gib - 2, 36, colour, round_px=3)
            if scale * gib > 110:
                _text(axes, left + scale * gib / 2, y + 18, f"{what} {gib:.1f}", size=9.5, color="white", weight="bold")
            elif scale * gib > 55:
                _text(axes, left + scale * gib / 2, y + 18, f"{gib:.1f}", size=9.5, color="white", weight="bold")
            left += scale * gib
        verdict = "stay in the page cache" if fits else "do not fit: every pass reads the disk"
        verdict = f"{weights_gib:.1f} GiB of weights {verdict}"
        _text(axes, 660, y + 50, verdict, ha="right", size=9.5, color=BLUE if fits else VERMILION, weight="bold")
    for i, (what, colour) in enumerate((("processes", GREY), ("pinned copy buffers", ORANGE), ("page cache", GREEN))):
        _box(axes, 160 + 160 * i, 342, 14, 14, colour, round_px=2)
        _text(axes, 180 + 160 * i, 349, what, ha="left", size=9.5)
    alt = (
        "The page cache is free RAM between the disk and the process: a hit costs a copy within memory, a miss the "
        f"disk. On {machine.name}, FlexGen's 8 GiB of pinned copy buffers leave too little of it for {model_name}'s "
        "weights; with buffers that fit the tensors, all of them stay."
    )
    return Drawing("page_cache", alt, figure)


def four_bit_group(seed: int = 4) -> Drawing:
    """A group of 64 fp16 weights, stored as 64 4-bit steps between its minimum and maximum."""
    figure, axes = _canvas(320)
    weights = np.random.default_rng(seed).normal(0, 0.02, 64)
    low, high = float(weights.min()), float(weights.max())
    steps = np.round((weights - low) / (high - low) * 15)
    left, right, top, bottom = 80, 400, 50, 230

    def to_y(value: Any) -> Any:
        return bottom - (value - low) / (high - low) * (bottom - top)

    _text(axes, 20, 22, "One group: 64 weights of a tensor", ha="left", size=11.5, weight="bold")
    for step in range(16):
        y = to_y(low + (high - low) * step / 15)
        axes.plot([left, right], [y, y], color="#cccccc", linewidth=0.8)
        _text(axes, right + 18, y, str(step), size=8, color=GREY)
    xs = np.linspace(left + 4, right - 4, 64)
    rounded = low + steps / 15 * (high - low)
    axes.vlines(xs, to_y(weights), to_y(rounded), color=VERMILION, linewidth=1.2)
    axes.scatter(xs, to_y(weights), s=14, color=BLUE, zorder=3)
    axes.scatter(xs, to_y(rounded), s=9, facecolors="white", edgecolors=VERMILION, zorder=4, linewidths=0.9)
    _text(axes, left - 8, top, "max", ha="right", size=10, weight="bold")
    _text(axes, left - 8, bottom, "min", ha="right", size=10, weight="bold")
    _text(axes, right + 18, top - 18, "step", size=8.5, color=GREY)
    axes.scatter([88, 208], [258, 258], s=18, color=[BLUE, "white"], edgecolors=[BLUE, VERMILION])
    _text(axes, 98, 258, "fp16 weight", ha="left", size=9.5)
    _text(axes, 218, 258, "nearest of 16 steps", ha="left", size=9.5)
    x = 470
    _text(axes, x, 58, "fp16: 64 x 16 bits", ha="left", size=10)
    _box(axes, x, 70, 200, 26, BLUE, round_px=3)
    _text(axes, x + 100, 83, "128 bytes", color="white", weight="bold", size=10)
    _text(axes, x, 126, "64 x 4 bits + minimum, scale", ha="left", size=10)
    _box(axes, x, 138, 50, 26, VERMILION, round_px=3)
    _text(axes, x + 25, 151, "32", color="white", weight="bold", size=10)
    _box(axes, x + 52, 138, 7, 26, INK, round_px=1)
    _text(axes, x + 66, 151, "+ 4 bytes (two fp16)", ha="left", size=9.5)
    _text(axes, x, 192, "36 bytes: 3.6 times less", ha="left", size=10, weight="bold")
    _text(axes, x, 212, "to read, not 4 times", ha="left", size=10, weight="bold")
    _text(axes, x, 240, "and each use pays for", ha="left", size=9.5, color=GREY)
    _text(axes, x, 258, "weight = minimum + step x scale", ha="left", size=9.5, color=GREY)
    _text(
        axes,
        350,
        300,
        "Smaller to move, dearer to use: which of the two counts depends on where the weights are.",
        size=9.5,
    )
    alt = (
        "A group of 64 fp16 weights takes 128 bytes. In 4 bits each becomes one of 16 steps between the group's "
        "minimum and maximum: 32 bytes, and 4 for minimum and scale."
    )
    return Drawing("four_bit_group", alt, figure)


ALL = (tiers, six_numbers, block_schedule, prefill_and_decode, page_cache, four_bit_group)


# ---- drawing in pixels, from the upper left -------------------------------------------------------------------------


def _canvas(height_px: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_PX / PIXELS_PER_INCH, height_px / PIXELS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH_PX)
    axes.set_ylim(height_px, 0)
    axes.axis("off")
    return figure, axes


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str, round_px: float = 8, alpha: float = 1.0
) -> None:
    round_px = min(round_px, width / 2, height / 2)
    style = f"round,pad=0,rounding_size={round_px}"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="none", alpha=alpha)
    )


def _text(axes: Axes, x: float, y: float, text: str, background: str = "", **style: Any) -> None:
    defaults: dict[str, Any] = {"ha": "center", "va": "center_baseline", "size": 10, "color": INK, "linespacing": 1.35}
    style = defaults | style
    if background:
        style["bbox"] = {"facecolor": background, "edgecolor": "none", "pad": 2}
    axes.text(x, y, text, parse_math=False, **style)


def _arrow(axes: Axes, x: float, y: float, to_x: float, to_y: float, color: str = INK) -> None:
    axes.annotate(
        "",
        (to_x, to_y),
        (x, y),
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0},
    )


def _short(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 9.95 else f"{rate:.2g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in ALL:
        drawing = draw()
        (FOLDER / f"{drawing.name}.png").write_bytes(drawing.png())


if __name__ == "__main__":
    main()
