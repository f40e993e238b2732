"""The sliders in the notebook, of ipywidgets' core widgets alone (7.7.1 and 8): the state behind them decides all."""

from __future__ import annotations

import html
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from helpers import lab
from helpers.analysis.values import plain
from helpers.errors import Refused
from helpers.explorer.bench import Bench
from helpers.explorer.picture import HEIGHT_PX, TITLE_PX, WIDTH_PX, Dashboard
from helpers.explorer.state import BATCH_COUNTS, BATCH_SIZES, HOMES, State, moved, values
from helpers.explorer.tour import compared
from helpers.explorer.view import View, view
from helpers.models import SYNTHETIC_MODELS, resolve
from helpers.predict import search
from helpers.results import RunRecord
from helpers.settings import SHORTEST_PROMPT

COLUMN_PX = 304
LABEL_PX = 106
NUMBER_PX = 72  # beside a slider
ROWS_SHOWN = 10  # of measured runs


class Explorer:
    """The controls, the picture and the buttons of one bench. `fresh`: measure again what is known already.

    A control's move makes a state, a state a view, a view what is shown; only the button Measure this runs anything.
    It runs in the kernel's own thread, controls disabled meanwhile: interrupting the kernel stops it.
    """

    def __init__(self, bench: Bench, fresh: bool = False) -> None:
        self.bench, self.fresh = bench, fresh
        self.state = bench.start
        self._measured = {name: bench.measured(name) for name in bench.machines}
        self._dashboard = Dashboard()
        self._listening = True
        self.controls = _controls(bench)
        self.split_label, self.batch_label = widgets.HTML(), widgets.HTML()
        self.batch_numbers = {name: _number() for name in ("gpu_batch_size", "num_gpu_batches")}
        self.headline, self.message, self.command, self.table = (widgets.HTML() for _ in range(4))
        self.picture = widgets.Image(
            format="png", width=WIDTH_PX, height=HEIGHT_PX - TITLE_PX, layout=widgets.Layout(max_width="100%")
        )
        self.measure = _button("Measure this", "primary", "Run this setting here, through FlexGen")
        self.best = _button("Best split", "", "The fastest setting that fits this machine, of all there are")
        self.reset = _button("Reset", "", "Back to where the sliders were at first")
        self.box = self._arranged()
        for name, control in self.controls.items():
            control.observe(self._on_move(name), names="value")
        self.measure.on_click(lambda _: self._measure())
        self.best.on_click(lambda _: self._find_best())
        self.reset.on_click(lambda _: self.go_to(bench.start))
        self.go_to(bench.start)

    def show(self) -> None:
        """Put the sliders under the notebook's cell."""
        display(self.box)

    def go_to(self, state: State) -> None:
        """Set every control to a state and show it."""
        self.state = state
        self.message.value = _paragraph("")
        self._redraw()

    @property
    def view(self) -> View:
        """What the sliders show now."""
        return view(self.state, self.bench, self._measured[self.state.machine])

    # ---- from a move to what is shown ------------------------------------------------------------------------------

    def _on_move(self, name: str) -> Callable[[Any], None]:
        def on_move(change: Any) -> None:
            if self._listening:
                self.go_to(moved(self.state, name, change["new"], self.bench))

        return on_move

    @contextmanager
    def _not_listening(self):
        """Controls that are set from here are not moved by a person."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def _redraw(self) -> None:
        shown = self.view
        with self._not_listening():
            self._set_controls()
        self.picture.value = self._dashboard.png(shown)
        self.headline.value = _paragraph(shown.headline, wrong=bool(shown.why_not), lines=2)
        self.split_label.value = _split_words(shown)
        self.batch_label.value = _batch_words(shown)
        for name, number in self.batch_numbers.items():
            number.value = str(getattr(self.state.settings.workload, name))
        self.command.value = _command(shown)
        self.table.value = self._table(shown)
        why_not = shown.why_not or self.bench.why_not_measurable(self.state.machine)
        self.measure.disabled = bool(why_not)
        if why_not and not shown.why_not and self.message.value == _paragraph(""):
            self.message.value = _paragraph(why_not)

    def _set_controls(self) -> None:
        """Choices first, then values: a value is always one of its choices.

        A batch that a search found may be none of its slider's, which then stands at the one below, the number beside
        it: choices cannot be changed, a front end answers that with a move of its own.
        """
        state = self.state
        if tuple(self.controls["model"].options) != self.bench.models[state.machine]:
            self.controls["model"].options = self.bench.models[state.machine]
        positions = state.settings.opt_model.max_positions
        self.controls["prompt_len"].max = positions - 1
        self.controls["gen_len"].max = positions - SHORTEST_PROMPT
        for name, value in values(state).items():
            if name in self.batch_numbers:
                value = max(choice for choice in self.controls[name].options if choice <= value)
            if self.controls[name].value != value:
                self.controls[name].value = value
        self.controls["cpu_cache_compute"].disabled = values(state)["cache"] == "GPU"

    def _table(self, shown: View) -> str:
        """This state first, then what was measured of its model, the last first."""
        others = [
            run
            for run in reversed(self._measured[self.state.machine])
            if run.settings.model == self.state.settings.model and not run.is_of(self.state.settings)
        ][:ROWS_SHOWN]
        views = [shown] + [view(State(self.state.machine, run.settings), self.bench, (run,)) for run in others]
        caption = f"Predicted beside measured: {self.state.settings.model} on {self.state.machine}, this setting first"
        return _html(caption, compared("measured", caption, views, self.bench).shown)

    # ---- the buttons -----------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Run the state through the laboratory, with its progress, and show what it measured."""
        with self._busy("Measuring"):
            try:
                sweep = lab.run(
                    self.state.settings,
                    self.bench.output,
                    fresh=self.fresh,
                    say=self._say_running,
                    on_phase=self._say_running,
                )
            except KeyboardInterrupt:
                said, wrong = "Stopped.", True
            except (Refused, OSError) as error:
                said, wrong = f"Not measured: {error}", True
            else:
                said, wrong = _outcome(*sweep.records.values())
        self._measured[self.state.machine] = self.bench.measured(self.state.machine)
        self.message.value = _paragraph(said, wrong)
        self._redraw()

    def _say_running(self, what: str) -> None:
        self.message.value = _paragraph(
            f"Measuring {what} ... The sliders wait until it is done; interrupt the kernel to stop it."
        )

    def _find_best(self) -> None:
        """Go to the fastest setting that fits the machine, for these lengths of prompt and text."""
        work, profile = self.state.settings.workload, self.bench.machines[self.state.machine]
        with self._busy("Comparing every setting ..."):
            try:
                found = search.best(self.state.settings.model, profile, work.prompt_len, work.gen_len)
            except Refused as error:
                self.message.value = _paragraph(str(error), wrong=True)
                return
        kept = {name: getattr(self.state.settings, name) for name in ("device", "page_cache", "repeats")}
        self.go_to(State(self.state.machine, found.best.settings.model_copy(update=kept)))
        self.message.value = _paragraph(f"Best of {found.compared:,} settings: {found.limit}.")

    @contextmanager
    def _busy(self, text: str):
        """Say what is going on, and let nothing be moved meanwhile."""
        self.message.value = _paragraph(text)
        movable = (*self.controls.values(), self.measure, self.best, self.reset)
        before = [control.disabled for control in movable]
        for control in movable:
            control.disabled = True
        try:
            yield
        finally:
            for control, disabled in zip(movable, before):
                control.disabled = disabled

    def _arranged(self) -> widgets.Widget:
        columns = (
            ("machine", "model", "compress_weight", "compress_cache", "pin_weight"),
            ("weights_gpu", "weights_cpu", self.split_label, "cache", "activations", "cpu_cache_compute"),
            (
                *(widgets.HBox([self.controls[name], number]) for name, number in self.batch_numbers.items()),
                self.batch_label,
                "prompt_len",
                "gen_len",
            ),
        )
        boxes = [
            widgets.VBox(
                [self.controls[item] if isinstance(item, str) else item for item in column],
                layout=widgets.Layout(width=f"{COLUMN_PX}px", margin="0 6px 0 0"),
            )
            for column in columns
        ]
        row = widgets.Layout(flex_flow="row wrap", align_items="center")
        return widgets.VBox(
            [
                widgets.HBox(boxes, layout=widgets.Layout(flex_flow="row wrap")),
                widgets.HBox([self.measure, self.best, self.reset], layout=row),
                self.message,
                self.headline,
                self.picture,
                self.command,
                self.table,
            ]
        )


