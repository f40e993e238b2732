"""A figure that redraws only what a move changes, over a background that is kept."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from helpers import options
from helpers.explorer.lettering import LetteringCanvas
from helpers.explorer.view import View
from helpers.report.plots import GREY, VERMILION, Plot

WIDTH_PX, DPI = 540, 100
HEADER_PX = 44  # what a picture that stands alone says of the setting
SMALL, MEDIUM = 8, 9  # points
BACKGROUNDS_KEPT = 8


class Drawing(ABC):
    """One figure whose axes are made once. Places on its `page` are pixels from the top left.

    A subclass lays out its axes in `lay_out`, says in `frame` what its scales and titles depend on, sets these in
    `set_frame` and draws everything else in `paint`. `alone` adds a header with what stands next to the sliders.
    """

    height_px: ClassVar[int]

    def __init__(self, alone: bool = False) -> None:
        self.header_px = HEADER_PX if alone else 0
        self.full_height_px = self.height_px + self.header_px
        self.figure = Figure(figsize=(WIDTH_PX / DPI, self.full_height_px / DPI), dpi=DPI)
        self.canvas = LetteringCanvas(self.figure)
        self.page = self.add_axes(0, -self.header_px, WIDTH_PX, self.full_height_px)
        self.page.set(xlim=(0, WIDTH_PX), ylim=(self.height_px, -self.header_px))
        self.page.set_axis_off()
        self._of_frame: list[Artist] = []
        self._moving: list[tuple[Axes, Artist]] = []
        self._framed: Hashable = None
        self._backgrounds: dict[Hashable, Any] = {}
        self.lay_out()

    @abstractmethod
    def lay_out(self) -> None: ...

    @abstractmethod
    def frame(self, view: View) -> Hashable: ...

    @abstractmethod
    def set_frame(self, frame: Any) -> None: ...

    @abstractmethod
    def paint(self, view: View) -> None: ...

    def png(self, view: View) -> bytes:
        """The view's picture, as PNG."""
        self.draw(view)
        if self._framed not in self._backgrounds:
            while len(self._backgrounds) >= BACKGROUNDS_KEPT:
                self._backgrounds.pop(next(iter(self._backgrounds)))
            self.canvas.draw()
            self._backgrounds[self._framed] = self.canvas.copy_from_bbox(self.figure.bbox)
        self.canvas.restore_region(self._backgrounds[self._framed])
        for axes, artist in self._moving:
            axes.draw_artist(artist)
        pixels = Image.fromarray(np.asarray(self.canvas.buffer_rgba()))
        content = io.BytesIO()
        pixels.convert("RGB").save(content, "png", compress_level=1)
        return content.getvalue()

    def draw(self, view: View) -> None:
        """Put a view on the figure, in the place of the last one."""
        frame = self.frame(view)
        if frame != self._framed:
            for artist in self._of_frame:
                artist.remove()
            self._of_frame.clear()
            self.set_frame(frame)
            self._framed = frame
        for _, artist in self._moving:
            artist.remove()
        self._moving.clear()
        if self.header_px:
            self._paint_header(view)
        self.paint(view)

    def plot(self, view: View, name: str) -> Plot:
        """The picture of a view, to show and save on its own."""
        self.draw(view)
        return Plot(name, f"{setting_in_words(view)}. {view.headline}", self.figure)

    def _paint_header(self, view: View) -> None:
        self.text(6, -32, setting_in_words(view), fontweight="bold")
        colour = VERMILION if view.why_not else "black"
        self.text(6, -15, view.headline.split("; ")[0], color=colour)

    # ---- axes and artists ------------------------------------------------------------------------------------------

    def add_axes(self, left: float, top: float, width: float, height: float) -> Axes:
        bottom = self.full_height_px - self.header_px - top - height
        axes = self.figure.add_axes(
            (left / WIDTH_PX, bottom / self.full_height_px, width / WIDTH_PX, height / self.full_height_px)
        )
        axes.tick_params(labelsize=SMALL, length=3)
        return axes

    def add_log_axes(self, xlabel: str) -> Axes:
        """The one pair of logarithmic axes of a picture, under a title that names what goes up."""
        axes = self.add_axes(46, 26, WIDTH_PX - 72, self.height_px - 68)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel(xlabel, fontsize=SMALL, labelpad=1)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
            axis.set_major_locator(LogLocator(numticks=9))
            axis.set_minor_locator(NullLocator())
        return axes

    def title(self, text: str, x: float = 6, y: float = 11) -> None:
        """A title of the frame."""
        self._of_frame.append(
            self.page.text(x, y, text, fontsize=MEDIUM, fontweight="bold", va="center", parse_math=False)
        )

    def add(self, artist: Artist, axes: Axes | None = None) -> None:
        """Draw something that moves, on the page if not on axes."""
        axes = axes or self.page
        artist.set_animated(True)  # not part of the background
        axes.add_artist(artist)
        self._moving.append((axes, artist))

    def text(self, x: float, y: float, text: str, axes: Axes | None = None, **style: Any) -> None:
        usual: dict[str, Any] = {"fontsize": SMALL, "va": "center", "parse_math": False, "clip_on": False}
        self.add(Text(x, y, text, **(usual | style)), axes)

    def bar(self, left: float, y: float, width: float, height: float, colour: str, **style: Any) -> None:
        """A horizontal bar on the page, `y` its middle."""
        self.add(Rectangle((left, y - height / 2), width, height, facecolor=colour, **style))

    def line(self, x: Any, y: Any, axes: Axes | None = None, **style: Any) -> None:
        self.add(Line2D(x, y, **style), axes)

    def label(self, x: float, y: float, text: str, axes: Axes | None = None, **style: Any) -> None:
        """Text that stays readable over lines and dots."""
        background = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0}
        self.text(x, y, text, axes, bbox=background, **style)

    def here(self, x: float, y: float, axes: Axes | None = None) -> None:
        """The ring around the current setting."""
        for colour, width in (("black", 3.2), ("white", 1.4)):
            ring = {"marker": "o", "markersize": 12, "color": "none", "clip_on": False}
            self.line([x], [y], axes, markeredgecolor=colour, markeredgewidth=width, **ring)

    def diamond(self, x: float, y: float, axes: Axes | None = None, colour: Any = VERMILION) -> None:
        """A measured run."""
        style = {"marker": "D", "markersize": 7, "color": "none", "markeredgecolor": "white", "clip_on": False}
        self.line([x], [y], axes, markerfacecolor=colour, markeredgewidth=1.2, **style)


def setting_in_words(view: View) -> str:
    settings, work = view.settings, view.settings.workload
    words = [
        f"{settings.model} on {view.state.where}",
        f"--percent {settings.split}",
        f"batch {work.gpu_batch_size} x {work.num_gpu_batches}",
        f"{work.prompt_len} + {work.gen_len} tokens",
        *options.words(settings),
    ]
    return " · ".join(words)


def decade(rounded: Callable[[float], int], value: float) -> float:
    """The power of ten below (`math.floor`) or above (`math.ceil`)."""
    return 10.0 ** rounded(math.log10(value))


def decades_around(low: float, high: float) -> tuple[float, float]:
    """Powers of ten around a range, so that scales rest while a slider moves."""
    return decade(math.floor, low), max(decade(math.ceil, high), 10 * decade(math.floor, low))


def place_on_log(value: float, low: float, high: float) -> float:
    """Where a value lies on a logarithmic scale from 0 to 1; at its end if beyond it."""
    return min(max(math.log(value / low) / math.log(high / low), 0.0), 1.0)


def note(drawing: Drawing, x: float, y: float, text: str) -> None:
    """A remark in grey."""
    drawing.text(x, y, text, color=GREY)
