"""From figures to a report that can be handed in: Markdown beside its files, and one HTML page that needs none."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from markdown_it import MarkdownIt

from helpers import analysis, paths
from helpers.analysis import matching, readers
from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import in_line, listed, plain
from helpers.homework import QUESTIONS
from helpers.machine.emulation import EMULATED_T4
from helpers.report import plots, tables
from helpers.report.plots import Plot
from helpers.report.tables import Table
from helpers.runs import Run

# What each question asks, under its heading.
ASKED = {
    "q1": "How much does each step cost that moves weights from GPU to CPU to disk, and which link bounds the run?",
    "q2": "With all weights on disk, how far does a larger batch share out the cost of moving them?",
    "q3": "What do 4-bit weights change where the weights stay on the GPU, and where they come from disk?",
    "q4": "How is the disk read while all weights are on it, and how does loading a layer stand to computing it?",
}

# Heading, tables, plots: in the homework's order.
SECTIONS = {
    "q1": ("Q1. Progressive offload sweep", ("q1", "q1_ratios"), ("q1_throughput", "q1_memory", "q1_parts")),
    "q2": ("Q2. Batch size and I/O amortization", ("q2", "q2_ratios"), ("q2",)),
    "q3": ("Q3. Weight compression and tier interaction", ("q3",), ("q3",)),
    "q4": (
        "Q4. I/O behaviour and bottleneck under disk offload",
        ("q4_disk", "q4_breakdown"),
        ("q4_disk", "q4_breakdown"),
    ),
}

BETTER_READER = (
    "The homework does not ask this: the run with all weights on disk and the page cache dropped, once more with the "
    "laboratory's own reader (`--disk-reader direct`: O_DIRECT, past the page cache, into small pinned buffers)."
)

KINDS = {
    "measured on CUDA": "FlexGen ran on the GPU named as the source; latencies are its own `generate` timers, "
    "the peak is `torch.cuda.max_memory_allocated` (without the CUDA context).",
    "measured on the emulated GPU": "FlexGen's own scheduler, copies and layers ran, with a CPU in the GPU's "
    "part and the "
    f"host link of the machine profile named in the source. Both links are held to a rate on purpose: the host link "
    f"to {EMULATED_T4.h2d_gb_s:g} GB/s, the disk tier to {EMULATED_T4.disk_gb_s:g} GB/s, so whether a read comes "
    "from page cache or disk makes no difference to the times. The figures are that emulation's: their order and "
    "ratios can be read, their absolute values are no GPU's.",
    "projected by FlexGen": "`--debug-mode` timed a few layer-steps, with overlap off, and projected the rest. "
    "The timers are measured; throughput and wall time are not and are compared with nothing here.",
    "predicted": "Worked out by a cost model, not measured.",
    "quoted": "Taken from the file named as the source, as it states them; nothing of it was measured here.",
}

MOST_LINES = 500  # of a table or a list in the report: a browser still opens it at once

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; padding-bottom: .3rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .85rem; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .3rem .55rem; text-align: left; vertical-align: top; }
th { background: #f3f3f3; } img { max-width: 100%; height: auto; }
code { font-size: .9em; background: #f5f5f5; padding: 0 .2em; }
table:has(th:nth-child(8)) { font-size: .72rem; } table:has(th:nth-child(8)) :is(th, td) { padding: .2rem .3rem; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; }
/* Paper cannot scroll: what is wide is set smaller and wrapped. */
@media print {
  body { max-width: none; margin: 0; padding: 0; } h2 { break-after: avoid; } img, tr { break-inside: avoid; }
  table { display: table; overflow: visible; width: 100%; font-size: .7rem; }
  th, td { padding: .15rem .3rem; overflow-wrap: anywhere; min-width: 2.7rem; }
  table:has(th:nth-child(8)) { font-size: .6rem; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; overflow: visible; font-size: .7rem; }
}
"""


def analyze(file: str | Path, output_dir: str | Path) -> list[Path]:
    """Read figures (.csv or .jsonl), write tables, plots and the report; return the paths written.

    Raises Refused if the file cannot be read, or the folder not be written, before anything is.
    """
    points = readers.read(file)
    output_dir = paths.folder(output_dir, "--output")
    paths.check_writable(output_dir / "report.md")
    return write(points, output_dir)


def write(points: Sequence[Run], output_dir: str | Path, machine_text: str = "") -> list[Path]:
    """Write `tables/`, `figures/`, `report.md` and `report.html` into a folder; return their paths.

    `machine_text` (Markdown) is put before what the points themselves say about their machine.
    """
    points, output_dir = tuple(points), Path(output_dir)
    written: list[Path] = []
    all_tables, all_plots = tables.every(points), plots.every(points)
    for table in all_tables.values():
        written += tables.save(table, output_dir / "tables")
    for plot in all_plots.values():
        if plot.drawn:
            plots.save(plot, output_dir / "figures")
            written.append(output_dir / "figures" / f"{plot.name}.png")
    text = markdown(points, all_tables, all_plots, machine_text)
    for name, content in (("report.md", text), ("report.html", page(text, all_plots))):
        written.append(paths.write_atomically(output_dir / name, content))
    return written


