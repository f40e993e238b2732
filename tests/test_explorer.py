"""The sliders without a browser: every reachable state can be run, and what is shown is what the models say."""

from __future__ import annotations

import io
import itertools
import re

import ipywidgets as widgets
import numpy as np
import pytest
from hypothesis import given, settings as budget, strategies as st
from matplotlib.figure import Figure
from PIL import Image

from factories import make_record
from helpers import explorer, homework, lab, results
from helpers.errors import Refused
from helpers.explorer import lettering, split_map as split_maps
from helpers.explorer.bench import EMULATED, _measured_profile, emulated_profile, open_bench
from helpers.explorer.picture import Dashboard, plot
from helpers.explorer.split_map import fit, split_map
from helpers.explorer.state import BATCH_COUNTS, BATCH_SIZES, HOMES, moved, values
from helpers.explorer.view import view
from helpers.machine import profiles
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.profiles import T4_COLAB
from helpers.placement import place
from helpers.predict import search
from helpers.predict.gpu_memory import peak_gpu_memory
from helpers.predict.host_memory import host_memory
from helpers.predict.search import all_placements, fits
from helpers.predict.time_model import predict
from helpers.results import Log, Machine
from helpers.settings import OffloadSplit, RunSettings

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return open_bench("emulated", tmp_path_factory.mktemp("out"))


def at(bench, **controls):
    """The bench's start with some controls moved, one after another."""
    state = bench.start
    for control, value in controls.items():
        state = moved(state, control, value, bench)
    return state


def t4(bench, **controls):
    """The hand-in's machine, model and workload, with some controls moved."""
    hand_in = {"machine": "t4-colab", "model": "opt-1.3b", "gpu_batch_size": 4, "prompt_len": 128, "gen_len": 16}
    return at(bench, **(hand_in | controls))


# ---- states ---------------------------------------------------------------------------------------------------------

MOVES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["weights_gpu", "weights_cpu"]), st.integers(0, 100)),
        st.tuples(st.sampled_from(["cache", "activations"]), st.sampled_from(list(HOMES))),
        st.tuples(st.just("gpu_batch_size"), st.sampled_from(BATCH_SIZES)),
        st.tuples(st.just("num_gpu_batches"), st.sampled_from(BATCH_COUNTS)),
        st.tuples(st.just("prompt_len"), st.integers(7, 2047)),
        st.tuples(st.just("gen_len"), st.integers(1, 2041)),
        st.tuples(
            st.sampled_from(["compress_weight", "compress_cache", "cpu_cache_compute", "pin_weight"]), st.booleans()
        ),
        st.tuples(st.just("machine"), st.sampled_from([EMULATED, "t4-colab", "t4-gcp"])),
        st.tuples(st.just("model"), st.sampled_from(["opt-125m", "opt-1.3b", "opt-30b", "opt-mini"])),
    ),
    max_size=12,
)


@given(moves=MOVES)
@budget(max_examples=150, deadline=None)
def test_no_move_leads_to_what_cannot_be(bench, moves):
    state = bench.start
    for control, value in moves:
        state = moved(state, control, value, bench)
        settings, split, work = state.settings, state.settings.split, state.settings.workload
        assert RunSettings.model_validate_json(settings.model_dump_json()) == settings
        assert split.weights_gpu + split.weights_cpu + split.weights_disk == 100 and split.weights_disk >= 0
        assert work.prompt_len + work.gen_len <= settings.opt_model.max_positions
        assert settings.model in bench.models[state.machine]
        assert settings.device == ("emulated" if state.machine == EMULATED else "cuda")
        if control not in ("model", "cpu_cache_compute"):  # the machine has that model, the cache is not on the GPU
            assert values(state)[control] == value


@given(gpu=st.integers(0, 100), cpu=st.integers(0, 100))
@budget(max_examples=50, deadline=None)
def test_of_two_shares_the_one_not_moved_gives_way(bench, gpu, cpu):
    split = at(bench, weights_cpu=cpu, weights_gpu=gpu).settings.split
    assert (split.weights_gpu, split.weights_cpu) == (gpu, min(cpu, 100 - gpu))
    split = at(bench, weights_gpu=gpu, weights_cpu=cpu).settings.split
    assert (split.weights_cpu, split.weights_gpu) == (cpu, min(gpu, 100 - cpu))


