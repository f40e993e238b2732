"""From figures to a report that can be handed in: Markdown next to its files, and one HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helpers import analysis, paths
from helpers.analysis import readers
from helpers.analysis.matching import Rows, homework_rows
from helpers.analysis.values import in_line
from helpers.homework import QUESTIONS
from helpers.report import environment, html_page, plots, tables
from helpers.report.canvas import Plot, save as save_plot
from helpers.report.columns import Table, save as save_table
from helpers.runs import Run

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
MOST_ROWS = 500  # of a table in the report: a browser still opens it at once


def analyze(
    files: Sequence[str | Path],
    output_dir: str | Path,
    about: readers.About | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Read figures of any kind, write tables, plots and the report; return the paths written.

    Raises Refused if a file can't be read or the folder can't be written, before anything is.
    """
    collected = readers.collect(files, about, say)
    first = Path(files[0])
    machine = environment.described(first) if len(files) == 1 else {}
    output_dir = paths.folder(output_dir, "--output")
    paths.check_writable(output_dir / "report.md")
    for remark in collected.remarks:
        say(remark)
    return write(collected.runs, output_dir, first if first.is_dir() else first.parent, machine)


def write(
    runs: Sequence[Run],
    output_dir: str | Path,
    measured_in: Path | None = None,
    machine: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write `tables/`, `figures/`, `report.md` and `report.html` into a folder; return their paths.

    `measured_in` is the folder that holds notebook 00's figures of the machine, if not the same one. `machine`
    describes someone else's.
    """
    runs, output_dir = tuple(runs), Path(output_dir)
    all_tables, all_plots = tables.every(runs), plots.every(runs)
    written = [path for table in all_tables.values() for path in save_table(table, output_dir / "tables")]
    written += [save_plot(plot, output_dir / "figures") for plot in all_plots.values() if plot.drawn]
    disk_gb_s = environment.disk_read_gb_s(measured_in or output_dir, runs)
    block = environment.block(homework_rows(runs).runs or runs, disk_gb_s, machine)
    text = markdown(runs, all_tables, all_plots, block)
    written.append(paths.write_atomically(output_dir / "report.md", text))
    written.append(paths.write_atomically(output_dir / "report.html", html_page.render(text, all_plots)))
    return written


def markdown(
    runs: Sequence[Run], all_tables: dict[str, Table], all_plots: dict[str, Plot], environment_block: str
) -> str:
    """The report as Markdown, its plots by relative path."""
    rows = homework_rows(runs)
    blocks = ["# LLM offloading with FlexGen", environment_block]
    if remarks := environment.remarks(runs):
        blocks.append(remarks)
    blocks += [in_line(sentence) for sentence in rows.left_out]
    for question, (heading, table_names, plot_names) in SECTIONS.items():
        blocks.append(f"## {heading}")
        if missing := _not_run(question, rows):
            blocks.append(missing)
            continue
        blocks += [all_tables[name].markdown for name in table_names if len(all_tables[name].frame)]
        blocks += [_image(all_plots[name]) for name in plot_names if all_plots[name].drawn]
        blocks.append(analysis.BY_QUESTION[question].analyze(runs).markdown)
    if len(all_tables["disk_reads"].frame):
        blocks += ["## Disk reads and page cache", all_tables["disk_reads"].markdown]
        blocks.append(_folded("Details", analysis.disk_reads.markdown(runs)))
    if "disk_readers" in all_tables:
        blocks += ["## Beyond the homework: a direct disk reader", all_tables["disk_readers"].markdown]
        blocks.append(analysis.disk_readers.analyze(runs).markdown)
    if "comparison" in all_tables and len(all_tables["comparison_ratios"].frame) + len(all_tables["comparison"].frame):
        blocks.append("## Next to the Colab T4")
        blocks += [all_tables[name].markdown for name in ("comparison", "comparison_ratios")]
    blocks.append("## Every run, command and note")
    blocks.append(_folded(f"All {len(runs):,} runs", _first_rows(all_tables["all_rows"]).markdown))
    if details := environment.details(runs):
        blocks.append(_folded("Machines, versions, commands and notes", details))
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _not_run(question: str, rows: Rows) -> str:
    """How to get this question's runs, if there are none but those that other questions share; else empty.

    Two splits are enough for question 1, whoever ran them.
    """
    here = rows.question(question)
    elsewhere = {id(row.run) for other in QUESTIONS if other != question for row in rows.question(other)}
    if any(id(row.run) not in elsewhere for row in here) or (question == "q1" and len(here) > 1):
        return ""
    command = f"`python -m helpers run {question}`, with the options of the others"
    if not here:
        return f"No run of this question is in the figures: {command}, makes them."
    shared = ", ".join(row.name for row in here)
    return f"Only runs that other questions share are in the figures ({shared}): {command}, makes the rest."


def _image(plot: Plot) -> str:
    return f"![{in_line(plot.alt)}](figures/{plot.name}.png)"


def _folded(summary: str, text: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{text.strip()}\n\n</details>"


def _first_rows(table: Table) -> Table:
    """A table that a page can hold; its file has all of it."""
    if len(table.shown) <= MOST_ROWS:
        return table
    caption = f"{table.caption} The first {MOST_ROWS} of {len(table.shown):,}; all are in tables/{table.name}.csv."
    return dataclasses.replace(table, caption=caption, shown=table.shown.head(MOST_ROWS))
