"""Time before a run: the profiles, the schedule, and what follows from both."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings as budget, strategies as st

from helpers import models
from helpers.analysis import readers
from helpers.errors import Refused
from helpers.machine import profiles
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.measured_profile import from_ceilings
from helpers.machine.profiles import T4_COLAB, T4_GCP, MachineProfile, load, numbers
from helpers.placement import place
from helpers.predict.rates import calibrate
from helpers.predict.schedule import OVERLAPPED_WAIT
from helpers.predict.time_model import KERNEL_LOADING, TERMS, by_batch_size, latencies, layer_times, predict
from helpers.report.comparison import REFERENCE
from helpers.results import Machine
from helpers.settings import OffloadSplit, RunSettings, Workload

CALIBRATED_ON = ("q1-1", "q1-2", "q1-5", "q3-gpu-4bit")


def run(percent, batch=4, batches=1, prompt_len=128, gen_len=16, model="opt-1.3b", **options):
    workload = Workload(gpu_batch_size=batch, num_gpu_batches=batches, prompt_len=prompt_len, gen_len=gen_len)
    return RunSettings(model=model, split=OffloadSplit.parse(percent), workload=workload, device="cuda", **options)


def hand_in():
    for point in readers.read(REFERENCE):
        if point.total_throughput_tok_s is not None:
            settings = run(str(point.split), point.workload.gpu_batch_size, compress_weight=point.compress_weight)
            yield point.run_id, (settings, point.total_throughput_tok_s)


def error(measured, profile):
    settings, tok_s = measured
    return predict(settings, profile).total_throughput_tok_s / tok_s - 1


HAND_IN = dict(hand_in())


def test_t4_colab_is_what_its_four_runs_give():
    guesses = {"layer_overhead_us": 500.0, "h2d_gb_s": 12.0, "disk_gb_s": 0.5, "dequantize_gb_s": 30.0}
    found = calibrate(T4_COLAB.model_copy(update=guesses), dict(HAND_IN[run_id] for run_id in CALIBRATED_ON))
    for field in guesses:
        assert getattr(found, field) == pytest.approx(getattr(T4_COLAB, field), rel=1e-3)
        assert "calibrated on" in found.sources[field]


def test_all_on_disk_on_a_colab_t4():
    prediction = predict(run("0 0 100 0 100 0"), load("t4-colab"))
    assert prediction.peak_gpu_mem_gib == pytest.approx(0.588, rel=0.01)
    assert prediction.total_throughput_tok_s == pytest.approx(0.357, rel=0.05)
    assert prediction.bottleneck == "disk"
    assert prediction.fits


@st.composite
def any_run(draw, model="opt-1.3b"):
    gpu = draw(st.integers(0, 100))
    cpu = draw(st.integers(0, 100 - gpu))
    cache = draw(st.sampled_from(["100 0", "0 100", "0 0", "50 50"]))
    return run(
        f"{gpu} {cpu} {cache} {draw(st.sampled_from(['100 0', '0 100']))}",
        batch=draw(st.integers(1, 64)),
        batches=draw(st.integers(1, 4)),
        prompt_len=draw(st.sampled_from([7, 128, 700])),
        gen_len=draw(st.sampled_from([1, 2, 3, 16])),
        model=model,
        compress_weight=draw(st.booleans()),
        compress_cache=cache != "50 50" and draw(st.booleans()),
        overlap=draw(st.booleans()),
        cpu_cache_compute=draw(st.booleans()),
        pin_weight=draw(st.booleans()),
    )


@given(any_run(), st.sampled_from([T4_COLAB, T4_GCP]))
@budget(max_examples=100, deadline=None)
def test_bounds_bracket_the_value_and_passes_add_up(settings, profile):
    prediction = predict(settings, profile)
    lowest, highest = prediction.total_throughput_tok_s_bounds
    assert lowest <= prediction.total_throughput_tok_s * (1 + 1e-9)
    assert prediction.total_throughput_tok_s <= highest * (1 + 1e-9)
    assert len(prediction.decode_pass_latencies_s) == settings.workload.gen_len - 1
    assert prediction.total_throughput_tok_s == pytest.approx(
        settings.workload.generated_tokens / prediction.total_latency_s
    )
    assert prediction.terms_s[prediction.bottleneck] == max(prediction.terms_s.values())
    assert set(prediction.terms_s) == {*TERMS, KERNEL_LOADING}


@given(any_run())
@budget(max_examples=100, deadline=None)
def test_what_does_not_overlap_takes_no_less(settings):
    alone = settings.model_copy(update={"overlap": False})
    beside = settings.model_copy(update={"overlap": True})
    assert predict(alone, T4_COLAB).total_throughput_tok_s <= predict(beside, T4_COLAB).total_throughput_tok_s * 1.001


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
@budget(max_examples=100, deadline=None)
def test_more_on_a_slow_disk_is_never_faster(one, other, gpu_share):
    """Of what is not on disk, `gpu_share` percent is on the GPU and the rest on the CPU."""
    less, more = sorted((one, other))
    throughputs = []
    for disk in (less, more):
        gpu = (100 - disk) * gpu_share // 100
        settings = run(f"{gpu} {100 - disk - gpu} 100 0 100 0")
        throughputs.append(predict(settings, T4_COLAB).total_throughput_tok_s)
    assert throughputs[1] <= throughputs[0] * (1 + 1e-9)


IN_NO_TIME = {rate: 1e9 if rate.endswith("_s") else 1e-9 for rate in (*TERMS.values(), "large_file_gb_s")}


def test_the_main_thread_launches_a_copy_of_each_tensor_on_the_cpu():
    """Bound by launches: with 4-bit weights on the CPU a pass is longer by a tenth of a layer's for each copy."""
    machine = T4_COLAB.model_copy(update=IN_NO_TIME | {"layer_overhead_us": 300.0})
    of_a_block = 16 + 6  # FlexGen's tensors of attention and MLP, and the scales of their six matrices
    of_the_embeddings = 4 + 4  # tokens and positions; again tokens, and a norm
    gpu, cpu = (
        predict(run(percent, compress_weight=True), machine) for percent in ("100 0 100 0 100 0", "0 100 100 0 100 0")
    )
    copies_s = (24 * of_a_block + of_the_embeddings) * 30e-6
    assert cpu.decode_pass_latencies_s[5] - gpu.decode_pass_latencies_s[5] == pytest.approx(copies_s, rel=1e-3)
    launches_s = cpu.terms_s["launch overhead"] - gpu.terms_s["launch overhead"]
    assert launches_s == pytest.approx(16 * copies_s, rel=0.01)  # the last pass loads no next one