def test_a_move_is_undone_by_moving_back_where_nothing_gave_way(bench):
    away = at(bench, weights_cpu=20)
    assert moved(away, "weights_cpu", 50, bench) == bench.start


def test_a_bench_refuses_what_flexgen_has_not(tmp_path):
    with pytest.raises(Refused, match="opt-350m"):
        open_bench("emulated", tmp_path, "opt-350m")


# ---- what a state shows ---------------------------------------------------------------------------------------------


def test_what_is_shown_is_what_the_models_say(bench):
    state = t4(bench, weights_gpu=30, weights_cpu=70)
    shown, settings = view(state, bench, ()), state.settings
    assert shown.prediction == predict(settings, T4_COLAB)
    placed = place(settings.opt_model, 30, 70, False)
    assert [share.achieved_bytes for share in shown.weights.values()] == list(placed.bytes_by_tier.values())
    assert shown.weights["gpu"].asked_percent == 30 and 35 < shown.weights["gpu"].achieved_percent < 36
    peak = peak_gpu_memory(settings, T4_COLAB.cublas_workspace_bytes)
    overhead = T4_COLAB.gpu_overhead_gib * 2**30
    assert shown.gpu.need_bytes == pytest.approx(peak.likeliest_bytes + overhead)
    assert shown.gpu.most_bytes == pytest.approx(peak.high_bytes + overhead)
    for memory in (shown.gpu, shown.host):
        assert sum(memory.parts.values()) == pytest.approx(memory.need_bytes)
    of_python = T4_COLAB.host_overhead_gib * 2**30
    assert shown.host.need_bytes == pytest.approx(host_memory(settings).total_bytes + of_python)


def test_the_emulated_machine_has_its_own_ram_and_pins_nothing(bench):
    shown = view(bench.start, bench, ())
    assert shown.host.capacity_bytes == pytest.approx(lab.describe_machine("emulated").ram_gib * 2**30)
    assert "copy buffers" not in shown.host.parts and shown.host.need_bytes < 2**30
    assert sum(shown.host.parts.values()) == pytest.approx(shown.host.need_bytes)
    assert view(t4(bench), bench, ()).host.parts["copy buffers"] == 8 * 2**30


@given(
    gpu=st.integers(0, 100),
    cpu=st.integers(0, 100),
    batch=st.sampled_from(BATCH_SIZES),
    model=st.sampled_from(["opt-125m", "opt-6.7b", "opt-30b"]),
)
@budget(max_examples=40, deadline=None)
def test_a_state_that_cannot_run_says_so_and_one_that_can_does_not(bench, gpu, cpu, batch, model):
    state = t4(bench, model=model, weights_gpu=gpu, weights_cpu=cpu, gpu_batch_size=batch)
    shown = view(state, bench, ())
    assert bool(shown.why_not) == (not fits(state.settings, T4_COLAB)) == (not shown.prediction.fits)
    assert shown.headline.startswith("Does not fit: needs" if shown.why_not else "Predicted: ")
    share = state.settings.split
    assert shown.splits.fits[share.weights_gpu, share.weights_cpu] == (not shown.why_not)


def test_words_for_what_does_not_fit_have_both_numbers(bench):
    shown = view(t4(bench, model="opt-6.7b", gpu_batch_size=32, prompt_len=256, gen_len=8, weights_gpu=80), bench, ())
    need, there = map(float, re.findall(r"[0-9]+\.[0-9]+", shown.why_not))
    assert "GiB of GPU memory, t4-colab has 14.6" in shown.why_not and need > there == 14.6


def test_the_map_is_the_prediction_of_every_split(bench):
    settings = t4(bench).settings
    whole = split_map(view_key(settings), T4_COLAB)
    assert int((~np.isnan(whole.tok_s)).sum()) == 5151
    for gpu, cpu in itertools.product(range(0, 101, 20), repeat=2):
        if gpu + cpu > 100:
            assert np.isnan(whole.tok_s[gpu, cpu]) and not whole.fits[gpu, cpu]
            continue
        split = settings.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
        predicted = predict(settings.model_copy(update={"split": split}), T4_COLAB)
        assert whole.tok_s[gpu, cpu] == pytest.approx(predicted.total_throughput_tok_s, rel=0.01)
        assert whole.fits[gpu, cpu] == predicted.fits


def view_key(settings):
    """Settings as the map takes them: for no split in particular."""
    return settings.model_copy(update={"split": OffloadSplit(weights_gpu=0, weights_cpu=0)})


