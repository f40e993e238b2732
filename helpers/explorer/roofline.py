"""The roofline over the batch: the most that each part of the machine allows, and where one takes over from another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from helpers.analysis.values import plain
from helpers.explorer.bench import once
from helpers.explorer.drawing import Drawing, decades_around
from helpers.explorer.view import View, without_batch
from helpers.machine.profiles import MachineProfile
from helpers.predict.search import fits, with_batch
from helpers.predict.time_model import by_batch_size
from helpers.report.plots import BLUE, GREEN, GREY, ORANGE, SKY
from helpers.settings import RunSettings

SIZES = tuple(dict.fromkeys(round(2 ** (step / 2)) for step in range(21)))  # 1 to 1024
# The parts of the machine and their terms of a prediction. Some run at the same time (PCIe has two directions), so a
# part is at least as busy as its longest term.
PARTS = {
    "disk": ("disk", "page cache", "tensor files", "relay", "disk write"),
    "PCIe": ("host to device", "device to host", "cache store"),
    "compute": ("GPU compute", "dequantisation"),
    "GPU memory": ("GPU memory",),
    "launches": ("launch overhead",),
    "CPU": ("CPU attention", "host copy"),
}
SHADE = "#e6e6e6"
COLOURS = dict(zip(PARTS, (GREEN, ORANGE, BLUE, SKY, GREY, "#CC79A7")))


@dataclass(frozen=True, eq=False)
class Roofline:
    """Token/s at each of SIZES: predicted, and were each part of the machine alone; the largest batch that fits."""

    tok_s: NDArray[np.float64]
    roofs: dict[str, NDArray[np.float64]]
    largest: int

    @property
    def crossings(self) -> list[tuple[float, float, str, str]]:
        """Batch size and token/s where the lowest roof becomes another part's, and the two parts."""
        names = list(self.roofs)
        heights = np.log([self.roofs[name] for name in names])
        lowest = heights.argmin(axis=0)
        found = []
        for i, j in pairwise(range(len(SIZES))):
            one, other = lowest[i], lowest[j]
            if one != other:
                gap = heights[other] - heights[one]
                share = gap[i] / (gap[i] - gap[j])
                size = np.exp(np.log(SIZES[i]) + share * (np.log(SIZES[j]) - np.log(SIZES[i])))
                height = np.exp(heights[one][i] + share * (heights[one][j] - heights[one][i]))
                found.append((float(size), float(height), names[one], names[other]))
        return found


@lru_cache(maxsize=32)
def roofline(settings: RunSettings, profile: MachineProfile) -> Roofline:
    """The roofline of a split and number of micro-batches; the batch size of `settings` makes no difference."""
    total_s, terms_s = by_batch_size(settings, profile, SIZES)
    tokens = np.array(SIZES) * settings.workload.num_gpu_batches * settings.workload.gen_len
    roofs = {}
    for part, terms in PARTS.items():
        seconds = np.max([terms_s[term] for term in terms], axis=0)
        if seconds.max() > 0:
            roofs[part] = tokens / np.maximum(seconds, 1e-12)
    return Roofline(tokens / total_s, roofs, _largest(settings, profile))


def _largest(settings: RunSettings, profile: MachineProfile) -> int:
    """The largest micro-batch that fits, up to the last of SIZES; 0 if none does."""
    fitting, too_large = 0, SIZES[-1] + 1
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(with_batch(settings, middle, settings.workload.num_gpu_batches), profile):
            fitting = middle
        else:
            too_large = middle
    return fitting


class RooflinePicture(Drawing):
    height_px = 300

    def lay_out(self) -> None:
        self.axes = self.add_log_axes("batch size (sequences in a micro-batch, log scale)")
        self.axes.set_xlim(SIZES[0], SIZES[-1])
        self.axes.set_xticks([2**n for n in range(11)])

    def frame(self, view: View) -> tuple[str, tuple[float, float]]:
        found = _of(view)
        return view.aside, decades_around(found.tok_s.min() / 1.5, found.tok_s.max() * 4)

    def set_frame(self, frame: tuple[str, tuple[float, float]]) -> None:
        self.title(f"Token/s over the batch, under each part's limit{frame[0]}")
        self.axes.set_ylim(frame[1])

    def paint(self, view: View) -> None:
        found, axes = _of(view), self.axes
        low, high = axes.get_ylim()
        if found.largest < SIZES[-1]:
            left = max(found.largest, SIZES[0])
            self.add(_shade(left, low, SIZES[-1], high), axes)
        for part, roof in found.roofs.items():
            if roof.min() < high:
                self.line(SIZES, roof, axes, color=COLOURS[part], linewidth=1.5, linestyle="--")
        self._paint_names(found, high)
        self.line(SIZES, found.tok_s, axes, color="black", linewidth=2)
        for size, height, before, after in found.crossings:
            self.line([size], [height], axes, marker="s", markersize=5, color="black")
            self.label(
                size, height * (high / low) ** 0.05, f"{before} → {after} at {plain(size, 2)}", axes, ha="center"
            )
        for settings, tok_s in view.measured_like(_without_size):
            self.diamond(settings.workload.gpu_batch_size, tok_s.value, axes)
        here = min(view.settings.workload.gpu_batch_size, SIZES[-1])
        if view.measured_tok_s:
            self.diamond(here, view.measured_tok_s.value, axes)
        self.here(here, view.prediction.total_throughput_tok_s, axes)

    def _paint_names(self, found: Roofline, high: float) -> None:
        """Each part's name at the lower right, in the order of the roofs there."""
        names = [name for name, roof in found.roofs.items() if roof.min() < high]
        names.sort(key=lambda name: -found.roofs[name][-1])
        rows = ["predicted", *names]
        y = 246.0 - 14 * (len(rows) - (found.largest == SIZES[-1]))
        for name in rows:
            style = {"linestyle": "--", "linewidth": 1.5} if name in names else {"linewidth": 2.0}
            self.line([384, 404], [y, y], color=COLOURS.get(name, "black"), **style)
            self.text(409, y, f"{name} alone" if name in names else name)
            y += 14
        if found.largest < SIZES[-1]:
            self.bar(384, y, 20, 10, SHADE)
            self.text(409, y, f"over {found.largest}: does not fit" if found.largest else "no batch fits")


def _of(view: View) -> Roofline:
    return roofline(_without_size(once(view.settings)), view.profile)


def _without_size(settings: RunSettings) -> RunSettings:
    batches = settings.workload.num_gpu_batches
    return with_batch(without_batch(settings), 1, batches)


def _shade(left: float, bottom: float, right: float, top: float) -> Rectangle:
    return Rectangle((left, bottom), right - left, top - bottom, facecolor=SHADE, zorder=0)
