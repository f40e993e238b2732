"""The sliders at work: a move makes a state, a state a view, and a view everything that is shown."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from helpers import forecast, lab, options
from helpers.analysis.values import plain
from helpers.errors import Refused
from helpers.explorer import sayings
from helpers.explorer.bench import Bench, once
from helpers.explorer.controls import BATCH_LIMITS, COLUMN_PX, button, make_controls, number, with_tooltip, words
from helpers.explorer.drawing import WIDTH_PX, Drawing
from helpers.explorer.frontier import FrontierPicture
from helpers.explorer.map_picture import MapPicture
from helpers.explorer.moves import moved
from helpers.explorer.overlap import OverlapPicture
from helpers.explorer.roofline import RooflinePicture
from helpers.explorer.state import State, values
from helpers.explorer.summary import Summary
from helpers.explorer.tour import row_in_words
from helpers.explorer.view import View, view
from helpers.predict import search
from helpers.results import RunRecord
from helpers.settings import SHORTEST_PROMPT, RunSettings

PICTURES: dict[str, tuple[type[Drawing], str]] = {
    "Map": (MapPicture, "Throughput and fit at every split of the weights"),
    "Frontier": (FrontierPicture, "Latency against throughput, over every split and batch that fits"),
    "Overlap": (OverlapPicture, "What loads, computes and stores at the same time"),
    "Roofline": (RooflinePicture, "Throughput over the batch, under each part's own limit"),
}
ROWS_SHOWN = 10  # of measured runs
ASK_ABOVE_S = 120.0


class Explorer:
    """The controls, pictures and buttons of one bench. `fresh`: measure again what is already known.

    Only the button Measure runs anything. It runs in the kernel's own thread with the controls disabled, so that
    interrupting the kernel stops it.
    """

    def __init__(self, bench: Bench, fresh: bool = False) -> None:
        self.bench, self.fresh = bench, fresh
        self.state = bench.start
        self._measured = {name: bench.measured(name) for name in bench.machines}
        self._rows: dict[tuple[str, str], dict[RunSettings, dict[str, str]]] = {}  # of the table, by machine and model
        self._drawings: dict[type[Drawing], Drawing] = {}
        self._listening = True
        self._asked: RunSettings | None = None  # a long measurement that waits for a second press
        self.controls = make_controls(bench)
        self.numbers = {
            name: number() for name in ("gpu_batch_size", "num_gpu_batches", "disk_gb_s", "h2d_gb_s", "host_ram_gib")
        }
        self.split_label, self.batch_label = words(), words()
        self.headline, self.message, self.command, self.table = (words() for _ in range(4))
        self.which = with_tooltip(
            widgets.ToggleButtons(
                options=tuple(PICTURES), tooltips=[why for _, why in PICTURES.values()], style={"button_width": "96px"}
            ),
            "Which picture to show",
        )
        self.picture, self.summary = (
            widgets.Image(
                format="png",
                width=WIDTH_PX,
                height=height,
                layout=widgets.Layout(max_width="100%", object_fit="contain"),
            )
            for height in (MapPicture.height_px, Summary.height_px)
        )
        self.measure = button("Measure", "Run this setting here, through FlexGen", 160, "primary")
        self.best = button("Best setting", "The fastest setting that fits this machine within the batch limit", 96)
        self.batch_limit = with_tooltip(
            widgets.Dropdown(
                options=BATCH_LIMITS,
                description="batch limit",
                style={"description_width": "70px"},
                layout=widgets.Layout(width="152px"),
            ),
            "The most sequences that the best setting may have at a time",
        )
        self.reset = button("Reset", "Back to where the sliders started", 60)
        self.real = button("Real machine", "Drop every supposed rate and size", 110)
        self.box = self._arranged()
        for name, control in self.controls.items():
            control.observe(self._on_move(name), names="value")
        self.which.observe(lambda _: self._draw(self.view), names="value")
        self.measure.on_click(lambda _: self._on_measure())
        self.best.on_click(lambda _: self._find_best())
        self.reset.on_click(lambda _: self.go_to(bench.start))
        self.real.on_click(lambda _: self.go_to(State(self.state.machine, self.state.settings)))
        self.go_to(bench.start)
        # A full garbage collection of all that is imported takes 0.1 s, which is felt in the middle of a drag.
        gc.collect()
        gc.freeze()

    def show(self) -> None:
        """Put the sliders under the notebook's cell."""
        display(self.box)

    @property
    def view(self) -> View:
        """What the sliders show now."""
        return view(self.state, self.bench, self._measured[self.state.machine])

    # ---- from a move to what is shown ------------------------------------------------------------------------------

    def go_to(self, state: State, message: str = "") -> None:
        """Set every control to a state and show it, with a message or why it can't be measured."""
        self.state, self._asked = state, None
        shown = self.view
        with self._not_listening():
            self._set_controls()
        self._draw(shown)
        self.headline.value = sayings.message(shown.headline, bool(shown.why_not), lines=3, width_px=WIDTH_PX - 10)
        self.split_label.value = sayings.split(shown)
        self.batch_label.value = sayings.batch(shown)
        self.command.value = sayings.command(shown)
        self.table.value = self._table(shown)
        why_not = self.bench.why_not_measurable(state)
        self.measure.disabled = bool(why_not or shown.why_not)
        self.measure.description, self.measure.button_style = self._offer(shown), "primary"
        self._say(message or why_not)

    def _on_move(self, name: str) -> Callable[[Any], None]:
        def on_move(change: Any) -> None:
            if self._listening:
                self.go_to(moved(self.state, name, change["new"], self.bench))

        return on_move

    @contextmanager
    def _not_listening(self) -> Iterator[None]:
        """Controls that the code sets don't count as moved."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True

    def _draw(self, shown: View) -> None:
        kind, _ = PICTURES[self.which.value]
        for image, drawing in ((self.picture, kind), (self.summary, Summary)):
            if drawing not in self._drawings:
                self._drawings[drawing] = drawing()
            image.value = self._drawings[drawing].png(shown)

    def _set_controls(self) -> None:
        """Choices first, then values: a value is always one of its choices.

        A searched batch may lie between two of its slider's choices; the slider then stands at the one below and the
        number next to it tells. (Choices stay fixed: a front end answers new ones with a move of its own.)
        """
        state, set_to = self.state, values(self.state)
        if tuple(self.controls["model"].options) != self.bench.models[state.machine]:
            self.controls["model"].options = self.bench.models[state.machine]
        positions = state.settings.opt_model.max_positions
        self.controls["prompt_len"].max = positions - 1
        self.controls["gen_len"].max = positions - SHORTEST_PROMPT
        machine = self.bench.machines[state.machine]
        for name, label in self.numbers.items():
            if name in ("gpu_batch_size", "num_gpu_batches"):
                label.value = str(set_to[name])
                set_to[name] = max(choice for choice in self.controls[name].options if choice <= set_to[name])
            else:
                unit = "GiB" if name == "host_ram_gib" else "GB/s"
                supposed = set_to[name] > 0
                figure = f"{plain(set_to[name] if supposed else getattr(machine, name))} {unit}"
                label.value = f'<b style="color:#B34700">{figure}</b>' if supposed else figure
        for name, value in set_to.items():
            if self.controls[name].value != value:
                self.controls[name].value = value
        self.controls["cpu_cache_compute"].disabled = set_to["cache"] == "GPU"
        self.real.disabled = not state.what_if

    def _table(self, shown: View) -> str:
        """This state first, then the measured runs of its model, the latest first."""
        machine, model = self.state.machine, self.state.settings.model
        if (machine, model) not in self._rows:
            measured = self._measured[machine]
            alike = [settings for settings in reversed(list(measured)) if settings.model == model]
            views = (view(State(machine, settings), self.bench, measured) for settings in alike[: ROWS_SHOWN + 1])
            self._rows[machine, model] = {
                one.settings: row_in_words(one, self.bench) for one in views if one.measured_tok_s
            }
        others = [row for settings, row in self._rows[machine, model].items() if settings != once(shown.settings)]
        caption = f"Predicted next to measured: {model} on {machine}, this setting first."
        return sayings.table(caption, [row_in_words(shown, self.bench), *others[:ROWS_SHOWN]])

    def _say(self, text: str, wrong: bool = False) -> None:
        self.message.value = sayings.message(text, wrong, lines=2, width_px=sayings.FULL_PX - 10)

    # ---- the buttons -----------------------------------------------------------------------------------------------

    def _offer(self, shown: View) -> str:
        """What the button Measure says: how long it will take."""
        if self.measure.disabled:
            return "Measure"
        if shown.run and not self.fresh:
            return "Measured already"
        return f"Measure ({forecast.in_words(shown.measuring_s)})"

    def _on_measure(self) -> None:
        """Measure, or if that takes long ask first: the second press then measures."""
        shown = self.view
        known = shown.run and not self.fresh
        if known or shown.measuring_s <= ASK_ABOVE_S or self._asked == self.state.settings:
            self._measure()
            return
        self._asked = self.state.settings
        work = self.state.settings.workload
        self.measure.description = f"Yes, {forecast.in_words(shown.measuring_s).removeprefix('about ')}"
        self.measure.button_style = "warning"
        self._say(
            f"This will take {forecast.in_words(shown.measuring_s)}: {work.effective_batch:,} sequences, "
            f"{self.state.settings.repeats} repeats. Press again to start, or move any slider to forget it.",
            wrong=True,
        )

    def _measure(self) -> None:
        """Run the state through the lab, with its progress, and show the result."""
        with self._busy("Measuring ..."):
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
        self._rows.clear()
        self.go_to(self.state)
        self._say(said, wrong)

    def _say_running(self, what: str) -> None:
        self._say(f"Measuring {what} ... The sliders wait until it is done; interrupt the kernel to stop it.")

    def _find_best(self) -> None:
        """Go to the fastest setting within the batch limit, for these prompt and text lengths, and say what changed."""
        before, limit = self.state, self.batch_limit.value or None
        work = before.settings.workload
        with self._busy("Comparing every setting."):
            try:
                found = search.best(
                    before.settings.model,
                    self.bench.profile(before),
                    work.prompt_len,
                    work.gen_len,
                    batch_limit=limit,
                    on_progress=lambda share: self._say(f"Comparing every setting: {100 * share:.0f} % done."),
                )
            except Refused as error:
                self._say(str(error), wrong=True)
                return
        kept = {name: getattr(before.settings, name) for name in ("device", "page_cache", "repeats")}
        settings = found.best.settings.replace(**kept)
        within = f" with batches up to {limit}" if limit else ""
        self.go_to(
            State(before.machine, settings, before.what_if),
            f"Best of {found.compared:,} settings{within}: {found.limit}. It {_changes(before.settings, settings)}.",
        )

    @contextmanager
    def _busy(self, text: str) -> Iterator[None]:
        """Show a message and disable every control meanwhile."""
        self._say(text)
        buttons = (self.measure, self.best, self.batch_limit, self.reset, self.real, self.which)
        movable = (*self.controls.values(), *buttons)
        before = [control.disabled for control in movable]
        for control in movable:
            control.disabled = True
        try:
            yield
        finally:
            for control, disabled in zip(movable, before):
                control.disabled = disabled

    # ---- the layout ------------------------------------------------------------------------------------------------

    def _arranged(self) -> widgets.Widget:
        """Sliders at the left, pictures at the right, and above them what applies to both."""

        def row(*names: str) -> widgets.HBox:
            """A slider with the number next to it, or controls side by side."""
            items = [item for name in names for item in (self.controls[name], self.numbers.get(name)) if item]
            return widgets.HBox(items, layout=widgets.Layout(width=f"{COLUMN_PX}px", overflow="hidden"))

        def heading(text: str) -> widgets.HTML:
            label = words()
            label.value = f'<b style="line-height:1.5">{text}</b>'
            return label

        what_if = widgets.HBox(
            [heading("What if the machine had (hypothetical)"), self.real],
            layout=widgets.Layout(width=f"{COLUMN_PX}px", justify_content="space-between", align_items="center"),
        )
        left = widgets.VBox(
            [
                *(self.controls[name] for name in ("weights_gpu", "weights_cpu")),
                self.split_label,
                row("cache", "activations"),
                row("gpu_batch_size"),
                row("num_gpu_batches"),
                self.batch_label,
                *(self.controls[name] for name in ("prompt_len", "gen_len")),
                row("compress_weight", "compress_cache"),
                row("pin_weight", "cpu_cache_compute"),
                row("fitted_buffers", "direct_reader"),
                row("overlap", "cold"),
                what_if,
                row("disk_gb_s"),
                row("h2d_gb_s"),
                row("host_ram_gib"),
            ],
            layout=widgets.Layout(flex=f"0 0 {COLUMN_PX + 4}px", overflow="hidden"),
        )
        right = widgets.VBox(
            [self.headline, self.which, self.picture, self.summary],
            layout=widgets.Layout(flex="1 1 auto", min_width="0", max_width=f"{WIDTH_PX + 8}px", overflow="hidden"),
        )
        top = widgets.HBox(
            [
                *(self.controls[name] for name in ("machine", "model")),
                self.measure,
                self.best,
                self.batch_limit,
                self.reset,
            ],
            layout=widgets.Layout(flex_flow="row wrap", align_items="center"),
        )
        side_by_side = widgets.HBox([left, right], layout=widgets.Layout(flex_flow="row nowrap"))
        return widgets.VBox([top, self.message, side_by_side, self.command, self.table])


def _outcome(record: RunRecord) -> tuple[str, bool]:
    """The outcome of a run, and whether it failed."""
    if record.failure or record.total_throughput_tok_s is None:
        failure = record.failure
        return f"The run failed ({failure.kind}): {failure.message}" if failure else "The run has no figures.", True
    return (
        f"{record.kind[0].upper()}{record.kind[1:]}: {plain(record.total_throughput_tok_s)} token/s, recorded "
        f"{record.started_at}; the table's first row has it next to the prediction."
    ), False


def _changes(before: RunSettings, after: RunSettings) -> str:
    """Which options differ between two settings, for "It ..."."""
    changed = [
        f"{one.option.flag or one.name} {one.value_in(before)} → {one.value_in(after)}"
        for one in options.declared(RunSettings)
        if one.value_in(before) != one.value_in(after)
    ]
    return f"changes {', '.join(changed)}" if changed else "changes nothing"
