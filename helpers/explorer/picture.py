"""The view as one picture: what stays is drawn once, what a move changes is drawn over it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray
from PIL import Image

from helpers.analysis.values import plain, seconds
from helpers.explorer.lettering import LetteringCanvas
from helpers.explorer.split_map import SplitMap
from helpers.explorer.view import MemoryUse, View, bytes_in_words, off_by
from helpers.report.plots import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, Plot

WIDTH_PX, HEIGHT_PX, DPI = 980, 700, 100
SMALL, MEDIUM = 8, 9  # points

# Left, bottom, width and height of each panel, in parts of the figure.
WEIGHTS = (0.055, 0.745, 0.425, 0.155)
MEMORY = (0.02, 0.345, 0.46, 0.315)
PARTS = (0.145, 0.075, 0.335, 0.20)
MAP = (0.585, 0.42, 0.343, 0.48)
COLOURS = (0.94, 0.42, 0.013, 0.48)
SPEED = (0.60, 0.105, 0.36, 0.17)
TITLE_PX = 42  # at the top

TIER_COLOURS = {"gpu": BLUE, "cpu": ORANGE, "disk": GREEN}
TIER_NAMES = {"gpu": "GPU", "cpu": "CPU", "disk": "disk"}
PART_COLOURS = (BLUE, ORANGE, GREEN, SKY, VERMILION, "#CC79A7", "#F0E442", GREY)
PARTS_NAMED = 6
TERMS_SHOWN = 5
BACKGROUNDS_KEPT = 16  # of 2.7 MB
PALETTE = (matplotlib.colormaps["viridis"](np.arange(256))[:, :3] * 255).astype(np.uint8)


@dataclass(frozen=True)
class _Frame:
    """What axes and titles depend on. Scales end at round numbers, so that they rest while a slider moves."""

    emulated: bool
    weight_bytes: int
    pass_s: tuple[float, float]
    tok_s: tuple[float, float]
    some_do_not_fit: bool

    @classmethod
    def of(cls, view: View) -> _Frame:
        slowest, fastest = view.splits.range_tok_s
        batch = view.state.settings.workload.effective_batch
        low, high = _round_down(slowest), _round_up(fastest)
        return cls(
            emulated=view.emulated,
            weight_bytes=sum(share.achieved_bytes for share in view.weights.values()),
            pass_s=(_decade(math.floor, batch / fastest / 10), _decade(math.ceil, batch / slowest * 6)),
            tok_s=(low, high if high > low else 2 * low),
            some_do_not_fit=not view.splits.fits[~np.isnan(view.splits.tok_s)].all(),
        )


def _decade(rounded: Callable[[float], int], value: float) -> float:
    return 10.0 ** rounded(math.log10(value))


def _round_down(value: float) -> float:
    """The next of 1, 2, 5, 10, ... below."""
    decade = 10.0 ** math.floor(math.log10(value))
    return decade * max(step for step in (1, 2, 5) if step * decade <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, ... above."""
    return 1 / _round_down(1 / value)


def plot(view: View, name: str) -> Plot:
    """The picture of a state on its own, for where nothing moves."""
    dashboard = Dashboard(titled=True)
    dashboard.paint(view)
    return Plot(name, f"{view.state.settings.split} of {view.state.settings.model}. {view.headline}", dashboard.figure)


