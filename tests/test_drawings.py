"""Drawings: committed for Markdown, shown at 700 px, with their content in words."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from helpers.report import drawings


@pytest.mark.parametrize("draw", drawings.ALL, ids=lambda draw: draw.__name__)
def test_a_drawing_is_700_px_wide_and_described(draw):
    drawing = draw()
    assert drawing.name == draw.__name__ and len(drawing.alt) > 60
    data, metadata = drawing._repr_mimebundle_()
    assert metadata["image/png"] == {"alt": drawing.alt, "width": 700}
    assert Image.open(io.BytesIO(data["image/png"])).width == 700 * drawings.SHARPNESS
    with Image.open(drawings.FOLDER / f"{drawing.name}.png") as committed:
        assert committed.width == 700 * drawings.SHARPNESS


@pytest.mark.parametrize("percent", ["0 0 0 0 0 0", "0 100 0 100 0 100", "5 5 50 25 100 0"])
def test_any_split_can_be_drawn(percent):
    assert "disk" in drawings.six_numbers(percent).alt
