"""The notebooks' API: start the page, run a question, show and save results."""

from __future__ import annotations

import base64
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from IPython.display import Markdown, display

from helpers import forecast, homework, lab, paths, progress, results
from helpers.analysis.values import Answer
from helpers.errors import Refused, say_warning
from helpers.homework import Row
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.emulation import EMULATED_T4
from helpers.machine.profiles import CEILINGS_NAME, PROFILE_NAME, MachineProfile
from helpers.predict import time_model
from helpers.report import columns, plots
from helpers.results import KIND_OF_DEVICE, Sweep
from helpers.runs import Run, from_sweep
from helpers.settings import RunSettings
from helpers.setup import colab


@dataclass(frozen=True)
class Page:
    """A running notebook: its device, its output folder, and the parameters that its runs share (`homework.plan`)."""

    device: Literal["cuda", "emulated"]
    output: Path
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False

    @property
    def reference(self) -> RunSettings:
        """The settings with everything on the GPU, for whatever all runs have in common."""
        return self.settings(homework.QUESTIONS["q1"][:1])["q1-1"]

    @property
    def profile(self) -> MachineProfile | None:
        """The machine that predictions are for, or None before notebook 00 has measured this GPU."""
        return forecast.profile_here(self.device, self.output)

    def settings(self, rows: Iterable[Row]) -> dict[str, RunSettings]:
        """The run of each row, with this page's parameters."""
        return homework.plan(tuple(rows), self.device, **self.parameters)

    def run(self, rows: Iterable[Row]) -> tuple[Run, ...]:
        """Measure each row that has no result yet; show the plan first and any failures at the end."""
        return from_sweep(self.measure(self._affordable(self.settings(rows))))

    def measure(self, runs: Mapping[str, RunSettings]) -> Sweep:
        """The records of these runs, measuring those without a known result."""
        if not runs:
            return Sweep({})
        plan = forecast.of(runs, self.output, self.fresh)
        display(Markdown(f"Plan: {plan}.\n\n{_in_every_table(runs)}"))
        tell = _Teller(runs, self.output, self.fresh) if progress.FILE in os.environ else None
        sweep = lab.run(runs, self.output, fresh=self.fresh, on_phase=tell)
        display(Markdown(self._summary(sweep)))
        return sweep

    def show(self, *results: columns.Table | plots.Plot | Answer | str) -> None:
        """Show each result or Markdown text here; save tables and plots as files too."""
        for result in results:
            if isinstance(result, plots.Plot):
                plots.save(result, self.output / "figures")
                _show_picture(result)
            else:
                text = result if isinstance(result, str) else result.markdown
                if isinstance(result, columns.Table):
                    columns.save(result, self.output / "tables")
                display(Markdown(text))

    def predict(self, rows: Iterable[Row]) -> None:
        """Show what the time model expects of each row, before anything runs."""
        profile = self.profile
        if profile is None:
            display(Markdown("No prediction yet: notebook 00 measures what the model needs to know of this GPU."))
            return
        lines = ["| Run | Predicted (token/s) | Predicted bottleneck |", "| --- | --- | --- |"]
        rows = tuple(rows)
        for row, settings in zip(rows, self.settings(rows).values()):
            if not settings.debug_mode:  # FlexGen projects those itself
                found = time_model.predict(settings, profile)
                lines.append(f"| {row.label} | {found.total_throughput_tok_s:.3g} | {found.bottleneck} |")
        display(Markdown(f"Predicted for {profile.name}, not measured:\n\n" + "\n".join(lines)))

    def keep(self, measured: MachineCeilings | MachineProfile) -> None:
        """Save a measurement of the machine next to the results, for reports, predictions and the sliders."""
        is_profile = isinstance(measured, MachineProfile)
        path = self.output / (PROFILE_NAME if is_profile else CEILINGS_NAME)
        paths.write_atomically(path, measured.model_dump_json(indent=2))
        display(Markdown(f"{'Machine profile' if is_profile else 'Ceilings'}: `{path}`."))

    def _affordable(self, runs: Mapping[str, RunSettings]) -> Mapping[str, RunSettings]:
        """Leave out optional runs that take long on this machine; give the command for each."""
        kept, dear = forecast.affordable(runs, self.output, self.fresh)
        for name, seconds in dear.items():
            run = runs[name]
            flags = {
                "page-cache": run.page_cache,
                "repeats": run.repeats,
                "device": run.device,
                "model": run.model,
                "output": self.output,
            }
            measure = [sys.executable, "-m", "helpers", "measure", "--percent", *str(run.split).split()]
            measure += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
            display(
                Markdown(
                    f"Skipped, because the homework does not ask for it and it takes {forecast.in_words(seconds)}: "
                    f"{name}. To measure it, run this in a terminal (in Colab, in a cell, with a ! in front), then "
                    f"this page again: `cd {shlex.quote(str(paths.ROOT))} && {shlex.join(measure)}`"
                )
            )
        return kept

    def _summary(self, sweep: Sweep) -> str:
        done = len(sweep.records) - len(sweep.failed)
        lines = [f"{done} of {len(sweep.records)} runs have figures, kept in `{self.output / results.LOG_NAME}`."]
        for name, record in sweep.failed.items():
            if record.failure:
                lines.append(f"- **{name} failed** ({record.failure.kind}): {record.failure.message}")
        return "\n".join(lines)


def start(
    device: Literal["auto", "cuda", "emulated"] = "auto",
    output_dir: str = "",
    model: str = "",
    prompt_len: int | None = None,
    gen_len: int | None = None,
    page_cache: Literal["natural", "cold"] = "natural",
    repeats: int = 3,
    fresh: bool = False,
) -> Page:
    """Choose the device and the output folder, and show both. Raises Refused naming a wrong parameter.

    An empty model and lengths of None are the homework's on this device. A relative folder is in the project,
    wherever the notebook runs; a folder on Google Drive is mounted. Warnings are single sentences from here on.
    """
    warnings.showwarning = say_warning
    chosen = lab.choose_device(device)
    if not isinstance(fresh, bool):
        raise Refused(f"fresh {fresh!r}: neither True nor False")
    if not isinstance(output_dir, str):
        raise Refused(f"output_dir {output_dir!r}: not a path")
    parameters: dict[str, Any] = {
        "model": model,
        "page_cache": page_cache,
        "repeats": repeats,
        "prompt_len": prompt_len,
        "gen_len": gen_len,
    }
    homework.plan("q1", chosen, **parameters)  # refuses a wrong parameter now
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
    return Page(chosen, output, parameters, fresh)


class _Teller:
    """Turns `lab.run`'s messages into progress: the run's number, and the seconds left.

    Repeats take turns over the runs, so the seconds left are those of all runs together.
    """

    def __init__(self, runs: Mapping[str, RunSettings], output: Path, fresh: bool) -> None:
        todo = {name: runs[name] for name in (runs if fresh else lab.without_figures(runs, output))}
        self.names = [lab.describe(run) for run in todo.values()]
        self.seconds = forecast.of(todo, output, fresh=True).seconds if todo else 0.0
        self.began_s = time.monotonic()

    def __call__(self, text: str) -> None:
        settings, _, phase = text.partition(": ")
        number = self.names.index(settings) + 1 if settings in self.names else 1
        left_s = None if self.seconds is None else max(0.0, self.seconds - (time.monotonic() - self.began_s))
        progress.tell(progress.Progress(number, len(self.names), phase, left_s, settings))


def _in_every_table(runs: Mapping[str, RunSettings]) -> str:
    """The conditions these runs share, stated once on the page; saved tables and plots each repeat them."""
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
