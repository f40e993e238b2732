"""The sliders' messages, as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from helpers.explorer.controls import COLUMN_PX
from helpers.explorer.drawing import WIDTH_PX
from helpers.explorer.view import View

FULL_PX = COLUMN_PX + WIDTH_PX + 12


def message(text: str, wrong: bool, lines: int, width_px: int) -> str:
    """Words in a place of fixed height, so that nothing moves when they change."""
    colour = "color:#B34700;" if wrong else ""
    height = f"height:{1.35 * lines:.2f}em;overflow-y:auto"
    return f'<div style="line-height:1.35;{height};max-width:{width_px}px;{colour}">{html.escape(text)}</div>'


def _under_sliders(text: str) -> str:
    style = "line-height:1.35;height:1.35em;overflow:hidden;white-space:nowrap;padding-left:8px"
    return f'<div style="{style};width:{COLUMN_PX - 16}px">{text}</div>'


def split(shown: View) -> str:
    """The disk's share, and what FlexGen makes of the three."""
    achieved = " + ".join(
        f"{share.achieved_percent:.1f} % {tier if tier == 'disk' else tier.upper()}"
        for tier, share in shown.weights.items()
        if share.achieved_bytes
    )
    return _under_sliders(f"disk {shown.weights['disk'].asked_percent} % (the rest); achieved: <b>{achieved}</b>")


def batch(shown: View) -> str:
    work = shown.settings.workload
    return _under_sliders(
        f"{work.gpu_batch_size:,} × {work.num_gpu_batches} = <b>{work.effective_batch:,} sequences</b> at a time"
    )


def command(shown: View) -> str:
    return (
        f'<div style="line-height:1.35;max-width:{FULL_PX}px">FlexGen\'s command line:'
        '<pre style="white-space:pre-wrap;user-select:all;margin:2px 0 6px 0;padding:6px;min-height:2.8em;'
        f'background:rgba(128,128,128,0.12)">{html.escape(shown.settings.flexgen_command)}</pre></div>'
    )


def table(caption: str, rows: Sequence[dict[str, str]]) -> str:
    """A table with one line for each row."""
    cell = "padding:2px 7px;text-align:left;vertical-align:bottom;border-bottom:1px solid rgba(128,128,128,0.3)"
    head = "".join(f'<th style="{cell}">{html.escape(name)}</th>' for name in rows[0])
    lines = [
        f"<tr{' class=explorer-this' if not i else ''}>"
        + "".join(f'<td style="{cell};white-space:nowrap">{html.escape(text)}</td>' for text in row.values())
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    return (
        f'<div style="max-width:{FULL_PX}px;overflow-x:auto;line-height:1.3">{html.escape(caption)}'
        f'<table style="border-collapse:collapse;font-size:11px"><tr>{head}</tr>{"".join(lines)}</table></div>'
    )
