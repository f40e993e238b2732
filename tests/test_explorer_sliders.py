"""The sliders without a browser: what a move, a button and a failure change."""

from __future__ import annotations

import gc
import random

import ipywidgets as widgets
import psutil
import pytest

from explorer_factories import logged
from helpers import explorer, lab, results
from helpers.analysis.values import plain
from helpers.errors import Refused
from helpers.explorer.bench import EMULATED, open_bench
from helpers.explorer.controls import BATCH_SIZES
from helpers.explorer.sliders import ASK_ABOVE_S, PICTURES
from helpers.predict import search
from helpers.results import Log


@pytest.fixture
def sliders(tmp_path, monkeypatch):
    """Sliders whose Measure runs nothing: `asked` holds what it would have run."""
    made = explorer.Explorer(open_bench("emulated", tmp_path, repeats=1))
    made.asked = []

    def run(settings, output, *, fresh, say, on_phase):
        made.asked.append((settings, made.controls["weights_gpu"].disabled))
        on_phase("opt-mini: warm-up")
        made.said = made.message.value
        record = logged(made.bench, str(settings.split), ((0.1, 0.1),))
        Log(output / results.LOG_NAME).append(record)
        return lab.Sweep({"one": record})

    monkeypatch.setattr(lab, "run", run)
    return made