def _controls(bench: Bench) -> dict[str, widgets.Widget]:
    """Every control by the name of what it sets. They are set to a state afterwards."""
    layout = widgets.Layout(width=f"{COLUMN_PX - 10}px")

    def options(description: str, label_px: int = LABEL_PX) -> dict[str, Any]:
        return {"description": description, "layout": layout, "style": {"description_width": f"{label_px}px"}}

    def numbered(description: str) -> dict[str, Any]:
        """Its number is a label beside it: the state's, where the slider has choices alone."""
        narrower = widgets.Layout(width=f"{COLUMN_PX - 10 - NUMBER_PX}px")
        return options(description) | {"readout": False, "layout": narrower}

    def switch(description: str) -> widgets.Checkbox:
        return widgets.Checkbox(
            description=description,
            indent=False,
            layout=widgets.Layout(width=f"{COLUMN_PX - 10}px", margin="2px 2px 2px 12px"),
        )

    tiers = tuple(HOMES)
    return {
        "machine": widgets.Dropdown(options=tuple(bench.machines), **options("Machine", 62)),
        "model": widgets.Dropdown(options=bench.models[bench.start.machine], **options("Model", 62)),
        "compress_weight": switch("4-bit weights"),
        "compress_cache": switch("4-bit KV cache"),
        "pin_weight": switch("weights pinned in RAM"),
        "weights_gpu": widgets.IntSlider(min=0, max=100, **options("GPU weights %")),
        "weights_cpu": widgets.IntSlider(min=0, max=100, **options("CPU weights %")),
        "cache": widgets.Dropdown(options=tiers, **options("KV cache on")),
        "activations": widgets.Dropdown(options=tiers, **options("Activations on")),
        "cpu_cache_compute": switch("attention on the CPU"),
        "gpu_batch_size": widgets.SelectionSlider(options=BATCH_SIZES, **numbered("Batch")),
        "num_gpu_batches": widgets.SelectionSlider(options=BATCH_COUNTS, **numbered("GPU batches")),
        "prompt_len": widgets.IntSlider(min=SHORTEST_PROMPT, max=2047, **options("Prompt tokens")),
        "gen_len": widgets.IntSlider(min=1, max=2041, **options("Generated")),
    }


