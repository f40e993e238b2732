"""Print figures for people: one per line, in at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 80
NAME_WIDTH = 30


def in_words(figure: Any) -> str:
    """A figure with four significant digits; a list with commas."""
    if figure is None:
        return "not measured"
    if isinstance(figure, list):
        return ", ".join(map(in_words, figure))
    if isinstance(figure, float):
        return f"{figure:.4g}" if abs(figure) < 1e4 else f"{figure:.0f}"
    return str(figure)


def lines(figures: Mapping[str, Any]) -> str:
    """A line per figure, wrapped; empty reasons and notes are left out."""
    shown = []
    for name, figure in figures.items():
        if name in ("reason", "notes") and not figure:
            continue
        for i, line in enumerate(wrapped(in_words(figure), WIDTH - NAME_WIDTH - 1)):
            shown.append(f"{'' if i else name:{NAME_WIDTH}} {line}")
    return "\n".join(shown)


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Lines no wider than `width`, if words allow; line breaks in the text are kept."""
    broken = (
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in text.split("\n")
    )
    return [line for lines_ in broken for line in lines_]