class Dashboard:
    """One figure whose axes are made once. `png` draws a view: its frame, if it is none of the last ones', and over
    it what a move changes. Text is what costs: `titled` adds what stands beside the sliders anyway."""

    def __init__(self, titled: bool = False) -> None:
        self.titled = titled
        self.figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI)
        self.canvas = LetteringCanvas(self.figure)
        self.page = self._axes((0, 0, 1, 1))
        self.page.set(xlim=(0, 1), ylim=(0, 1))
        self.page.set_axis_off()
        self.weights, self.memory, self.parts = self._axes(WEIGHTS), self._axes(MEMORY), self._axes(PARTS)
        self.map, self.colours, self.speed = self._axes(MAP), self._axes(COLOURS), self._axes(SPEED)
        self._frames: list[Artist] = []
        self._moving: list[tuple[Axes, Artist]] = []
        self._drawn: _Frame | None = None
        self._backgrounds: dict[_Frame, Any] = {}
        self._prepare()

    def png(self, view: View) -> bytes:
        """The view's picture, as PNG."""
        self.paint(view)
        if self._drawn not in self._backgrounds:
            while len(self._backgrounds) >= BACKGROUNDS_KEPT:
                self._backgrounds.pop(next(iter(self._backgrounds)))
            self.canvas.draw()
            self._backgrounds[self._drawn] = self.canvas.copy_from_bbox(self.figure.bbox)
        self.canvas.restore_region(self._backgrounds[self._drawn])
        self.map.draw_artist(self.image)
        for axes, artist in self._moving:
            axes.draw_artist(artist)
        content = io.BytesIO()
        below_title = (0, 0 if self.titled else TITLE_PX, WIDTH_PX, HEIGHT_PX)
        pixels = Image.frombuffer("RGBA", (WIDTH_PX, HEIGHT_PX), self.canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
        pixels.crop(below_title).convert("RGB").save(content, "png", compress_level=1)
        return content.getvalue()

    def paint(self, view: View) -> None:
        """Put a view on the figure, in the place of the last one."""
        frame = _Frame.of(view)
        if frame != self._drawn:
            self._set_frame(frame)
            self._drawn = frame
        for _, artist in self._moving:
            artist.remove()
        self._moving.clear()
        if self.titled:
            self._paint_title(view)
        self._paint_weights(view)
        self._paint_memory(view.gpu, top=1.0)
        self._paint_memory(view.host, top=0.47)
        self._paint_parts(view)
        self._paint_map(view)
        self._paint_speed(view)

    # ---- what stays ------------------------------------------------------------------------------------------------

    def _axes(self, place: tuple[float, float, float, float]) -> Axes:
        axes = self.figure.add_axes(place)
        axes.tick_params(labelsize=SMALL, length=3)
        return axes

    def _prepare(self) -> None:
        for axes in (self.weights, self.parts, self.speed):
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.yaxis.set_major_locator(NullLocator())
            axes.grid(axis="x", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
        self.weights.set_ylim(2.6, -0.6)
        self.parts.set_ylim(TERMS_SHOWN + 0.6, -0.6)
        self.speed.set_ylim(1.5, -0.6)
        for row, name in enumerate(TIER_NAMES.values()):
            self._name(self.weights, row, name)
        for row, name in enumerate(("predicted", "measured")):
            self._name(self.speed, row, name)
        for axes in (self.parts, self.speed):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plain(x, 1)))
            axes.xaxis.set_minor_locator(NullLocator())
        self.memory.set(xlim=(0, 1), ylim=(0, 1))
        self.memory.set_axis_off()
        self.image = self.map.imshow(
            np.zeros((101, 101, 4), np.uint8),
            origin="lower",
            extent=(-0.5, 100.5, -0.5, 100.5),
            aspect="auto",
            interpolation="nearest",
            animated=True,
        )
        self.map.set_xlabel("GPU share of the weights (%, asked)", fontsize=SMALL)
        self.map.set_ylabel("CPU share of the weights (%, asked)", fontsize=SMALL, labelpad=2)
        self.map.spines[["top", "right"]].set_visible(False)
        self.map.text(
            0.98,
            0.985,
            "the rest is on disk",
            transform=self.map.transAxes,
            ha="right",
            va="top",
            fontsize=SMALL,
            color=GREY,
        )
        self.colours.imshow(PALETTE.reshape(256, 1, 3), origin="lower", aspect="auto", extent=(0, 1, 0, 1))
        self.colours.xaxis.set_major_locator(NullLocator())
        self.colours.tick_params(
            labelsize=SMALL, length=2, pad=2, left=False, labelleft=False, right=True, labelright=True
        )

    def _name(self, axes: Axes, row: int, name: str) -> None:
        axes.text(-0.015, row, name, fontsize=SMALL, ha="right", va="center", transform=axes.get_yaxis_transform())

    def _set_frame(self, frame: _Frame) -> None:
        """Titles, limits and ticks."""
        for artist in self._frames:
            artist.remove()
        aside = ", emulated" if frame.emulated else ""
        titles = (
            (WEIGHTS, 0.02, "Weights by tier: asked (pale) and achieved"),
            (MEMORY, 0.02, f"Memory against capacity{aside}"),
            (PARTS, 0.02, f"Parts of a forward pass, each alone{aside}"),
            (MAP, MAP[0], f"Every split: predicted token/s{aside}"),
            (SPEED, 0.54, f"This split: total throughput{aside}"),
        )
        self._frames = [
            self.page.text(x, bottom + height + 0.022, title, fontsize=MEDIUM, fontweight="bold")
            for (_, bottom, _, height), x, title in titles
        ]
        total = frame.weight_bytes
        self.weights.set_xlim(0, 1.4 * total)
        self.weights.set_xticks([0, total / 2, total], ["0", "", bytes_in_words(total)])
        self.parts.set_xlim(frame.pass_s)
        self.parts.set_xlabel(f"seconds, log scale{aside}", fontsize=SMALL, labelpad=1)
        self.speed.set_xlim(frame.tok_s[0] / 2, frame.tok_s[1] * 2)
        self.speed.set_xlabel(f"token/s, log scale{aside}", fontsize=SMALL, labelpad=1)
        for axis in (self.parts.xaxis, self.speed.xaxis):
            axis.set_major_locator(LogLocator(numticks=8))
        self.colours.set_yticks(*_colour_ticks(*frame.tok_s))
        if frame.some_do_not_fit:
            self._frames.append(
                self.page.text(
                    MAP[0] + MAP[2] - 0.01,
                    MAP[1] + 0.88 * MAP[3],
                    "striped: does not fit",
                    fontsize=SMALL,
                    color=GREY,
                    ha="right",
                )
            )

    # ---- what moves ------------------------------------------------------------------------------------------------

    def _add(self, axes: Axes, artist: Artist) -> None:
        artist.set_animated(True)  # not part of the background
        axes.add_artist(artist)
        self._moving.append((axes, artist))

    def _text(self, axes: Axes, x: float, y: float, text: str, **style) -> None:
        usual = {"fontsize": SMALL, "va": "center", "parse_math": False, "clip_on": False}
        self._add(axes, Text(x, y, text, **(usual | style)))

    def _bar(self, axes: Axes, left: float, y: float, width: float, height: float, colour: str, **style) -> None:
        self._add(axes, Rectangle((left, y - height / 2), width, height, facecolor=colour, **style))

    def _paint_title(self, view: View) -> None:
        settings = view.state.settings
        work = settings.workload
        words = [
            f"{settings.model} on {view.where}",
            f"--percent {settings.split}",
            f"batch {work.gpu_batch_size} x {work.num_gpu_batches}",
            f"prompt {work.prompt_len}, generated {work.gen_len}",
        ]
        words += ["4-bit weights"] * settings.compress_weight + ["4-bit KV cache"] * settings.compress_cache
        self._text(self.page, 0.02, 0.983, " · ".join(words), fontsize=MEDIUM, fontweight="bold")
        colour = VERMILION if view.why_not else "black"
        self._text(self.page, 0.02, 0.956, view.headline, fontsize=SMALL, color=colour)

    def _paint_weights(self, view: View) -> None:
        total = sum(share.achieved_bytes for share in view.weights.values())
        for row, (tier, share) in enumerate(view.weights.items()):
            colour = TIER_COLOURS[tier]
            for y, count, alpha, said in (
                (row - 0.2, share.asked_bytes, 0.4, f"{share.asked_percent} %, {bytes_in_words(share.asked_bytes)}"),
                (
                    row + 0.2,
                    share.achieved_bytes,
                    1.0,
                    f"{share.achieved_percent:.1f} %, {bytes_in_words(share.achieved_bytes)}",
                ),
            ):
                self._bar(self.weights, 0, y, count, 0.36, colour, alpha=alpha)
                self._text(self.weights, count + 0.015 * total, y, said, fontsize=SMALL - 1)

    def _paint_memory(self, memory: MemoryUse, top: float) -> None:
        """A bar of the parts, as long as its share of the capacity, and the parts named under it."""
        need, most = bytes_in_words(memory.need_bytes), bytes_in_words(memory.most_bytes)
        upto = "" if most == need else f" (up to {most})"
        said = f"{memory.name}: {need}{upto} of {bytes_in_words(memory.capacity_bytes)}"
        self._text(
            self.memory,
            0,
            top - 0.05,
            said if memory.fits else f"{said}: does not fit",
            color="black" if memory.fits else VERMILION,
        )
        full = 0.80  # where the capacity ends
        y, height, left = top - 0.145, 0.07, 0.0
        self._bar(self.memory, 0, y, full, height, "#eeeeee")
        for rank, (name, size) in enumerate(_named(memory.parts).items()):
            right = min(left + full * size / memory.capacity_bytes, 1.0)
            colour = PART_COLOURS[rank]
            self._bar(self.memory, left, y, right - left, height, colour)
            left = right
            x, line = 0.5 * (rank % 2), top - 0.225 - 0.073 * (rank // 2)
            self._bar(self.memory, x, line, 0.02, 0.045, colour)
            self._text(self.memory, x + 0.03, line, f"{name} {bytes_in_words(size)}", fontsize=SMALL - 1)
        self._add(self.memory, Line2D([full, full], [y - 0.045, y + 0.045], color="black", linewidth=1.2))

    def _paint_parts(self, view: View) -> None:
        parts = view.parts_of_a_pass_s
        shown = list(parts.items())[:TERMS_SHOWN]
        low, high = self.parts.get_xlim()
        margin = (high / low) ** 0.02
        for row, (name, time_s) in enumerate([("the pass", view.pass_s), *shown]):
            colour = GREY if row == 0 else VERMILION if row == 1 else SKY
            right = max(min(time_s, high), low * margin)
            self._bar(self.parts, low, row, right - low, 0.62, colour)
            said = seconds(time_s)
            end = right
            if row == 0:
                longest, together = min(shown[0][1], high), min(sum(parts.values()), high)
                self._add(
                    self.parts,
                    Line2D([longest, together], [row, row], color="black", linewidth=1.2, marker="|", markersize=7),
                )
                end = max(right, together)
            self._text(self.parts, end * margin, row, said)
            self._text(self.parts, low / margin**0.6, row, name, ha="right")

    def _paint_map(self, view: View) -> None:
        slowest, fastest = self._drawn.tok_s
        self.image.set_data(_coloured(view.splits, slowest, fastest))
        for run in view.measured_splits:
            self._diamond(
                self.map,
                run.settings.split.weights_gpu,
                run.settings.split.weights_cpu,
                _colour(run.throughput_tok_s.value, slowest, fastest),
            )
        split = view.state.settings.split
        here = (split.weights_gpu, split.weights_cpu)
        self._add(
            self.map,
            Line2D(
                *([v] for v in here),
                marker="o",
                markersize=13,
                color="none",
                markeredgecolor="black",
                markeredgewidth=3.2,
                clip_on=False,
            ),
        )
        self._add(
            self.map,
            Line2D(
                *([v] for v in here),
                marker="o",
                markersize=13,
                color="none",
                markeredgecolor="white",
                markeredgewidth=1.4,
                clip_on=False,
            ),
        )
        if view.measured:
            self._diamond(self.map, *here, _colour(view.measured.throughput_tok_s.value, slowest, fastest))
        kinds = dict.fromkeys(run.kind for run in (view.measured, *view.measured_splits) if run)
        if kinds:
            self._text(
                self.page, MAP[0], MAP[1] - 0.083, f"circle: this split; diamond: {', '.join(kinds)}", color=GREY
            )
        else:
            self._text(self.page, MAP[0], MAP[1] - 0.083, "circle: this split", color=GREY)

    def _diamond(self, axes: Axes, x: float, y: float, colour) -> None:
        self._add(
            axes,
            Line2D(
                [x],
                [y],
                marker="D",
                markersize=7,
                color="none",
                markerfacecolor=colour,
                markeredgecolor="white",
                markeredgewidth=1.2,
                clip_on=False,
            ),
        )

    def _paint_speed(self, view: View) -> None:
        predicted = view.prediction
        low, high = predicted.total_throughput_tok_s_bounds
        colour = GREY if view.why_not else BLUE
        self._interval(
            0,
            predicted.total_throughput_tok_s,
            low,
            high,
            colour,
            "o",
            plain(predicted.total_throughput_tok_s) + (" if it fitted" if view.why_not else ""),
        )
        if view.measured:
            value = view.measured.throughput_tok_s
            quoted = " (quoted)" if view.measured.kind == "quoted" else ""
            self._interval(
                1,
                value.value,
                value.low,
                value.high,
                VERMILION,
                "D",
                f"{plain(value.value)}{quoted}, predicted is {off_by(view)}",
            )
        else:
            self._text(self.speed, 0.02, 1, "not yet", color=GREY, transform=self.speed.get_yaxis_transform())

    def _interval(self, y: int, value: float, low: float, high: float, colour: str, marker: str, said: str) -> None:
        self._add(self.speed, Line2D([low, high], [y, y], color=colour, linewidth=2, marker="|", markersize=9))
        self._add(self.speed, Line2D([value], [y], color=colour, marker=marker, markersize=7))
        left, right = self.speed.get_xlim()
        where = math.log(max(min(value, right), left) / left) / math.log(right / left)
        align = "left" if where < 0.3 else "right" if where > 0.7 else "center"
        self._text(self.speed, value, y - 0.4, said, ha=align)


def _named(parts: dict[str, float]) -> dict[str, float]:
    """The largest parts, and the others together."""
    ranked = dict(sorted(parts.items(), key=lambda part: -part[1]))
    if len(ranked) <= PARTS_NAMED:
        return ranked
    names = list(ranked)
    named = {name: ranked[name] for name in names[: PARTS_NAMED - 1]}
    return named | {"other": sum(ranked[name] for name in names[PARTS_NAMED - 1 :])}


def _level(tok_s: NDArray[np.float64] | float, slowest: float, fastest: float):
    """Place on the palette, 0 to 255, on a log scale."""
    span = math.log(fastest / slowest)
    return np.clip(255 * np.log(np.asarray(tok_s) / slowest) / span, 0, 255)


def _colour(tok_s: float, slowest: float, fastest: float) -> tuple[float, ...]:
    return tuple(PALETTE[int(_level(tok_s, slowest, fastest))] / 255)


def _coloured(splits: SplitMap, slowest: float, fastest: float) -> NDArray[np.uint8]:
    """The map as colours [CPU percent, GPU percent]: nothing over 100, grey stripes over what does not fit."""
    there = ~np.isnan(splits.tok_s)
    levels = _level(np.where(there, splits.tok_s, slowest), slowest, fastest).astype(int)
    colours = np.dstack([PALETTE[levels], np.where(there, 255, 0)]).astype(np.uint8)
    gpu, cpu = np.indices(splits.tok_s.shape)
    unfit = there & ~splits.fits
    colours[unfit, :3] = (0.35 * colours[unfit, :3] + 0.65 * 225).astype(np.uint8)
    colours[unfit & ((gpu + cpu) % 8 < 3), :3] = 150
    return colours.transpose(1, 0, 2)


def _colour_ticks(slowest: float, fastest: float) -> tuple[list[float], list[str]]:
    """Places from 0 to 1 and token/s for the ends and round numbers between them."""
    span = math.log(fastest / slowest)
    ticks = {0.0: slowest, 1.0: fastest}
    decades = range(math.floor(math.log10(slowest)), math.ceil(math.log10(fastest)) + 1)
    steps = (1,) if span > math.log(300) else (1, 2, 5)
    for value in (step * 10.0**n for n in decades for step in steps):
        place = math.log(value / slowest) / span
        if 0.06 < place < 0.94 and min(abs(place - other) for other in ticks) > 0.06:
            ticks[place] = value
    return list(ticks), [plain(value, 2) for value in ticks.values()]