@given(
    model=st.sampled_from(["opt-125m", "opt-1.3b", "opt-30b"]),
    cache=st.sampled_from(list(HOMES)),
    batch=st.sampled_from(BATCH_SIZES),
    batches=st.sampled_from(BATCH_COUNTS),
    prompt_len=st.integers(7, 1500),
    compress=st.booleans(),
    pin=st.booleans(),
    room=st.floats(0.5, 1.5),
    ram_gib=st.sampled_from([12.7, 60.0, 500.0]),
)
@budget(max_examples=30, deadline=None)
def test_what_fits_is_the_searchs_answer_at_every_placement(
    bench, model, cache, batch, batches, prompt_len, compress, pin, room, ram_gib
):
    settings = t4(
        bench,
        model=model,
        cache=cache,
        gpu_batch_size=batch,
        num_gpu_batches=batches,
        prompt_len=prompt_len,
        compress_weight=compress,
        compress_cache=compress,
        pin_weight=pin,
    ).settings
    # A GPU whose memory ends in the midst of what these settings need.
    needed_gib = peak_gpu_memory(settings, T4_COLAB.cublas_workspace_bytes).likeliest_gib
    machine = T4_COLAB.model_copy(
        update={"gpu_mem_gib": T4_COLAB.gpu_overhead_gib + room * needed_gib, "host_ram_gib": ram_gib}
    )
    splits = [
        settings.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
        for gpu, cpu in all_placements(settings.opt_model)
    ]
    one_by_one = [fits(settings.model_copy(update={"split": split}), machine) for split in splits]
    assert fit(settings, machine).tolist() == one_by_one


def test_a_peak_is_followed_only_where_its_bounds_leave_it_open(bench, monkeypatch):
    followed = []

    def counted(settings, workspace):
        followed.append(settings)
        return peak_gpu_memory(settings, workspace)

    monkeypatch.setattr(split_maps, "peak_gpu_memory", counted)
    for prompt_len in (40, 41, 42):
        fit(t4(bench, prompt_len=prompt_len).settings, T4_COLAB)
    assert len(followed) == 3  # all on the GPU fits by far: once a prompt's length
    followed.clear()
    settings = t4(bench, model="opt-30b", pin_weight=False).settings
    roomy = T4_COLAB.model_copy(update={"host_ram_gib": 500.0})
    fitting = fit(settings, roomy)
    assert 0 < fitting.sum() < len(fitting) and len(followed) < len(fitting) / 4


def test_the_command_can_be_pasted_into_a_shell(bench):
    command = view(t4(bench, compress_weight=True), bench, ()).command
    assert command.startswith("python -m flexgen.flex_opt --model facebook/opt-1.3b --path ~/opt_weights ")
    assert "--percent 50 50 100 0 100 0" in command and command.endswith("--compress-weight")


# ---- what was measured ----------------------------------------------------------------------------------------------


def logged(bench, percent, latencies, **options):
    """A run of the sweep as the laboratory would have recorded it here."""
    settings = bench.start.settings.model_copy(update={"split": OffloadSplit.parse(percent)} | options)
    where = lab.describe_machine("emulated")
    return make_record(
        percent,
        latencies,
        settings={name: getattr(settings, name) for name in RunSettings.model_fields},
        kind="measured on the emulated GPU",
        machine=where,
        key=lab.run_key(settings, where),
    )


def test_measured_runs_lie_over_the_predictions(tmp_path):
    bench = open_bench("emulated", tmp_path)
    log = Log(tmp_path / results.LOG_NAME)
    log.append(logged(bench, "50 50 100 0 100 0", ((0.1, 0.1),)))
    log.append(logged(bench, "0 0 100 0 100 0", ((3.0, 3.0),)))
    log.append(logged(bench, "0 0 100 0 100 0", ((3.0, 3.0),), compress_weight=True))
    another = lab.describe_machine("emulated").model_copy(update={"cpu": "another"})
    there = logged(bench, "50 50 100 0 100 0", ((9.0, 9.0),))
    log.append(there.model_copy(update={"machine": another, "key": lab.run_key(there.settings, another)}))
    shown = view(bench.start, bench, bench.measured(EMULATED))
    assert shown.measured.throughput_tok_s.value == pytest.approx(32 / 0.2)
    assert [run.settings.split.percent[:2] for run in shown.measured_splits] == [(0, 0)]
    assert len(bench.measured(EMULATED)) == 3
    table, _ = explorer.tour(bench)
    by_percent = table.frame.set_index("percent")
    assert by_percent.loc["0 0 100 0 100 0", "measured_tok_s"] == pytest.approx(32 / 6)
    assert by_percent["measured_tok_s"].notna().sum() == 2
    assert set(by_percent["kind"].dropna()) == {"measured on the emulated GPU"}


