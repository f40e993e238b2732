"""The map of splits: predicted token/s at every GPU and CPU share of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.image import AxesImage
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from helpers.analysis.values import plain
from helpers.explorer.drawing import SMALL, Drawing, decade, note
from helpers.explorer.split_map import SplitMap
from helpers.explorer.view import View, without_split

PALETTE = (matplotlib.colormaps["viridis"](np.arange(256))[:, :3] * 255).astype(np.uint8)
LEGEND_PX = 396
EXTENT = (-0.5, 100.5, -0.5, 100.5)


@dataclass(frozen=True)
class _Frame:
    aside: str
    slowest: float
    fastest: float


class MapPicture(Drawing):
    height_px = 300

    def lay_out(self) -> None:
        self.map = self.add_axes(46, 26, 262, 232)
        self.map.set(xlim=EXTENT[:2], ylim=EXTENT[2:])
        self.map.set_xlabel("GPU share of the weights (%, asked)", fontsize=SMALL, labelpad=1)
        self.map.set_ylabel("CPU share (%, asked)", fontsize=SMALL, labelpad=0)
        self.map.spines[["top", "right"]].set_visible(False)
        self.colours = self.add_axes(322, 26, 11, 232)
        self.colours.imshow(PALETTE.reshape(256, 1, 3), origin="lower", aspect="auto", extent=(0, 1, 0, 1))
        self.colours.xaxis.set_major_locator(NullLocator())
        self.colours.tick_params(length=2, pad=2, left=False, labelleft=False, right=True, labelright=True)

    def frame(self, view: View) -> _Frame:
        slowest, fastest = view.splits.range_tok_s
        low, high = _round_down(slowest), 1 / _round_down(1 / fastest)
        return _Frame(view.aside, low, high if high > low else 2 * low)

    def set_frame(self, frame: _Frame) -> None:
        self.title(f"Predicted token/s at every split of the weights{frame.aside}")
        self.colours.set_yticks(*_colour_ticks(frame.slowest, frame.fastest))

    def paint(self, view: View) -> None:
        frame, splits, split = self.frame(view), view.splits, view.settings.split
        image = AxesImage(self.map, origin="lower", extent=EXTENT, interpolation="nearest")
        image.set_data(_coloured(splits, frame))
        self.add(image, self.map)
        self.text(98, 97, "the rest is on disk", self.map, ha="right", color="#767676")
        for settings, tok_s in view.measured_like(without_split):
            self.diamond(*settings.split.percent[:2], self.map, _colour(tok_s.value, frame))
        here = (split.weights_gpu, split.weights_cpu)
        self.here(*here, self.map)
        if view.measured_tok_s:
            self.diamond(*here, self.map, _colour(view.measured_tok_s.value, frame))
        self._paint_legend(view, frame)

    def _paint_legend(self, view: View, frame: _Frame) -> None:
        self.here(LEGEND_PX, 40)
        self.text(LEGEND_PX + 14, 40, "this setting")
        kinds = {run.kind for run in (view.run, *view.measured.values()) if run}
        if kinds:
            self.diamond(LEGEND_PX, 62, colour=_colour(frame.fastest, frame))
            self.text(LEGEND_PX + 14, 62, ", ".join(sorted(kinds)), fontsize=7)
        stripes = np.full((12, 12, 3), 225, np.uint8)
        stripes[(np.add.outer(np.arange(12), np.arange(12)) % 8) < 3] = 150
        self._swatch(stripes, 84)
        self.text(LEGEND_PX + 14, 84, "striped: does not fit")
        fastest = view.splits.fastest
        if fastest:
            tok_s = view.splits.tok_s[fastest]
            note(self, LEGEND_PX - 7, 116, "fastest that fits:")
            self.text(LEGEND_PX - 7, 132, f"{fastest[0]} {fastest[1]}: {plain(float(tok_s))} token/s")
        else:
            note(self, LEGEND_PX - 7, 116, "no split fits")
        note(self, LEGEND_PX - 7, 156, "this setting:")
        self.text(LEGEND_PX - 7, 172, f"{plain(view.prediction.total_throughput_tok_s)} token/s")
        note(self, LEGEND_PX - 7, 196, "FlexGen moves whole")
        note(self, LEGEND_PX - 7, 210, "tensors: a patch is")
        note(self, LEGEND_PX - 7, 224, "one placement")

    def _swatch(self, pixels: NDArray[np.uint8], y: float) -> None:
        extent = (LEGEND_PX - 6, LEGEND_PX + 6, y + 6, y - 6)
        image = AxesImage(self.page, extent=extent, interpolation="nearest")
        image.set_data(pixels)
        self.add(image)


def _round_down(value: float) -> float:
    """The next of 1, 2, 5, 10, ... below."""
    power = decade(math.floor, value)
    return power * max(step for step in (1, 2, 5) if step * power <= value * (1 + 1e-9))


def _level(tok_s: Any, frame: _Frame) -> NDArray[np.float64]:
    """Place on the palette, 0 to 255, on a log scale."""
    span = math.log(frame.fastest / frame.slowest)
    return np.clip(255 * np.log(np.asarray(tok_s) / frame.slowest) / span, 0, 255)


def _colour(tok_s: float, frame: _Frame) -> tuple[float, ...]:
    return tuple(PALETTE[int(_level(tok_s, frame))] / 255)


def _coloured(splits: SplitMap, frame: _Frame) -> NDArray[np.uint8]:
    """The map as colours [CPU percent, GPU percent]: transparent over 100, grey stripes over what does not fit."""
    there = ~np.isnan(splits.tok_s)
    levels = _level(np.where(there, splits.tok_s, frame.slowest), frame).astype(int)
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
