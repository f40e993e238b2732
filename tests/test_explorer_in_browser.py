"""Notebook 05 in real front ends: JupyterLab with the ipywidgets of today, the classic notebook with Colab's.

The notebook is opened in Debian's chromium, run, its sliders moved and its buttons pressed, as a person would. What
the browser showed is kept in outputs/screenshots.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
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
    """A copy of the notebook, saved to as it runs, beside the laboratory itself; its results go to `out`."""
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


class Sliders:
    """The page as a person finds it: controls by the words beside them."""

    def __init__(self, page, front_end: FrontEnd):
        self.page, self.front_end = page, front_end

    def control(self, name: str):
        return self.page.locator(f'.widget-inline-hbox:has(> label:text-is("{name}"))')

    def press(self, name: str, key: str, times: int):
        handle = self.control(name).locator(self.front_end.handle)
        handle.focus()
        for _ in range(times):
            handle.press(key)

    def drag(self, name: str, to: float):
        """Drag a slider with the mouse, in many small steps, to a part of its length, or beyond an end of it."""
        handle = self.control(name).locator(self.front_end.handle)
        handle.scroll_into_view_if_needed()
        track = self.control(name).locator(".slider-container, .ui-slider").first.bounding_box()
        start = handle.bounding_box()
        self.page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + to * track["width"], start["y"] + start["height"] / 2, steps=40)
        self.page.mouse.up()

    def reading(self, name: str) -> str:
        return self.control(name).locator(".widget-readout").inner_text().strip()

    def number_beside(self, name: str) -> str:
        return self.page.locator(f'.widget-inline-hbox:has(> label:text-is("{name}")) + .widget-label').inner_text()

    def sequences(self) -> int:
        words = self.page.locator(".widget-html").filter(has_text="sequences at a time").inner_text()
        return int(re.search(r"= ([0-9]+) sequences", words)[1])

    def choose(self, name: str, option: str):
        self.control(name).locator("select").select_option(label=option)

    def button(self, name: str):
        return self.page.locator("button.jupyter-button", has_text=name)

    def says(self, text: str | re.Pattern):
        sync_api.expect(self.page.locator(".widget-html").filter(has_text=text).first).to_be_visible(
            timeout=PATIENCE_MS
        )

    @property
    def picture(self) -> str:
        pictures = self.page.locator("img.widget-image")
        assert pictures.count() == 1, "one picture, however often it was drawn"
        return pictures.get_attribute("src")

    def picture_other_than(self, before: str):
        sync_api.expect(self.page.locator("img.widget-image")).not_to_have_attribute("src", before, timeout=PATIENCE_MS)

    def measured(self) -> list[str]:
        """The cells of the table's first row: what the sliders are at."""
        return self.page.locator("tr.explorer-this td").all_inner_texts()


@pytest.mark.timeout(600)
def test_sliders_move_measure_and_show(front_end, project, tmp_path):
    log = project / "out" / results.LOG_NAME
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with serving(front_end, project) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=CHROMIUM,
            args=CHROMIUM_ARGUMENTS,
            viewport={"width": 1400, "height": 1900},
        )
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address)
        sliders = Sliders(page, front_end)
        try:
            run_all(page, front_end)
            sliders.says("Predicted: ")
            walk(sliders, log, page)
            page.locator("tr.explorer-this").scroll_into_view_if_needed()
        finally:
            page.screenshot(path=SCREENSHOTS / f"{front_end.name}.png")
        assert not [fault for fault in faults if "widget" in fault.lower()]
        browser.close()


def walk(sliders: Sliders, log: Path, page):
    """What a person does: move, drag, choose, look for the best, measure, go back."""
    before = sliders.picture
    assert sliders.reading("GPU weights %") == "50" and sliders.reading("CPU weights %") == "50"
    sliders.says("disk 0 % (the rest)")

    # The CPU's share gives way to the GPU's; the disk's is the rest.
    sliders.press("GPU weights %", "ArrowRight", 6)
    sliders.says("--percent 56 44 100 0 100 0")
    assert sliders.reading("CPU weights %") == "44"
    sliders.picture_other_than(before)
    sliders.press("CPU weights %", "ArrowLeft", 4)
    sliders.says("disk 4 % (the rest)")
    sliders.says("--percent 56 40 100 0 100 0")

    # A drag ends where the mouse ends, and what is shown is of that place.
    before = sliders.picture
    sliders.drag("GPU weights %", -0.2)
    sliders.says("--percent 0 40 100 0 100 0")
    assert sliders.reading("GPU weights %") == "0"
    sliders.says(re.compile("achieved: .* CPU .* disk"))
    sliders.picture_other_than(before)
    sliders.press("Batch", "ArrowRight", 1)
    sliders.says(re.compile("6 × 1 = 6 sequences"))

    # Another machine: predicted, and said why it cannot be measured here.
    sliders.choose("Machine", "t4-colab")
    sliders.says(re.compile(r"Predicted: .* on t4-colab"))
    sliders.says("Predicted only: what can be measured here is")
    assert sliders.button("Measure this").is_disabled()
    sliders.choose("Model", "opt-30b")
    sliders.says(re.compile(r"Does not fit: needs .* GiB of .*, t4-colab has"))
    page.screenshot(path=SCREENSHOTS / f"{sliders.front_end.name}-does-not-fit.png")
    sliders.button("Reset").click()
    sliders.says("--percent 50 50 100 0 100 0")
    sliders.button("Best split").click()
    sliders.says(re.compile("Best of [0-9,]+ settings"))
    assert sliders.sequences() > 6
    sliders.button("Reset").click()
    sliders.says("--percent 50 50 100 0 100 0")
    sliders.says("4 × 1 = 4 sequences")
    sliders.press("Batch", "ArrowRight", 1)
    sliders.says("6 × 1 = 6 sequences")
    assert sliders.number_beside("Batch") == "6" and sliders.number_beside("GPU batches") == "1"
    sliders.press("Batch", "ArrowLeft", 1)
    sliders.says("4 × 1 = 4 sequences")
    assert not log.exists(), "no slider has started a run"

    # Measured at the press of the button, beside the prediction.
    assert sliders.measured()[4] == "—"
    before = sliders.picture
    sliders.button("Measure this").click()
    sliders.says("Measured on the emulated GPU:")
    sliders.picture_other_than(before)
    (record,) = Log(log)
    assert float(sliders.measured()[4].replace(",", "")) == pytest.approx(record.total_throughput_tok_s, rel=0.01)
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