def markdown(
    points: Sequence[Run], all_tables: dict[str, Table], all_plots: dict[str, Plot], machine_text: str = ""
) -> str:
    """The report as Markdown, its plots by relative path."""
    rows = homework_rows(points)
    blocks = ["# LLM offloading with FlexGen"]
    blocks.append(tables.provenance(rows) if rows.by_id else "The figures hold none of the homework's runs.")
    for question, (heading, table_names, plot_names) in SECTIONS.items():
        blocks += [f"## {heading}", f"*{ASKED[question]}*"]
        if missing := _not_run(question, rows):
            blocks.append(missing)
            continue
        blocks += [all_tables[name].markdown for name in table_names]
        blocks += [_image(all_plots[name]) for name in plot_names if all_plots[name].drawn]
        blocks.append(analysis.BY_QUESTION[question].analyze(points).markdown)
    if len(all_tables["disk_reads"].frame):
        blocks += ["## What the disk had to give", all_tables["disk_reads"].markdown]
        blocks += [analysis.disk_reads.markdown(points)]
    if any(row.id in rows.by_id for row in QUESTIONS["q4"]):
        blocks += ["## What a better reader buys", BETTER_READER]
        blocks += [all_tables["disk_readers"].markdown] if "disk_readers" in all_tables else []
        blocks += [analysis.disk_readers.analyze(points).markdown]
    if "comparison" in all_tables and len(all_tables["comparison_ratios"].frame) + len(all_tables["comparison"].frame):
        blocks += ["## Beside the Colab T4"]
        blocks += [all_tables[name].markdown for name in ("comparison", "comparison_ratios")]
    blocks += ["## Machine, versions, and how each figure was obtained", *_obtained(points, machine_text)]
    in_homework = all_tables["all_rows"].frame["in_homework"]
    blocks += ["## Every run"]
    if in_homework.any():
        blocks.append(_first_rows(_only(all_tables["all_rows"], in_homework, "The homework's runs.")).markdown)
    if not in_homework.all():
        caption = "Runs that are not the homework's, or that its sections above do not use."
        blocks += ["### Not the homework's", _first_rows(_only(all_tables["all_rows"], ~in_homework, caption)).markdown]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _not_run(question: str, rows: Rows) -> str:
    """That none of the runs that only this question has is there, and how to have them; empty if one is."""
    others = {row.id for other, its in QUESTIONS.items() if other != question for row in its}
    there = [row for row in QUESTIONS[question] if row.id in rows.by_id]
    if any(row.id not in others for row in there):
        return ""
    if not there:
        return (
            f"No run of this question is in the figures: `python -m helpers run {question}`, with the options of the "
            "others, makes them."
        )
    return (
        f"Only runs that other questions share are in the figures ({listed([row.label for row in there])}): "
        f"`python -m helpers run {question}`, with the options of these, makes the rest."
    )


def page(text: str, all_plots: dict[str, Plot]) -> str:
    """The report as one HTML page that opens offline: plots inside, nothing fetched."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for plot in all_plots.values():
        if plot.drawn:
            data = base64.b64encode(plot.png()).decode()
            body = body.replace(f'src="figures/{plot.name}.png"', f'src="data:image/png;base64,{data}"')
    title = html.escape(text.splitlines()[0].lstrip("# "))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def _image(plot: Plot) -> str:
    return f"![{in_line(plot.alt)}](figures/{plot.name}.png)"


def _obtained(points: Sequence[Run], machine_text: str) -> list[str]:
    blocks = [machine_text] if machine_text else []
    present = dict.fromkeys(point.kind for point in points)
    blocks.append("\n".join(f"- **{kind}** ({_count(points, kind)}): {KINDS[kind]}" for kind in present))
    machines = {p.machine.model_dump_json(): p.machine for p in points if p.machine}
    for machine in machines.values():
        gpu = f", {plain(machine.gpu_mem_gib)} GiB" if machine.gpu_mem_gib is not None else ""
        profile = f"; profile {in_line(machine.profile)}" if machine.profile else ""
        blocks.append(
            f"Machine: {in_line(machine.name)}{gpu}; {in_line(machine.cpu)}, {machine.cpu_count} CPUs; "
            f"{plain(machine.ram_gib)} GiB of RAM; {in_line(machine.platform)}{profile}."
        )
    versions = {tuple(sorted(p.versions.items())) for p in points if p.versions}
    for found in sorted(versions):
        blocks.append("Versions: " + ", ".join(f"{in_line(name)} {in_line(version)}" for name, version in found) + ".")
    if not machines:
        blocks.append("The figures do not say on which machine and with which versions they were obtained.")
    names = matching.names(points)
    commands = [f"{name}: {p.command}" for name, p in zip(names, points) if p.command]
    if commands:
        shown = ["    " + " ".join(command.split()) for command in commands[:MOST_LINES]]
        blocks.append("Commands:\n\n" + "\n".join(shown) + _and_more(commands))
    notes = [f"- {in_line(name)}: {in_line(note)}" for name, p in zip(names, points) for note in p.notes]
    if notes:
        blocks.append("Notes:\n\n" + "\n".join(notes[:MOST_LINES]) + _and_more(notes))
    return blocks


def _only(table: Table, wanted: pd.Series, caption: str) -> Table:
    return dataclasses.replace(table, caption=caption, frame=table.frame[wanted], shown=table.shown[wanted])


def _first_rows(table: Table) -> Table:
    """A table that a page can hold; its file has all of it."""
    if len(table.shown) <= MOST_LINES:
        return table
    caption = f"{table.caption} The first {MOST_LINES} of {len(table.shown):,}; all are in tables/{table.name}.csv."
    return dataclasses.replace(table, caption=caption, shown=table.shown.head(MOST_LINES))


def _and_more(lines: Sequence[str]) -> str:
    return f"\n\n... and {len(lines) - MOST_LINES:,} more." if len(lines) > MOST_LINES else ""


def _count(points: Sequence[Run], kind: str) -> str:
    sources = ", ".join(dict.fromkeys(in_line(p.source) for p in points if p.kind == kind))
    count = sum(p.kind == kind for p in points)
    return f"{count} run{'s' if count > 1 else ''}, {sources}"
