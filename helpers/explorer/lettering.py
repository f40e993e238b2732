"""Draw text quickly: cache each string's picture, where matplotlib renders every glyph again."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.font_manager import FontProperties, findfont
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont


class LetteringCanvas(FigureCanvasAgg):
    """Agg's canvas, with its text from kept pictures."""

    _size: tuple[float, float, float] | None = None

    def get_renderer(self) -> RendererAgg:
        size = (*self.get_width_height(physical=True), self.figure.dpi)
        if size != self._size:
            self.renderer, self._size = _Renderer(*size), size
        return self.renderer


class _Renderer(RendererAgg):
    def draw_text(
        self,
        gc: Any,
        x: float,
        y: float,
        s: str,
        prop: FontProperties,
        angle: float,
        ismath: bool | str = False,
        mtext: Any = None,
    ) -> None:
        if ismath or angle:  # rare here
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        red, green, blue = (round(255 * part) for part in gc.get_rgb()[:3])
        picture, left, below = written(s, *self._font(prop), (red, green, blue))
        self.draw_image(gc, round(x) + left, self.height - round(y) - below, picture)

    def get_text_width_height_descent(
        self, s: str, prop: FontProperties, ismath: bool | str
    ) -> tuple[float, float, float]:
        if ismath:
            return super().get_text_width_height_descent(s, prop, ismath)
        left, top, right, bottom = _font(*self._font(prop)).getbbox(s, anchor="ls")
        return right - left, bottom - top, bottom

    def _font(self, prop: FontProperties) -> tuple[str, float]:
        """The font's file and its size in pixels."""
        return str(findfont(prop)), self.points_to_pixels(prop.get_size_in_points())


@lru_cache(maxsize=1024)
def written(text: str, file: str, size_px: float, colour: tuple[int, int, int]) -> tuple[NDArray[np.uint8], int, int]:
    """A text as RGBA, lowest row first as Agg expects it, and its place: pixels right of its start and below its
    baseline."""
    font = _font(file, size_px)
    left, top, right, bottom = (math.floor(edge) for edge in font.getbbox(text, anchor="ls"))
    ink = Image.new("L", (max(right - left, 1), max(bottom - top, 1)))
    ImageDraw.Draw(ink).text((-left, -top), text, fill=255, font=font, anchor="ls")
    picture = np.empty((ink.height, ink.width, 4), np.uint8)
    picture[..., :3], picture[..., 3] = colour, np.asarray(ink)[::-1]
    return picture, left, bottom


@lru_cache(maxsize=64)
def _font(file: str, size_px: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size_px, layout_engine=ImageFont.Layout.BASIC)
