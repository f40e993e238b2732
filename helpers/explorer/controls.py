"""The sliders' widgets, of ipywidgets' core alone (7.7.1 and 8)."""

from __future__ import annotations

import html
from typing import Any

import ipywidgets as widgets

from helpers.explorer.bench import Bench
from helpers.explorer.state import HOMES
from helpers.settings import SHORTEST_PROMPT

COLUMN_PX = 436
LABEL_PX = 80
NUMBER_PX = 72  # next to a slider; what remains is its track
HALF_PX = 208
LAST_BATCH = 1024
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, LAST_BATCH)
BATCH_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
# What a machine's part may be supposed to be; the first leaves it as it is.
AS_IT_IS = ("as it is", 0.0)
SUPPOSED: dict[str, tuple[float, ...]] = {
    "disk_gb_s": (0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 2.0, 3.5, 5.0, 7.0, 10.0, 14.0, 28.0),
    "h2d_gb_s": (0.03, 0.1, 0.3, 1.0, 3.0, 6.0, 12.0, 16.0, 25.0, 32.0, 50.0, 64.0, 128.0, 450.0),
    "host_ram_gib": (4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0),
}
BATCH_LIMITS = (("no limit", 0), *((str(size), size) for size in (1, 4, 16, 64, 256, 1024)))

TOOLTIPS = {
    "machine": "Whose rates and memory the prediction uses",
    "model": "The OPT model to run",
    "weights_gpu": "Share of each layer's weights asked for on the GPU",
    "weights_cpu": "Share of each layer's weights asked for in RAM; the rest is on disk",
    "cache": "Where keys and values of earlier tokens are kept",
    "activations": "Where the hidden states between layers are kept",
    "gpu_batch_size": "Sequences in a micro-batch",
    "num_gpu_batches": "Micro-batches that share one load of the weights (not a number of GPUs)",
    "prompt_len": "Tokens in each prompt",
    "gen_len": "Tokens to generate for each sequence",
    "compress_weight": "Group-wise 4-bit weights, dequantised on the GPU",
    "compress_cache": "Group-wise 4-bit keys and values",
    "cpu_cache_compute": "Compute attention where the KV cache is (only with the cache on CPU or disk)",
    "pin_weight": "Pin the weights in RAM: faster copies, more memory",
    "overlap": "Load the next layer while this one computes",
    "fitted_buffers": "Copy buffers of the largest tensor's size, not FlexGen's 8 GiB: more page cache",
    "direct_reader": "Read weights from disk with O_DIRECT, past the page cache",
    "cold": "Drop the weights from the page cache before each pass",
    "disk_gb_s": "Suppose a faster or slower disk (writing changes in proportion)",
    "h2d_gb_s": "Suppose a faster or slower PCIe link (both directions)",
    "host_ram_gib": "Suppose more or less RAM",
}


def with_tooltip(widget: Any, text: str) -> Any:
    """The widget with a tooltip, by either version's name for it."""
    setattr(widget, "tooltip" if widget.has_trait("tooltip") else "description_tooltip", text)
    if isinstance(widget, widgets.Dropdown | widgets.Checkbox) and widget.has_trait("description_allow_html"):
        # ipywidgets 8 shows these ones' tooltips only if they have no description.
        widget.description_allow_html = True
        widget.description = f'<span title="{html.escape(text)}">{html.escape(widget.description)}</span>'
    return widget


def make_controls(bench: Bench) -> dict[str, widgets.Widget]:
    """Every control by the name of what it sets. The first state sets their values."""
    tiers = tuple(HOMES)
    controls = {
        "machine": _dropdown("Machine", tuple(bench.machines), 290, 58),
        "model": _dropdown("Model", bench.models[bench.start.machine], 160, 44),
        "weights_gpu": _slider("GPU weights", 0, 100),
        "weights_cpu": _slider("CPU weights", 0, 100),
        "cache": _dropdown("KV cache on", tiers, HALF_PX, LABEL_PX),
        "activations": _dropdown("Activations on", tiers, HALF_PX, 94),
        "gpu_batch_size": _choices("Batch", BATCH_SIZES),
        "num_gpu_batches": _choices("GPU batches", BATCH_COUNTS),
        "prompt_len": _slider("Prompt", SHORTEST_PROMPT, 2047),
        "gen_len": _slider("Generated", 1, 2041),
        "compress_weight": _switch("4-bit weights"),
        "compress_cache": _switch("4-bit KV cache"),
        "cpu_cache_compute": _switch("attention on the CPU"),
        "pin_weight": _switch("weights pinned in RAM"),
        "overlap": _switch("overlap"),
        "fitted_buffers": _switch("fitted copy buffers"),
        "direct_reader": _switch("direct disk reader"),
        "cold": _switch("page cache dropped"),
        "disk_gb_s": _supposed("Disk", "disk_gb_s", "GB/s"),
        "h2d_gb_s": _supposed("PCIe", "h2d_gb_s", "GB/s"),
        "host_ram_gib": _supposed("RAM", "host_ram_gib", "GiB"),
    }
    return {name: with_tooltip(control, TOOLTIPS[name]) for name, control in controls.items()}


def _described(description: str, width_px: int, label_px: int = LABEL_PX) -> dict[str, Any]:
    return {
        "description": description,
        "style": {"description_width": f"{label_px}px"},
        "layout": widgets.Layout(width=f"{width_px}px"),
    }


def _dropdown(description: str, options: tuple[str, ...], width_px: int, label_px: int) -> widgets.Dropdown:
    return widgets.Dropdown(options=options, **_described(description, width_px, label_px))


def _slider(description: str, low: int, high: int) -> widgets.IntSlider:
    return widgets.IntSlider(min=low, max=high, **_described(description, COLUMN_PX))


def _choices(description: str, options: tuple[Any, ...]) -> widgets.SelectionSlider:
    """A slider whose number is a label next to it: the state's, which may lie between two choices."""
    return widgets.SelectionSlider(options=options, readout=False, **_described(description, COLUMN_PX - NUMBER_PX - 8))


def _supposed(description: str, name: str, unit: str) -> widgets.SelectionSlider:
    return _choices(description, (AS_IT_IS, *((f"{value:g} {unit}", value) for value in SUPPOSED[name])))


def _switch(description: str) -> widgets.Checkbox:
    layout = widgets.Layout(width=f"{HALF_PX}px", margin="0 2px 0 2px")
    return widgets.Checkbox(description=description, indent=False, layout=layout)


def words(**layout: str) -> widgets.HTML:
    """Text without a tooltip (JupyterLab shows "null" for one that isn't set)."""
    return with_tooltip(widgets.HTML(layout=widgets.Layout(**layout)), "")


def number() -> widgets.HTML:
    """A slider's number, next to it."""
    return words(width=f"{NUMBER_PX}px", margin="2px 0 2px 6px")


def button(description: str, tooltip: str, width_px: int, style: str = "") -> widgets.Button:
    layout = widgets.Layout(width=f"{width_px}px")
    return widgets.Button(description=description, button_style=style, tooltip=tooltip, layout=layout)