def _number() -> widgets.Label:
    return widgets.Label(layout=widgets.Layout(width=f"{NUMBER_PX}px", display="flex", justify_content="center"))


def _button(description: str, style: str, tooltip: str) -> widgets.Button:
    return widgets.Button(
        description=description, button_style=style, tooltip=tooltip, layout=widgets.Layout(width="130px")
    )


def _outcome(record: RunRecord) -> tuple[str, bool]:
    """What came of a run, and whether that is nothing."""
    if record.failure:
        return f"The run failed ({record.failure.kind}): {record.failure.message}", True
    return (
        f"{record.kind[0].upper()}{record.kind[1:]}: {plain(record.total_throughput_tok_s)} token/s, recorded "
        f"{record.started_at}; the table's first row has it beside the prediction."
    ), False


# ---- words as HTML --------------------------------------------------------------------------------------------------


def _paragraph(text: str, wrong: bool = False, lines: int = 1) -> str:
    """Words that keep the height of some lines, so that nothing under them jumps."""
    colour = "color:#B34700;" if wrong else ""
    style = f"line-height:1.4;min-height:{1.4 * lines:.1f}em;max-width:{WIDTH_PX}px;{colour}"
    return f'<div style="{style}">{html.escape(text)}</div>'


def _under_sliders(text: str, lines: int) -> str:
    """Words that keep their height, so that nothing jumps while a slider is dragged."""
    style = f"line-height:1.4;min-height:{1.4 * lines:.1f}em;padding-left:14px;width:{COLUMN_PX - 30}px"
    return f'<div style="{style}">{text}</div>'


def _split_words(shown: View) -> str:
    """The disk's share, and what FlexGen makes of the three."""
    asked = shown.weights["disk"].asked_percent
    made = " + ".join(
        f"{share.achieved_percent:.1f} % {tier if tier == 'disk' else tier.upper()}"
        for tier, share in shown.weights.items()
        if share.achieved_bytes
    )
    return _under_sliders(f"disk {asked} % (the rest)<br>achieved: <b>{made}</b>", lines=3)


def _batch_words(shown: View) -> str:
    work = shown.state.settings.workload
    return _under_sliders(
        f"{work.gpu_batch_size} × {work.num_gpu_batches} = <b>{work.effective_batch} sequences</b> at a time", lines=1
    )


def _command(shown: View) -> str:
    own = resolve(shown.state.settings.model) in SYNTHETIC_MODELS
    note = f" ({html.escape(shown.state.settings.model)} is this laboratory's: take an OPT model for it)" if own else ""
    return (
        f'<div style="line-height:1.4;max-width:{WIDTH_PX}px">FlexGen\'s command line{note}:'
        '<pre style="white-space:pre-wrap;user-select:all;margin:2px 0 6px 0;padding:6px;'
        f'background:rgba(128,128,128,0.12)">{html.escape(shown.command)}</pre></div>'
    )


def _html(caption: str, frame: Any) -> str:
    cell = "padding:2px 8px;text-align:left;vertical-align:top;border-bottom:1px solid rgba(128,128,128,0.3)"
    head = "".join(f'<th style="{cell}">{html.escape(str(name))}</th>' for name in frame.columns)
    lines = [
        f"<tr{' class=explorer-this' if not i else ''}>"
        + "".join(f'<td style="{cell}">{html.escape(str(text))}</td>' for text in line)
        + "</tr>"
        for i, line in enumerate(frame.values.tolist())
    ]
    return (
        f'<div style="max-width:{WIDTH_PX}px;overflow-x:auto;line-height:1.35">{html.escape(caption)}.'
        f'<table style="border-collapse:collapse;font-size:12px"><tr>{head}</tr>{"".join(lines)}</table></div>'
    )