def every_widget(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from every_widget(child)


def test_a_move_changes_all_that_depends_on_it_and_runs_nothing(sliders):
    before = sliders.picture.value, sliders.summary.value
    sliders.controls["weights_gpu"].value = 80
    assert sliders.controls["weights_cpu"].value == 20
    assert "--percent 80 20 100 0 100 0" in sliders.command.value
    assert sliders.picture.value != before[0] and sliders.summary.value != before[1]
    assert "disk 0 %" in sliders.split_label.value and "achieved" in sliders.split_label.value
    sliders.controls["weights_cpu"].value = 5
    assert "disk 15 %" in sliders.split_label.value
    sliders.controls["gpu_batch_size"].value = 16
    sliders.controls["num_gpu_batches"].value = 2
    assert "16 × 2 = <b>32 sequences" in sliders.batch_label.value
    assert (sliders.numbers["gpu_batch_size"].value, sliders.numbers["num_gpu_batches"].value) == ("16", "2")
    assert sliders.asked == []
    sliders.reset.click()
    assert sliders.state == sliders.bench.start and (sliders.picture.value, sliders.summary.value) == before


def test_switches_set_the_options_of_the_run(sliders):
    for name in ("fitted_buffers", "direct_reader", "compress_weight"):
        sliders.controls[name].value = True
    sliders.controls["overlap"].value = False
    settings = sliders.state.settings
    assert (settings.copy_buffer, settings.disk_reader, settings.overlap) == ("fit", "direct", False)
    assert "--compress-weight" in sliders.command.value and "--overlap false" in sliders.command.value


def test_each_picture_is_drawn_when_chosen(sliders):
    drawn = set()
    for name in PICTURES:
        sliders.which.value = name
        drawn.add(sliders.picture.value)
    assert len(drawn) == len(PICTURES)


def test_every_control_is_a_core_widget_with_a_tooltip(sliders):
    found = list(every_widget(sliders.box))
    assert sum(isinstance(widget, widgets.Image) for widget in found) == 2
    assert {widget._model_module for widget in found} == {"@jupyter-widgets/controls"}
    controls = [*sliders.controls.values(), sliders.batch_limit, sliders.measure, sliders.best, sliders.reset]
    assert all(control in found for control in controls)
    assert all(control.tooltip for control in controls) and all(sliders.which.tooltips)


def test_a_machine_brings_its_models_and_says_why_it_cant_be_measured(sliders):
    sliders.controls["machine"].value = "t4-colab"
    assert sliders.controls["model"].value == "opt-1.3b" and "opt-mini" not in sliders.controls["model"].options
    assert sliders.measure.disabled and "Predicted only" in sliders.message.value
    assert "t4-colab" in sliders.headline.value and "emulated" not in sliders.headline.value
    sliders.controls["machine"].value = EMULATED
    assert sliders.controls["model"].value == "opt-mini" and not sliders.measure.disabled
    assert "emulated" in sliders.headline.value


def test_what_ifs_are_marked_and_dropped_with_one_click(sliders):
    assert sliders.real.disabled and "GB/s" in sliders.numbers["disk_gb_s"].value
    before = sliders.view.prediction
    sliders.controls["weights_cpu"].value = 0
    real = sliders.view.prediction
    sliders.controls["disk_gb_s"].value = 5.0
    sliders.controls["host_ram_gib"].value = 24.0
    assert sliders.view.prediction.total_throughput_tok_s > real.total_throughput_tok_s
    for text in (sliders.headline.value, sliders.table.value, sliders.message.value):
        assert "hypothetical" in text
    assert sliders.measure.disabled and "<b" in sliders.numbers["disk_gb_s"].value
    sliders.real.click()
    assert sliders.view.prediction == real != before and sliders.real.disabled and not sliders.measure.disabled
    assert sliders.controls["disk_gb_s"].value == 0.0


def test_measuring_puts_the_run_next_to_its_prediction(sliders):
    before = sliders.picture.value
    assert "measured on the emulated GPU" not in sliders.table.value
    sliders.measure.click()
    ((settings, disabled),) = sliders.asked
    assert settings == sliders.bench.start.settings and disabled
    assert "warm-up" in sliders.said and not sliders.measure.disabled
    tok_s = plain(settings.workload.generated_tokens / 0.2)
    assert f"{tok_s} token/s" in sliders.message.value and tok_s in sliders.table.value
    assert "measured on the emulated GPU" in sliders.table.value and sliders.picture.value != before
    assert sliders.measure.description == "Measured already"
    sliders.controls["weights_gpu"].value = 30
    assert sliders.view.run is None and "about" in sliders.measure.description
    assert sliders.table.value.count("<tr") == 3  # its head, this setting and the one measured


def test_a_long_measurement_asks_first(sliders):
    sliders.controls["gpu_batch_size"].value = BATCH_SIZES[-1]
    sliders.controls["num_gpu_batches"].value = 16
    assert sliders.view.measuring_s > ASK_ABOVE_S
    sliders.measure.click()
    assert sliders.asked == [] and "Press again" in sliders.message.value and "16,384" in sliders.message.value
    sliders.controls["num_gpu_batches"].value = 12  # a move forgets it
    sliders.measure.click()
    assert sliders.asked == []
    sliders.measure.click()
    assert len(sliders.asked) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "Stopped"),
        (Refused("no <disk>"), "Not measured: no &lt;disk&gt;"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_the_sliders_go_on_after_a_failed_measurement(sliders, monkeypatch, error, said):
    def run(*settings, **options):
        raise error

    monkeypatch.setattr(lab, "run", run)
    sliders.measure.click()
    assert said in sliders.message.value and not sliders.measure.disabled
    sliders.controls["weights_gpu"].value = 10
    assert sliders.state.settings.split.weights_gpu == 10


def test_the_best_setting_is_the_searchs_within_the_limit(sliders):
    limit = 16
    sliders.batch_limit.value = limit
    sliders.best.click()
    work = sliders.bench.start.settings.workload
    machine = sliders.bench.machines[EMULATED]
    found = search.best("opt-mini", machine, work.prompt_len, work.gen_len, batch_limit=limit)
    settings = sliders.state.settings
    assert settings == found.best.settings.replace(device="emulated", repeats=1, page_cache="natural")
    assert settings.workload.effective_batch <= limit
    assert f"{found.compared:,}" in sliders.message.value
    assert f"--percent 50 50 100 0 100 0 → {settings.split}" in sliders.message.value
    assert sliders.numbers["gpu_batch_size"].value == str(settings.workload.gpu_batch_size)
    sliders.reset.click()
    assert sliders.state == sliders.bench.start


def test_nothing_moves_when_a_message_appears(sliders):
    def heights():
        return [text.value.split(";overflow")[0] for text in (sliders.message, sliders.headline)]

    before = heights()
    sliders.controls["machine"].value = "t4-colab"
    sliders.controls["model"].value = "opt-66b"
    assert "Does not fit" in sliders.headline.value
    assert [height.split("height:")[-1] for height in heights()] == [one.split("height:")[-1] for one in before]


def test_memory_stays_bounded_over_thousands_of_moves(sliders):
    """Twice as many moves take hardly more: caches are full, and nothing else keeps what was shown."""
    moves = random.Random(3)
    process = psutil.Process()

    def move(times):
        for _ in range(times):
            name = moves.choice(("weights_gpu", "weights_cpu", "gpu_batch_size", "prompt_len", "gen_len", "disk_gb_s"))
            control = sliders.controls[name]
            values = (
                [value for _, value in control.options if value]
                if name == "disk_gb_s"
                else control.options
                if name == "gpu_batch_size"
                else range(control.min, control.max + 1)
            )
            control.value = moves.choice(values)
            if moves.random() < 0.05:
                sliders.which.value = moves.choice(list(PICTURES))
        gc.collect()
        return process.memory_info().rss / 2**20

    before, after = move(50), move(50)
    assert after - before < 60
