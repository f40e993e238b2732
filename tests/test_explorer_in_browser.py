"""Notebook 05 in real front ends: JupyterLab with a current ipywidgets, the classic notebook with Colab's.

Debian's chromium opens and runs the notebook, moves every control and presses every button. Screenshots are kept in
outputs/screenshots, and redraw times are printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from helpers import paths, results
from helpers.results import Log

try:
    from playwright import sync_api
except ImportError:
    if os.environ.get("CI"):
        raise
    pytest.skip("playwright is missing: requirements-dev.txt", allow_module_level=True)

CHROMIUM = shutil.which("chromium")
COLAB_PYTHON = paths.ROOT / ".venv-colab" / "bin" / "python"
NOTEBOOK = paths.ROOT / "notebooks" / "05_explore_splits.ipynb"
SCREENSHOTS = paths.DEFAULT_OUTPUT / "screenshots"
TOKEN = "sliders"
PATIENCE_MS = 120_000
SLIDERS = ("GPU weights", "CPU weights", "Batch", "GPU batches", "Prompt", "Generated")
SUPPOSED = {"Disk": "GB/s", "PCIe": "GB/s", "RAM": "GiB"}
SWITCHES = (
    "4-bit weights",
    "4-bit KV cache",
    "weights pinned in RAM",
    "fitted copy buffers",
    "direct disk reader",
    "overlap",
    "page cache dropped",
)
CHROMIUM_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True)
class FrontEnd:
    """A way to open notebooks: how its server is started, and where it keeps what this test touches."""

    name: str
    python: Path
    server: tuple[str, ...]
    address: str
    handle: str  # of a slider


LAB = FrontEnd(
    "lab",
    Path(sys.executable),
    (
        "jupyterlab",
        "--LabApp.user_settings_dir={settings}",
        "--ServerApp.root_dir={root}",
        f"--IdentityProvider.token={TOKEN}",
        "--ServerApp.port={port}",
    ),
    "/lab/tree/{notebook}",
    ".noUi-handle",
)
CLASSIC = FrontEnd(
    "classic",
    COLAB_PYTHON,
    ("notebook", "--NotebookApp.notebook_dir={root}", f"--NotebookApp.token={TOKEN}", "--NotebookApp.port={port}"),
    "/notebooks/{notebook}",
    ".ui-slider-handle",
)


def needed(what, there: bool, how: str):
    """Skip where something is missing; in CI, where it must not be, fail."""
    if not there:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{what} is missing: {how}")


@pytest.fixture(params=[LAB, CLASSIC], ids=lambda front_end: front_end.name)
def front_end(request):
    needed("chromium", CHROMIUM is not None, "apt-get install chromium")
    if request.param is LAB:
        needed("JupyterLab", find_spec("jupyterlab") is not None, "requirements.txt")
    else:
        needed("Colab's Jupyter", COLAB_PYTHON.exists(), "make .venv-colab/ready")
    return request.param


@pytest.fixture
def project(tmp_path):
    """A copy of the notebook, saved to as it runs, next to the lab itself; its results go to `out`."""
    (tmp_path / "helpers").symlink_to(paths.ROOT / "helpers")
    (tmp_path / "requirements.txt").symlink_to(paths.ROOT / "requirements.txt")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    cell.source = (
        cell.source.replace('device = "auto"', 'device = "emulated"')
        .replace('output_dir = ""', f'output_dir = "{tmp_path / "out"}"')
        .replace("repeats = 3", "repeats = 1")
    )
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook, tmp_path / "notebooks" / NOTEBOOK.name)
    return tmp_path


@contextmanager
def serving(front_end: FrontEnd, project: Path):
    """The front end's server, with no settings but its defaults; yields the notebook's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = project / "settings"
    for plugin, values in {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        file = settings / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    places = {"root": project / "notebooks", "settings": settings, "port": port}
    folders = {
        name: str(project / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    with open(project / "server.log", "wb") as log:
        server = subprocess.Popen(
            [
                front_end.python,
                "-m",
                *(part.format(**places) for part in front_end.server),
                "--no-browser",
                "--allow-root",
            ],
            stdout=log,
            stderr=log,
            env=os.environ | folders,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for_port(server, port, project / "server.log")
        yield address + front_end.address.format(notebook=NOTEBOOK.name) + f"?token={TOKEN}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def _wait_for_port(server: subprocess.Popen, port: int, log: Path):
    for _ in range(600):
        assert server.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server does not answer: {log.read_text()}")


TOOLTIP = "box => box.title || box.querySelector('[title]')?.title"


class Sliders:
    """The page as a person sees it: controls by the words next to them."""

    def __init__(self, page, front_end: FrontEnd):
        self.page, self.front_end = page, front_end
        self.redraw_ms: dict[str, list[float]] = {}

    def control(self, name: str):
        labels = f'> label:text-is("{name}"), > label > span:text-is("{name}")'
        return self.page.locator(f".widget-inline-hbox:has({labels})")

    def handle(self, name: str):
        return self.control(name).locator(self.front_end.handle)

    def track(self, name: str):
        return self.control(name).locator(".slider-container, .ui-slider").first.bounding_box()

    def press(self, name: str, key: str, times: int = 1):
        self.handle(name).focus()
        for _ in range(times):
            self.handle(name).press(key)

    def drag(self, name: str, to: float):
        """Drag a slider with the mouse, in many small steps, to a part of its length, or beyond an end of it."""
        self.handle(name).scroll_into_view_if_needed()
        track, start = self.track(name), self.handle(name).bounding_box()
        self.page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + to * track["width"], start["y"] + start["height"] / 2, steps=40)
        self.page.mouse.up()

    def reading(self, name: str) -> str:
        return self.control(name).locator(".widget-readout").inner_text().strip()

    def number_next_to(self, name: str) -> str:
        number = self.page.locator(f'.widget-hbox:has(> .widget-inline-hbox > label:text-is("{name}")) > .widget-html')
        return number.first.inner_text().strip()

    def choose(self, name: str, option: str):
        self.control(name).locator("select").select_option(label=option)

    def switch(self, name: str):
        self.page.locator(f'.widget-checkbox:has-text("{name}") input').click()

    def button(self, name: str | re.Pattern):
        return self.page.locator("button.jupyter-button", has_text=name)

    def show(self, picture: str):
        before = self.picture
        self.page.locator(f'.widget-toggle-buttons button:has-text("{picture}")').click()
        self.picture_other_than(before)

    def place_of_the_picture(self) -> list[float]:
        """Its corner from that of all sliders: scrolling moves both."""
        return self.images.first.evaluate("""image => {
            let all = image;
            for (let box = image.parentElement; box; box = box.parentElement)
                if (box.classList.contains("widget-box")) all = box;
            const [inner, outer] = [image.getBoundingClientRect(), all.getBoundingClientRect()];
            return [Math.round(inner.x - outer.x), Math.round(inner.y - outer.y)];
        }""")

    def says(self, text: str | re.Pattern):
        sync_api.expect(self.page.locator(".widget-html").filter(has_text=text).first).to_be_visible(
            timeout=PATIENCE_MS
        )

    @property
    def images(self):
        return self.page.locator("img.widget-image, .widget-image img")

    @property
    def picture(self) -> str:
        assert self.images.count() == 2, "a picture and the bars, however often they were drawn"
        return self.images.first.get_attribute("src")

    def picture_other_than(self, before: str):
        sync_api.expect(self.images.first).not_to_have_attribute("src", before, timeout=PATIENCE_MS)

    def measured(self) -> list[str]:
        """The cells of the table's first row: the current setting."""
        return self.page.locator("tr.explorer-this td").all_inner_texts()

    def time_redraws(self, picture: str, name: str):
        """From a key to the new bars, the last that a move draws; kept for the report."""
        self.show(picture) if picture != "Map" else None
        times = self.redraw_ms.setdefault(picture, [])
        for key in ("ArrowRight", "ArrowLeft") * 3:
            self.handle(name).focus()
            self.page.evaluate(
                """() => {
                    const images = document.querySelectorAll("img.widget-image, .widget-image img");
                    const image = images[images.length - 1], began = performance.now();
                    window.redrawn = new Promise(resolve => new MutationObserver((_, observer) => {
                        observer.disconnect(); resolve(performance.now() - began);
                    }).observe(image, {attributes: true, attributeFilter: ["src"]}));
                }"""
            )
            self.handle(name).press(key)
            times.append(self.page.evaluate("() => window.redrawn"))


@pytest.mark.timeout(600)
def test_sliders_move_measure_and_show(front_end, project, tmp_path):
    log = project / "out" / results.LOG_NAME
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with serving(front_end, project) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=CHROMIUM,
            args=CHROMIUM_ARGUMENTS,
            viewport={"width": 1280, "height": 900},
        )
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address)
        sliders = Sliders(page, front_end)

        def shoot(name: str):
            page.screenshot(path=SCREENSHOTS / f"{front_end.name}-{name}.png")

        try:
            run_all(page, front_end)
            sliders.says("Predicted: ")
            sliders.control("Machine").scroll_into_view_if_needed()
            page.wait_for_timeout(1000)
            look(sliders)
            move_every_control(sliders, shoot)
            try_buttons(sliders, log, shoot)
        finally:
            shoot("last")
        assert not [fault for fault in faults if "widget" in fault.lower()]
        report = {name: f"median {statistics.median(times):.0f} ms" for name, times in sliders.redraw_ms.items()}
        print(f"redraws in {front_end.name}, from a key to the new picture: {report}")
        browser.close()


def look(sliders: Sliders):
    """Sliders and pictures side by side within 1280 px, tracks long enough, a tooltip on every control."""
    picture, bars = (sliders.images.nth(i).bounding_box() for i in (0, 1))
    slider = sliders.control("GPU weights").bounding_box()
    assert slider["x"] + slider["width"] <= picture["x"] and picture["x"] + picture["width"] <= 1280
    assert picture["y"] < slider["y"] + 400 and bars["y"] >= picture["y"] + picture["height"]
    for name in (*SLIDERS, *SUPPOSED):
        assert sliders.track(name)["width"] >= 250, name
    assert sliders.page.locator('[title="null"], [title="undefined"]').count() == 0
    for name in (*SLIDERS, *SUPPOSED, "Machine", "Model", "KV cache on", "Activations on", "batch limit"):
        assert sliders.control(name).evaluate(TOOLTIP), name
    for switch in sliders.page.locator(".widget-checkbox").all():
        assert switch.evaluate(TOOLTIP), switch.inner_text()


def move_every_control(sliders: Sliders, shoot):
    for picture in ("Map", "Frontier", "Overlap", "Roofline"):
        sliders.time_redraws(picture, "GPU weights")
        shoot(picture.lower())
    sliders.show("Map")
    place = sliders.place_of_the_picture()
    for name in SLIDERS:
        before = sliders.page.locator(".widget-html pre").first.inner_text()
        sliders.press(name, "ArrowRight")
        sync_api.expect(sliders.page.locator(".widget-html pre").first).not_to_have_text(before, timeout=PATIENCE_MS)
    for name in SWITCHES:
        before = sliders.picture
        sliders.switch(name)
        sliders.says("Predicted: ")
    sliders.says("--compress-weight")
    sliders.says("--page-cache cold --disk-reader direct --copy-buffer fit")
    sliders.choose("KV cache on", "CPU")
    sliders.switch("attention on the CPU")
    sliders.says("--cpu-cache-compute")
    sliders.choose("Activations on", "CPU")
    sliders.button("Reset").click()
    sliders.says("--percent 50 50 100 0 100 0")
    for name, unit in SUPPOSED.items():
        sliders.press(name, "ArrowRight", 3)
        sliders.says(re.compile(f"hypothetical: .*{name} [0-9.]+ {unit}", re.IGNORECASE))
    assert sliders.button(re.compile("^Measure")).is_disabled()
    shoot("hypothetical")
    sliders.button("Real machine").click()
    sync_api.expect(sliders.button("Real machine")).to_be_disabled(timeout=PATIENCE_MS)
    sliders.choose("Machine", "t4-colab")
    sliders.says(re.compile(r"Predicted: .* on t4-colab"))
    sliders.says("Predicted only: this session measures on")
    sliders.choose("Model", "opt-30b")
    sliders.says(re.compile(r"Does not fit: needs .* GiB of .*, t4-colab has"))
    shoot("does-not-fit")
    assert sliders.place_of_the_picture() == place, "nothing moves when a message appears"
    sliders.button("Reset").click()
    sliders.says("--percent 50 50 100 0 100 0")


def try_buttons(sliders: Sliders, log: Path, shoot):
    # The CPU's share gives way to the GPU's, and the disk's is the rest; a drag ends where the mouse ends.
    assert sliders.reading("GPU weights") == "50" and sliders.reading("CPU weights") == "50"
    sliders.press("GPU weights", "ArrowRight", 6)
    sliders.says("--percent 56 44 100 0 100 0")
    assert sliders.reading("CPU weights") == "44"
    sliders.drag("GPU weights", -0.2)
    sliders.says("--percent 0 44 100 0 100 0")
    sliders.says(re.compile("disk 56 % .the rest.; achieved: .* CPU .* disk"))

    sliders.choose("batch limit", "16")
    sliders.button("Best setting").click()
    sliders.says(re.compile("Best of [0-9,]+ settings with batches up to 16"))
    sliders.says("It changes --percent 0 44")
    assert int(sliders.number_next_to("Batch")) * int(sliders.number_next_to("GPU batches")) <= 16
    sliders.choose("batch limit", "no limit")
    sliders.button("Best setting").click()
    sliders.says(re.compile("Best of [0-9,]+ settings: "))
    sliders.button("Reset").click()
    sliders.press("GPU batches", "End")
    sliders.press("Batch", "End")
    sliders.says("16,384 sequences")
    sliders.button(re.compile("^Measure")).click()
    sliders.says("Press again to start")
    sync_api.expect(sliders.button(re.compile("^Yes, "))).to_be_visible()
    shoot("asks-first")
    sliders.button("Reset").click()
    sliders.says("--percent 50 50 100 0 100 0")
    assert not log.exists(), "nothing has started a run"

    assert sliders.measured()[6] == "\u2014"
    before = sliders.picture
    sliders.button(re.compile("^Measure")).click()
    sliders.says("Measured on the emulated GPU:")
    sliders.picture_other_than(before)
    (record,) = Log(log)
    assert float(sliders.measured()[6].replace(",", "")) == pytest.approx(record.total_throughput_tok_s, rel=0.01)
    assert "measured on the emulated GPU" in sliders.measured()[-1]
    assert record.settings.split.percent[:2] == (50, 50) and record.settings.workload.gpu_batch_size == 4


def run_all(page, front_end: FrontEnd):
    """Select every cell and run them; asked before its kernel listens, a front end forgets it or asks which kernel."""
    prompt, idle = (
        (".jp-CodeCell .jp-InputPrompt", '.jp-Notebook-ExecutionIndicator[data-status="idle"]')
        if front_end is LAB
        else (".code_cell .input_prompt", ".kernel_idle_icon")
    )
    page.locator(idle).wait_for(state="attached")
    if front_end is CLASSIC:  # widgets shown before its widget manager is there stay hidden
        page.wait_for_function("window.Jupyter?.notebook?.kernel?.widget_manager !== undefined")
        page.wait_for_timeout(2000)
    for _ in range(8):
        try:
            which_kernel = page.locator(".jp-Dialog .jp-mod-accept")
            if which_kernel.count():
                which_kernel.click(timeout=15_000)
                page.locator(idle).wait_for(state="attached")
            page.locator(prompt).first.click(timeout=15_000)
            page.keyboard.press("Escape")
            page.keyboard.press("Control+a")
            page.keyboard.press("Control+Enter")
            page.locator(prompt, has_text=re.compile(r"\[[*\d]")).first.wait_for(timeout=15_000)
            return
        except sync_api.TimeoutError:
            continue
    raise AssertionError("no cell ran")