def test_the_emulated_profile_is_calibrated_on_the_sweep_and_says_on_what(tmp_path):
    Log(tmp_path / results.LOG_NAME).append(logged(open_bench("emulated", tmp_path), "0 0 100 0 100 0", ((0.9, 6.0),)))
    bench = open_bench("emulated", tmp_path)
    state = at(bench, weights_gpu=0, weights_cpu=0)
    measured = view(state, bench, bench.measured(EMULATED)).measured
    prediction = predict(state.settings, bench.machines[EMULATED])
    assert prediction.total_throughput_tok_s == pytest.approx(measured.throughput_tok_s.value, rel=1e-4)
    assert bench.was_calibrated_on(EMULATED, state.settings)
    assert not bench.was_calibrated_on(EMULATED, bench.start.settings)
    assert "calibrated" in bench.machines[EMULATED].sources["disk_gb_s"]
    table, _ = explorer.tour(bench)
    assert table.frame["calibrated_on"].tolist() == [False, False, False, False, True]


def test_a_log_without_sense_leaves_the_profile_alone(tmp_path):
    senseless = logged(open_bench("emulated", tmp_path), "0 0 100 0 100 0", ((1e-7, 1e-7),))
    Log(tmp_path / results.LOG_NAME).append(senseless)
    bench = open_bench("emulated", tmp_path)
    assert bench.machines[EMULATED] == emulated_profile(lab.describe_machine("emulated"))
    assert bench.calibrated_on == open_bench("emulated", tmp_path / "empty").calibrated_on


def test_the_hand_in_is_quoted_beside_its_machine(bench):
    shown = view(t4(bench), bench, bench.measured("t4-colab"))
    assert shown.measured.kind == "quoted" and shown.measured.throughput_tok_s.value == pytest.approx(28.908)
    assert len(shown.measured_splits) == 4
    assert bench.was_calibrated_on("t4-colab", shown.state.settings.model_copy(update={"page_cache": "natural"}))


# ---- the picture ----------------------------------------------------------------------------------------------------


def test_a_move_draws_anew_only_what_it_changes(bench, monkeypatch):
    dashboard, frames = Dashboard(), []
    monkeypatch.setattr(dashboard.canvas, "draw", lambda draw=dashboard.canvas.draw: (frames.append(1), draw()))
    lettering.written.cache_clear()
    shown = [view(t4(bench, weights_gpu=gpu), bench, ()) for gpu in range(40, 60)]
    for one in shown:
        dashboard.png(one)
    assert len(frames) == 1  # axes, ticks and titles rest
    written = lettering.written.cache_info().misses
    again = [dashboard.png(one) for one in shown]
    assert lettering.written.cache_info().misses == written  # no text a second time
    assert len(frames) == 1 and len(set(again)) == len(shown)


def test_text_is_where_and_what_it_was_asked_to_be():
    figure = Figure(figsize=(3, 1), dpi=100)
    canvas = lettering.LetteringCanvas(figure)
    text = figure.text(0.5, 0.5, "0.25 GiB, gj", fontsize=9, ha="center", va="center", color="#0072B2")
    canvas.draw()
    ink = np.asarray(canvas.buffer_rgba())
    rows, columns = np.nonzero((ink[..., :3] != 255).any(axis=2))
    box = text.get_window_extent()
    assert abs(columns.min() - box.x0) <= 2 and abs(columns.max() + 1 - box.x1) <= 2
    assert box.y0 - 1 <= 100 - rows.max() and 100 - rows.min() <= box.y1 + 1
    assert abs((columns.min() + columns.max()) / 2 - 150) <= 2 and abs((rows.min() + rows.max()) / 2 - 50) <= 3
    darkest = ink[rows, columns][ink[rows, columns].astype(int).sum(axis=1).argmin()]
    assert np.abs(darkest[:3].astype(int) - (0x00, 0x72, 0xB2)).max() < 40


def words(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts) + " ".join(
        label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())
    )