def test_launches_wait_for_the_copy_threads_that_open_files():
    """Attention has four matrices, one a copy thread; the MLP and the input two, which leaves half of the threads."""
    launch_s, file_s = 200e-6, 1e-3
    machine = T4_COLAB.model_copy(
        update=IN_NO_TIME
        | {"layer_overhead_us": 1e6 * launch_s, "file_overhead_us": 1e6 * file_s, "host_ram_gib": 64.0}
    )
    steps = 24 * (4 + 2) + 2 + 1 + OVERLAPPED_WAIT * 50  # each matrix, and the part of each layer that overlaps nothing
    waits = 24 * (1 + 1 / 2) + 1 / 2 + 1 / 4
    a_pass_s = predict(run("0 0 100 0 100 0"), machine).decode_pass_latencies_s[5]
    assert a_pass_s == pytest.approx(steps * file_s + waits * launch_s, rel=1e-3)


def test_launches_wait_no_longer_than_files_take_to_open():
    at_once = T4_COLAB.model_copy(update={"file_overhead_us": 0.0, "layer_overhead_us": 5000.0, "host_ram_gib": 64.0})
    slow = at_once.model_copy(update={"layer_overhead_us": 1e-3})
    settings = run("0 0 100 0 100 0", page_cache="cold")  # bound by the disk, whatever is launched beside it
    launched, alone = (predict(settings, machine).decode_latency_s for machine in (at_once, slow))
    assert launched == pytest.approx(alone, rel=1e-4)  # but for the last layer, beside which nothing is loaded


