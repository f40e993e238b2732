"""What a notebook's cells call: start the page, show and save a result, sum it up."""

from __future__ import annotations

import base64
import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from IPython.display import Markdown, display

from helpers import forecast, lab, paths, results
from helpers.analysis.values import Answer
from helpers.errors import Refused, say_warning
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.profiles import CEILINGS_NAME, PROFILE_NAME, MachineProfile
from helpers.report import plots, tables
from helpers.results import KIND_OF_DEVICE, Sweep
from helpers.settings import RunSettings
from helpers.setup import colab


@dataclass(frozen=True)
class Page:
    """One notebook at work: the device it runs on, and the folder its results go to."""

    device: Literal["cuda", "emulated"]
    output: Path

    def show(self, *results: tables.Table | plots.Plot | Answer) -> None:
        """Show each result here; tables and plots are saved as files too."""
        for result in results:
            if isinstance(result, plots.Plot):
                plots.save(result, self.output / "figures")
                _show_picture(result)
            else:
                text = result.markdown
                if isinstance(result, tables.Table):
                    tables.save(result, self.output / "tables")
                    text = result.on_a_page
                display(Markdown(text))

    def keep(self, measured: MachineCeilings | MachineProfile) -> None:
        """Save what was measured of the machine beside the results, for reports, predictions and the sliders."""
        self.output.mkdir(parents=True, exist_ok=True)
        is_profile = isinstance(measured, MachineProfile)
        path = self.output / (PROFILE_NAME if is_profile else CEILINGS_NAME)
        path.write_text(measured.model_dump_json(indent=2), encoding="utf-8")
        display(Markdown(f"{'Machine profile' if is_profile else 'Ceilings'}: `{path}`."))

    def affordable(self, runs: Mapping[str, RunSettings], fresh: bool = False) -> dict[str, RunSettings]:
        """Leave out optional runs that take long on this machine; say which, and how to run them."""
        left, dear = forecast.affordable(runs, self.output, fresh)
        for name, seconds in dear.items():
            run = runs[name]
            measure = [
                sys.executable,
                "-m",
                "helpers",
                "measure",
                "--percent",
                *str(run.split).split(),
                "--page-cache",
                run.page_cache,
                "--disk-reader",
                run.disk_reader,
                "--repeats",
                str(run.repeats),
                "--device",
                run.device,
                "--model",
                run.model,
                "--output",
                str(self.output),
            ]
            display(
                Markdown(
                    f"Left out here, for the homework does not ask for it and it would take "
                    f"{forecast.in_words(seconds)}: "
                    f"{name}. This makes it (in Colab with a ! before it), and this page then shows it: "
                    f"`cd {shlex.quote(str(paths.ROOT))} && {shlex.join(measure)}`"
                )
            )
        return left

    def announce(self, runs: Mapping[str, RunSettings], fresh: bool = False) -> None:
        """What these runs will take, before they start, and what the tables of them will not say again."""
        display(Markdown(f"Plan: {forecast.of(runs, self.output, fresh)}.\n\n{_in_every_table(runs)}"))

    def sum_up(self, sweep: Sweep) -> None:
        """What was run, what failed and why, and where it is kept."""
        done = len(sweep.records) - len(sweep.failed)
        lines = [f"{done} of {len(sweep.records)} runs have figures."]
        for name, record in sweep.failed.items():
            lines.append(f"- **{name} failed** ({record.failure.kind}): {record.failure.message}")
        lines.append(f"\nResults: `{self.output / results.LOG_NAME}`; tables and figures beside it.")
        display(Markdown("\n".join(lines)))


def start(device: str = "auto", output_dir: str = "") -> Page:
    """Choose the device and the output folder, and say which. Raises Refused if the device is not there, or
    the folder cannot be written.

    A relative folder is one of the project's, whatever folder the notebook runs in; one on Google Drive is mounted.
    Warnings are sentences from here on, without the line of code that they are from.
    """
    warnings.showwarning = say_warning
    chosen = lab.choose_device(device)
    if not isinstance(output_dir, str):
        raise Refused(f"output_dir {output_dir!r}: not a path")
    output = paths.ROOT / (os.path.expanduser(output_dir) or paths.DEFAULT_OUTPUT)
    colab.mount_drive(output)
    output = paths.folder(output, "output_dir")
    if chosen == "emulated":
        text = (
            f'**Emulated GPU** (profile "{EMULATED_T4.name}"): FlexGen\'s own code on this CPU with a small model. '
            "The order of the tiers is a T4's; the figures are not."
        )
    else:
        text = f"**CUDA**: {lab.describe_machine('cuda').name}."
    display(Markdown(f"{text} Results go to `{output}`."))
    return Page(chosen, output)


def _in_every_table(runs: Mapping[str, RunSettings]) -> str:
    """What the figures of these runs are, once for a page; the files of tables and plots have it each."""
    settings = tuple(runs.values())
    first, work = settings[0], settings[0].workload
    batches = {run.workload.gpu_batch_size for run in settings}
    caches = [cache for cache in ("natural", "cold") if any(run.page_cache == cache for run in settings)]
    repeats = max(run.repeats for run in settings)
    words = [
        f"{KIND_OF_DEVICE[first.device]}: {lab.describe_machine(first.device).name}",
        f"{first.model}, prompt {work.prompt_len}, generated {work.gen_len}"
        + (f", batch {work.gpu_batch_size}" if len(batches) == 1 else ""),
        f"page cache {' and '.join(caches)}",
    ]
    words += [f"medians of up to {repeats} repeats, with their range"] if repeats > 1 else []
    return f"In every table below: {'; '.join(words)}."


def _show_picture(plot: plots.Plot) -> None:
    picture = base64.b64encode(plot.png()).decode()
    display({"image/png": picture, "text/plain": plot.alt}, raw=True, metadata={"image/png": {"alt": plot.alt}})