def test_the_same_view_is_the_same_picture_whatever_was_drawn_before(bench):
    first, second = view(bench.start, bench, ()), view(t4(bench, weights_gpu=20), bench, bench.measured("t4-colab"))
    fresh, used = Dashboard(), Dashboard()
    for one in (second, first, second, view(t4(bench, weights_gpu=70), bench, ())):
        used.png(one)
    assert np.array_equal(pixels(fresh.png(first)), pixels(used.png(first)))
    assert not np.array_equal(pixels(used.png(first)), pixels(used.png(second)))
    assert len(used.figure.axes) == len(fresh.figure.axes)


def pixels(png):
    assert png.startswith(PNG)
    return np.asarray(Image.open(io.BytesIO(png)))


def test_every_label_of_the_emulated_gpu_says_so(bench):
    emulated, quoted = plot(view(bench.start, bench, ()), "a"), plot(view(t4(bench), bench, ()), "b")
    titles = ("Memory against capacity", "each alone", "predicted token/s", "total throughput", "log scale")
    for title in titles:
        assert f"{title}, emulated" in words(emulated.figure)
        assert f"{title}, emulated" not in words(quoted.figure) and title in words(quoted.figure)
    assert emulated.png().startswith(PNG) and "emulated GPU" in emulated.alt


@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"weights_gpu": 100},
        {"weights_gpu": 0, "weights_cpu": 0},
        {"model": "opt-175b", "gpu_batch_size": 1024},
        {"model": "opt-125m", "compress_weight": True, "compress_cache": True},
        {"gen_len": 1},
        {"cache": "disk"},
        {"model": "opt-66b", "weights_gpu": 33, "weights_cpu": 33, "cache": "CPU", "activations": "CPU"},
    ],
)
def test_no_text_leaves_the_picture(bench, controls):
    dashboard = Dashboard(titled=True)
    dashboard.paint(view(t4(bench, **controls), bench, bench.measured("t4-colab")))
    dashboard.canvas.draw()
    box = dashboard.figure.bbox
    for axes in dashboard.figure.axes:
        for text in axes.texts:
            extent = text.get_window_extent()
            assert extent.x0 >= box.x0 - 1 and extent.x1 <= box.x1 + 1, text.get_text()
            assert extent.y0 >= box.y0 - 1 and extent.y1 <= box.y1 + 1, text.get_text()


def test_the_tour_is_five_pictures_and_a_table(bench):
    table, pictures = explorer.tour(bench)
    assert [picture.name for picture in pictures] == [f"explore_{row.id}" for row in homework.QUESTIONS["q1"]]
    assert table.frame["percent"].tolist() == [row.percent for row in homework.QUESTIONS["q1"]]
    assert table.frame["measured_tok_s"].isna().all() and "emulated GPU" in table.caption
    peaks = [table.frame[f"predicted_peak_gpu_mem_gib{end}"] for end in ("_low", "", "_high")]
    assert (peaks[0] <= peaks[1]).all() and (peaks[1] <= peaks[2]).all()
    held = table.frame["percent"].str.startswith("0 0")  # what copy threads hold is a range, shown as one
    assert table.shown["Peak GPU mem, predicted (GiB)"][held].str.contains(" to ").all()
    assert all(picture.png().startswith(PNG) for picture in (explorer.start(bench), pictures[0]))


# ---- the controls ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sliders(tmp_path, monkeypatch):
    """Sliders whose button measures without running anything: what the laboratory was asked for is in `asked`."""
    made = explorer.Explorer(open_bench("emulated", tmp_path, repeats=1))
    made.asked = []

    def run(settings, output, *, fresh, say, on_phase):
        made.asked.append((settings, made.measure.disabled))
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


def test_moving_a_slider_moves_all_that_depends_on_it_and_runs_nothing(sliders):
    before = sliders.picture.value
    sliders.controls["weights_gpu"].value = 80
    assert sliders.controls["weights_cpu"].value == 20
    assert "--percent 80 20 100 0 100 0" in sliders.command.value
    assert sliders.picture.value != before and bytes(sliders.picture.value).startswith(PNG)
    assert "disk 0 %" in sliders.split_label.value and "achieved" in sliders.split_label.value
    sliders.controls["weights_cpu"].value = 5
    assert "disk 15 %" in sliders.split_label.value
    sliders.controls["gpu_batch_size"].value = 16
    sliders.controls["num_gpu_batches"].value = 2
    assert "16 × 2 = <b>32 sequences" in sliders.batch_label.value
    assert [number.value for number in sliders.batch_numbers.values()] == ["16", "2"]
    assert sliders.asked == []
    sliders.reset.click()
    assert sliders.state == sliders.bench.start and sliders.picture.value == before