def test_splits_with_one_placement_have_one_prediction():
    model = models.resolve("opt-1.3b")
    splits = [(gpu, 100 - gpu) for gpu in range(101)]
    placements = {place(model, *split, False).layers for split in splits}
    predictions = {id(predict(run(f"{gpu} {cpu} 100 0 100 0"), T4_COLAB)) for gpu, cpu in splits}
    assert len(predictions) == len(placements) < len(splits)


def test_the_page_cache_serves_what_fits_in_the_ram_that_is_left():
    roomy = T4_COLAB.model_copy(update={"host_ram_gib": 64.0})
    settings = run("0 0 100 0 100 0")
    cached = predict(settings, roomy)
    assert cached.page_cache_serves_disk and cached.terms_s["disk"] == 0
    assert cached.total_throughput_tok_s > 5 * predict(settings, T4_COLAB).total_throughput_tok_s
    cold = predict(run("0 0 100 0 100 0", page_cache="cold"), roomy)
    assert not cold.page_cache_serves_disk
    assert cold.total_throughput_tok_s < predict(settings, T4_COLAB).total_throughput_tok_s


def test_what_flexgen_projects_is_near_what_it_runs():
    settings = run("0 100 100 0 100 0")
    projected = predict(settings.model_copy(update={"debug_mode": "fewer_batch"}), T4_COLAB)
    assert projected.total_throughput_tok_s == pytest.approx(
        predict(settings, T4_COLAB).total_throughput_tok_s, rel=0.15
    )
    alone = predict(settings.model_copy(update={"debug_mode": "breakdown"}), T4_COLAB)
    assert alone.total_throughput_tok_s < projected.total_throughput_tok_s


def test_decode_slows_down_as_the_cache_grows():
    seconds, _, _ = latencies(run("100 0 0 100 100 0", batch=64, gen_len=32), T4_COLAB)
    assert all(later >= earlier for earlier, later in pairwise(seconds[1:]))


# --- profiles ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", profiles.PROFILES.values(), ids=lambda profile: profile.name)
def test_each_number_of_a_profile_has_a_source(profile):
    assert set(profile.sources) == set(numbers())
    assert all(profile.sources.values())


def test_a_profile_comes_back_from_its_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(T4_COLAB.model_copy(update={"name": "mine"}).model_dump_json())
    mine = load(str(file))
    assert mine.name == "mine"
    settings = run("0 0 100 0 100 0")
    assert predict(settings, mine).total_latency_s == predict(settings, T4_COLAB).total_latency_s


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"disk_gb_s": -1.0}, "disk_gb_s=-1.0: "),
        ({"disk_gb_s": "fast"}, "disk_gb_s='fast': "),
        ({"h2d_gb_s": None}, "h2d_gb_s=None: "),
        ({"disk_gbps": 1.0}, "disk_gbps is not a field of a machine profile; if another version wrote it"),
        ({"host_ram_gib": 1e308}, "host_ram_gib=1e+308: "),
        ({"cache_store_gb_s": 5e-324}, "cache_store_gb_s=5e-324: "),
        ({"name": "a\x1b[2J"}, "cannot be printed"),
        ({"name": ""}, "name=''"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path, change, complaint):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(json.loads(T4_COLAB.model_dump_json()) | change))
    with pytest.raises(Refused, match=r"profile\.json") as refusal:
        load(str(file))
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "not a readable JSON file"),
        ("{", "not a readable JSON file"),
        ("[1]", "instead of a JSON object"),
        ('{"name": "half"}', "gpu_mem_gib is missing"),
        ("\xff", "not a readable JSON file"),
        (
            '{"machine": {"name": "Tesla T4"}, "disk_read_gb_s": 1.0}',
            "ceilings instead of a profile; .*machine-profile.json",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, complaint):
    file = tmp_path / "profile.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(Refused, match=complaint) as refusal:
        load(str(file))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path, kind", [("/", "it is a folder"), ("/dev/zero", "it is a device or a pipe")])
