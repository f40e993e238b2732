"""The explorer's pictures: each draws its view, redraws only what moved, and says what its figures are."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from explorer_factories import at, t4
from helpers import explorer
from helpers.explorer import lettering
from helpers.explorer.bench import EMULATED, open_bench
from helpers.explorer.frontier import FrontierPicture
from helpers.explorer.map_picture import MapPicture
from helpers.explorer.overlap import OverlapPicture
from helpers.explorer.roofline import RooflinePicture
from helpers.explorer.summary import TIER_COLOURS, Summary
from helpers.explorer.view import view

PNG = b"\x89PNG\r\n\x1a\n"
KINDS = [MapPicture, FrontierPicture, OverlapPicture, RooflinePicture, Summary]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return open_bench("emulated", tmp_path_factory.mktemp("out"))


def pixels(png):
    assert png.startswith(PNG)
    return np.asarray(Image.open(io.BytesIO(png)))


def words(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_depends_on_its_view_alone(bench, kind):
    first, second = view(bench.start, bench, {}), view(t4(bench, weights_gpu=20), bench, bench.measured("t4-colab"))
    fresh, used = kind(), kind()
    for one in (second, first, second, view(t4(bench, weights_gpu=70, gpu_batch_size=64), bench, {})):
        used.png(one)
    assert np.array_equal(pixels(fresh.png(first)), pixels(used.png(first)))
    assert not np.array_equal(pixels(used.png(first)), pixels(used.png(second)))
    assert len(used.figure.axes) == len(fresh.figure.axes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_leaves_the_background_alone(bench, monkeypatch, kind):
    drawing, backgrounds = kind(), []
    draw = drawing.canvas.draw
    monkeypatch.setattr(drawing.canvas, "draw", lambda: (backgrounds.append(1), draw()))
    shown = [view(t4(bench, weights_gpu=gpu, weights_cpu=30), bench, {}) for gpu in range(40, 60)]
    drawn = [drawing.png(one) for one in shown]
    assert len(backgrounds) <= 3  # axes, ticks and titles rest, unless a scale must grow
    before = lettering.written.cache_info().misses
    assert [drawing.png(one) for one in shown] == drawn and lettering.written.cache_info().misses == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"weights_gpu": 100},
        {"weights_gpu": 0, "weights_cpu": 0},
        {"model": "opt-175b", "gpu_batch_size": 1024},
        {"model": "opt-125m", "compress_weight": True, "compress_cache": True},
        {"gen_len": 1},
        {"cache": "disk", "overlap": False},
        {"model": "opt-66b", "weights_gpu": 33, "weights_cpu": 33, "cache": "CPU", "activations": "CPU"},
        {"disk_gb_s": 28.0, "h2d_gb_s": 450.0, "host_ram_gib": 512.0, "weights_gpu": 10},
        {"machine": EMULATED, "model": "opt-mini", "disk_gb_s": 28.0, "weights_gpu": 10},
    ],
)
def test_no_text_leaves_the_picture(bench, kind, controls):
    drawing = kind()
    drawing.draw(view(t4(bench, **controls), bench, bench.measured("t4-colab")))
    drawing.canvas.draw()
    box = drawing.figure.bbox
    for axes in drawing.figure.axes:
        for text in filter(Text.get_text, (*axes.texts, axes.xaxis.label, axes.yaxis.label)):
            extent = text.get_window_extent()
            assert extent.x0 >= box.x0 - 1 and extent.x1 <= box.x1 + 1, text.get_text()
            assert extent.y0 >= box.y0 - 1 and extent.y1 <= box.y1 + 1, text.get_text()


def test_every_title_says_emulated_or_hypothetical(bench):
    emulated, real = view(bench.start, bench, {}), view(t4(bench), bench, {})
    supposed = view(at(bench, disk_gb_s=5.0), bench, {})
    for kind in KINDS:
        for one, said in ((emulated, ", emulated"), (real, ""), (supposed, ", emulated, hypothetical")):
            drawing = kind()
            drawing.draw(one)
            assert (", emulated" in words(drawing.figure)) == bool(said) and said in words(drawing.figure)


def test_bars_keep_their_colours_when_emulated(bench):
    drawing = Summary()
    for state in (at(bench, weights_cpu=20), t4(bench, weights_cpu=20)):
        shown = pixels(drawing.png(view(state, bench, {}))).reshape(-1, 3)
        for colour in TIER_COLOURS.values():
            red, green, blue = bytes.fromhex(colour[1:])
            assert (shown == (red, green, blue)).all(axis=1).sum() > 50


def test_the_overlap_shows_what_hides_behind_the_disk(bench):
    drawing = OverlapPicture()
    drawing.draw(view(t4(bench, weights_gpu=0, weights_cpu=50), bench, bench.measured("t4-colab")))
    assert "waits for reading from disk" in words(drawing.figure)
    assert "Copying weights from RAM" in words(drawing.figure) and "hide behind it" in words(drawing.figure)
    drawing.draw(view(t4(bench, weights_gpu=0, weights_cpu=0), bench, bench.measured("t4-colab")))
    assert "A layer, quoted (breakdown): load" in words(drawing.figure)


def test_pictures_stand_alone_with_their_setting(bench):
    pictures = explorer.start(bench)
    assert [picture.name for picture in pictures] == [
        "explore_start",
        "explore_frontier",
        "explore_overlap",
        "explore_roofline",
    ]
    for picture in pictures:
        assert picture.png().startswith(PNG) and "emulated GPU" in picture.alt
        assert f"--percent {bench.start.settings.split}" in words(picture.figure)


def test_text_is_drawn_where_and_as_asked():
    figure = Figure(figsize=(3, 1), dpi=100)
    canvas = lettering.LetteringCanvas(figure)
    text = figure.text(0.5, 0.5, "0.25 GiB, gj", fontsize=9, ha="center", va="center", color="#0072B2")
    canvas.draw()
    ink = np.asarray(canvas.buffer_rgba())
    rows, columns = np.nonzero((ink[..., :3] != 255).any(axis=2))
    box = text.get_window_extent()
    assert abs(columns.min() - box.x0) <= 2 and abs(columns.max() + 1 - box.x1) <= 2
    assert box.y0 - 1 <= 100 - rows.max() and 100 - rows.min() <= box.y1 + 1
    assert abs((columns.min() + columns.max()) / 2 - 150) <= 2 and abs((rows.min() + rows.max()) / 2 - 50) <= 3
    darkest = ink[rows, columns][ink[rows, columns].astype(int).sum(axis=1).argmin()]
    assert np.abs(darkest[:3].astype(int) - (0x00, 0x72, 0xB2)).max() < 40