def test_there_is_one_picture_of_core_widgets_alone(sliders):
    found = list(every_widget(sliders.box))
    assert sum(isinstance(widget, widgets.Image) for widget in found) == 1
    assert {widget._model_module for widget in found} == {"@jupyter-widgets/controls"}


def test_a_machine_has_its_models_and_says_what_cannot_be_measured(sliders):
    sliders.controls["machine"].value = "t4-colab"
    assert sliders.controls["model"].value == "opt-1.3b" and "opt-mini" not in sliders.controls["model"].options
    assert sliders.measure.disabled and "Predicted only" in sliders.message.value
    assert "t4-colab" in sliders.headline.value and "emulated" not in sliders.headline.value
    sliders.controls["machine"].value = EMULATED
    assert sliders.controls["model"].value == "opt-mini" and not sliders.measure.disabled
    assert "emulated" in sliders.headline.value


def test_measuring_shows_the_measured_beside_the_predicted(sliders):
    before = sliders.picture.value
    assert "measured on the emulated GPU" not in sliders.table.value
    sliders.measure.click()
    ((settings, disabled),) = sliders.asked
    assert settings == sliders.bench.start.settings and disabled
    assert "warm-up" in sliders.said and not sliders.measure.disabled
    assert "160 token/s" in sliders.message.value and "160" in sliders.table.value
    assert "measured on the emulated GPU" in sliders.table.value and sliders.picture.value != before
    sliders.controls["weights_gpu"].value = 30
    assert sliders.view.measured is None and len(sliders.view.measured_splits) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "Stopped"),
        (Refused("no <disk>"), "Not measured: no &lt;disk&gt;"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_what_stops_a_measurement_is_said_and_the_sliders_go_on(sliders, monkeypatch, error, said):
    def run(*settings, **options):
        raise error

    monkeypatch.setattr(lab, "run", run)
    sliders.measure.click()
    assert said in sliders.message.value and not sliders.measure.disabled
    sliders.controls["weights_gpu"].value = 10
    assert sliders.state.settings.split.weights_gpu == 10


def test_the_best_split_is_the_searchs_and_stays_this_machines(sliders):
    sliders.best.click()
    work = sliders.bench.start.settings.workload
    found = search.best("opt-mini", sliders.bench.machines[EMULATED], work.prompt_len, work.gen_len)
    assert sliders.state.settings == found.best.settings.model_copy(
        update={"device": "emulated", "repeats": 1, "page_cache": "natural"}
    )
    assert f"{found.compared:,}" in sliders.message.value
    assert f"{sliders.state.settings.workload.gpu_batch_size} ×" in sliders.batch_label.value
    assert sliders.batch_numbers["gpu_batch_size"].value == str(sliders.state.settings.workload.gpu_batch_size)
    sliders.reset.click()
    assert sliders.state == sliders.bench.start


def test_a_profile_of_an_earlier_version_is_said_and_the_ceilings_are_taken(tmp_path, monkeypatch):
    here = Machine(name="NVIDIA H200", cpu="a CPU", cpu_count=16, ram_gib=128.0, gpu_mem_gib=139.8, platform="Linux")
    monkeypatch.setattr(lab, "describe_machine", lambda device: here)
    ceilings = MachineCeilings(
        machine=here,
        folder="/data",
        disk_read_gb_s=1.7,
        page_cache_read_gb_s=14.0,
        gpu_copy_gb_s=4200.0,
        host_to_device_gb_s=55.0,
        device_to_host_gb_s=50.0,
        matmul_tflop_s=700.0,
        notes=(),
    )
    (tmp_path / profiles.CEILINGS_NAME).write_text(ceilings.model_dump_json())
    (tmp_path / profiles.PROFILE_NAME).write_text('{"name": "NVIDIA H200", "gpu_mem_gib": 139.8}')
    with pytest.warns(UserWarning, match="run notebook 00 again; its ceilings are taken"):
        found = _measured_profile(tmp_path)
    assert found == profiles.from_ceilings(ceilings)
    (tmp_path / profiles.CEILINGS_NAME).write_bytes(b"\xff\x80")
    with pytest.warns(UserWarning, match="run notebook 00 again"):
        assert _measured_profile(tmp_path) is None