def test_what_is_no_file_is_named(path, kind):
    with pytest.raises(Refused, match=kind):
        load(path)


def test_an_unknown_profile_is_refused_with_the_choices():
    with pytest.raises(Refused, match=r"'t5-colab'.*t4-colab, t4-gcp"):
        load("t5-colab")


CEILINGS = MachineCeilings(
    machine=Machine(name="NVIDIA H200", cpu="a CPU", cpu_count=16, ram_gib=128.0, gpu_mem_gib=139.8, platform="Linux"),
    folder="/data",
    disk_read_gb_s=1.7,
    page_cache_read_gb_s=9.0,
    gpu_copy_gb_s=4200.0,
    host_to_device_gb_s=55.0,
    device_to_host_gb_s=50.0,
    matmul_tflop_s=700.0,
    notes=(),
)


def test_measured_ceilings_make_a_profile():
    profile = from_ceilings(CEILINGS)
    assert set(profile.sources) == set(numbers())
    assert (profile.disk_gb_s, profile.h2d_gb_s, profile.cublas_workspace_mib) == (1.7, 55.0, 32.0)
    assert "not measured" in profile.sources["relay_gb_s"]
    tesla = CEILINGS.model_copy(update={"machine": CEILINGS.machine.model_copy(update={"name": "Tesla T4"})})
    assert from_ceilings(tesla).cublas_workspace_mib == 8.125


def test_a_ceiling_that_was_not_measured_is_named():
    with pytest.raises(Refused, match="disk_gb_s"):
        from_ceilings(CEILINGS.model_copy(update={"disk_read_gb_s": None}))


def test_calibration_refuses_what_it_cannot_tell_apart():
    settings, tok_s = HAND_IN["q1-5"]
    with pytest.raises(Refused, match="show only disk_gb_s"):
        calibrate(T4_COLAB, dict([(settings, tok_s), HAND_IN["q2-b1"]]))
    with pytest.raises(Refused, match="no disk_gb_s makes"):
        calibrate(T4_COLAB, {settings: 1e6})


def test_a_calibrated_profile_gives_back_its_point():
    measured = (run("100 0 100 0 100 0"), 128.9)
    profile = calibrate(MachineProfile(**dict(from_ceilings(CEILINGS))), dict([measured]))
    assert abs(error(measured, profile)) < 1e-3


def test_times_by_batch_size_are_the_predictions_of_each():
    settings = run("0 50 100 0 100 0")
    sizes = (1, 4, 64)
    seconds, terms = by_batch_size(settings, T4_COLAB, sizes)
    for i, size in enumerate(sizes):
        predicted = predict(run("0 50 100 0 100 0", batch=size), T4_COLAB)
        assert seconds[i] == pytest.approx(predicted.total_latency_s, rel=0.01)
        assert terms["disk"][i] == pytest.approx(predicted.terms_s["disk"])


def test_copies_from_the_cpu_hide_behind_the_disk():
    """Why the homework's (3) and (4) are as fast as each other where the disk is slow."""
    without, with_cpu = (
        layer_times(run(f"{percent} 100 0 100 0", page_cache="cold"), T4_COLAB)[1] for percent in ("50 0", "0 50")
    )
    assert without.cpu_to_gpu_s == 0 < with_cpu.cpu_to_gpu_s < with_cpu.disk_s
    assert with_cpu.layer_s == pytest.approx(without.layer_s)
    blocked = layer_times(run("0 0 100 0 100 0", overlap=False), T4_COLAB)[1]
    assert blocked.layer_s == pytest.approx(blocked.disk_s + blocked.disk_to_gpu_s + blocked.compute_s, rel=1e-3)
