"""Notebook 00's probes: a machine with known rates, played by the time model, is found again from its own runs."""

import pytest
from hypothesis import given, settings as budget, strategies as st

from factories import make_record
from helpers import calibration
from helpers.errors import Refused
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.measured_profile import from_ceilings
from helpers.machine.profiles import MachineProfile
from helpers.predict import rates, time_model
from helpers.predict.rates import Loads
from helpers.results import Machine, Repeat, RunRecord

CEILINGS = MachineCeilings(
    machine=Machine(name="NVIDIA H200", cpu="a CPU", cpu_count=16, ram_gib=128.0, gpu_mem_gib=139.8, platform="Linux"),
    folder="/data",
    disk_read_gb_s=1.7,
    page_cache_read_gb_s=14.0,
    gpu_copy_gb_s=4200.0,
    host_to_device_gb_s=55.0,
    device_to_host_gb_s=50.0,
    matmul_tflop_s=700.0,
    notes=(),
)
RATES = {  # launches so short that they hide none of the others
    "layer_overhead_us": (100.0, 400.0),
    "dequantize_overhead_us": (50.0, 300.0),
    "h2d_gb_s": (5.0, 50.0),
    "host_copy_gb_s": (5.0, 50.0),
    "cache_overhead_us": (100.0, 2000.0),
    "cache_store_gb_s": (0.5, 8.0),
    "cpu_attention_gb_s": (0.5, 15.0),
    "page_cache_gb_s": (5.0, 50.0),
    "file_overhead_us": (50.0, 2000.0),
    "relay_gb_s": (0.1, 1.0),
    "disk_gb_s": (0.2, 2.0),
}


@st.composite
def machines(draw):
    rates = {field: draw(st.floats(*within)) for field, within in RATES.items()}
    loading = {"prefill_kernel_loading_s": draw(st.floats(0, 0.05)), "decode_kernel_loading_s": draw(st.floats(0, 0.2))}
    return from_ceilings(CEILINGS).model_copy(update=rates | loading)


def played(settings, machine: MachineProfile) -> RunRecord:
    """The record of these settings as this machine would make it."""
    passes = tuple(float(seconds) for seconds in time_model.latencies(settings, machine)[0])
    timers = {}
    if settings.debug_mode:
        loads = rates.loads(settings, machine)
        of_kind = {"attention": loads.attention_s, "mlp": loads.mlp_s, "input_embed": 9.0, "output_embed": 9.0}
        a_pass = [of_kind[layer.kind] for layer in settings.opt_model.layers]
        timers = {"load_weight": tuple(a_pass + (3 * a_pass)[:20])}  # all layers of the prefill, 20 steps of decode
    repeat = Repeat(started_s=0, ended_s=1, pass_latencies_s=passes, peak_gpu_mem_gib=1, timers_s=timers)
    return make_record(settings=settings.model_dump(), latencies=()).model_copy(update={"repeats": (repeat,)})


def found_by_probes(machine: MachineProfile) -> MachineProfile:
    found = from_ceilings(CEILINGS)
    for field, settings in calibration.probes().items():
        found = calibration.with_probe(found, field, played(settings, machine))
    return found


@given(machines())
@budget(max_examples=8, deadline=None, derandomize=True)
def test_a_machine_is_found_again_from_its_probes(machine):
    found = found_by_probes(machine)
    for field in RATES:
        # A prefill's own arithmetic counts as kernels that are loaded, and is then not the cache's.
        assert getattr(found, field) == pytest.approx(getattr(machine, field), rel=0.1), field
        assert "measured on this machine: opt-probe" in found.sources[field], field


@given(machines())
@budget(max_examples=4, deadline=None, derandomize=True)
def test_a_found_machine_predicts_other_models_and_splits(machine):
    found = found_by_probes(machine)
    probe = calibration.probes()["layer_overhead_us"]
    for model, gpu, cpu in (("opt-1.3b", 50, 0), ("opt-1.3b", 20, 40), ("opt-6.7b", 0, 0), ("opt-2.7b", 0, 100)):
        split = probe.split.model_copy(update={"weights_gpu": gpu, "weights_cpu": cpu})
        other = probe.model_copy(update={"model": model, "split": split})
        wanted = time_model.predict(other, machine).total_throughput_tok_s
        assert time_model.predict(other, found).total_throughput_tok_s == pytest.approx(wanted, rel=0.05)


def test_reads_without_file_overhead_give_only_the_rate():
    """Attention's loads shorter than their bytes' share of the MLP's: noise, and no overhead comes out of it."""
    machine = from_ceilings(CEILINGS)
    settings = calibration.probes()["page_cache_gb_s"]
    found = rates.with_page_cache_of(machine, settings, Loads(attention_s=0.002, mlp_s=0.010))
    assert found.file_overhead_us == 0
    assert rates.loads(settings, found).block_s == pytest.approx(0.012, rel=1e-6)


def test_reads_faster_than_the_link_are_refused():
    settings = calibration.probes()["page_cache_gb_s"]
    with pytest.raises(Refused, match="page_cache_gb_s"):
        rates.with_page_cache_of(from_ceilings(CEILINGS), settings, Loads(attention_s=1e-5, mlp_s=1e-5))


def test_repeats_on_a_shared_core_are_ignored_if_others_exist():
    machine = from_ceilings(CEILINGS)
    settings = calibration.probes()["layer_overhead_us"]
    slow, quick = (played(settings, machine.model_copy(update={"layer_overhead_us": us})) for us in (600.0, 300.0))
    shared = slow.repeats[0].model_copy(update={"core_speed": 0.55})
    mixed = quick.model_copy(update={"repeats": (shared, quick.repeats[0], shared)})
    assert calibration.with_probe(machine, "layer_overhead_us", mixed).layer_overhead_us == pytest.approx(300, rel=0.01)
    alone = quick.model_copy(update={"repeats": (shared,)})
    assert calibration.with_probe(machine, "layer_overhead_us", alone).layer_overhead_us == pytest.approx(600, rel=0.01)


def test_kernel_loading_is_not_part_of_the_rate():
    """4-bit weights have kernels of their own, loaded in the first decode pass of a probe of eight."""
    machine = from_ceilings(CEILINGS).model_copy(update={"layer_overhead_us": 300.0, "dequantize_overhead_us": 150.0})
    record = played(calibration.probes()["dequantize_overhead_us"], machine)
    (repeat,) = record.repeats
    prefill_s, first_s, *usual_s = repeat.pass_latencies_s
    slower = repeat.model_copy(update={"pass_latencies_s": (prefill_s + 0.01, first_s + 0.1, *usual_s)})
    found = calibration.with_probe(
        machine.model_copy(update={"dequantize_overhead_us": 1.0}),
        "dequantize_overhead_us",
        record.model_copy(update={"repeats": (slower,)}),
    )
    assert found.dequantize_overhead_us == pytest.approx(150.0, rel=0.01)


def test_a_failed_probe_keeps_the_ceiling_with_a_message(monkeypatch, tmp_path):
    machine = from_ceilings(CEILINGS).model_copy(update=dict.fromkeys(RATES, 1.0) | {"layer_overhead_us": 300.0})
    records = {field: played(settings, machine) for field, settings in calibration.probes().items()}
    failure = {"kind": "gpu_oom", "message": "no room"}
    records["relay_gb_s"] = make_record(settings=records["relay_gb_s"].settings.model_dump(), latencies=()).model_copy(
        update={"status": "failed", "failure": calibration.lab.Failure(**failure)}
    )
    fast = records["disk_gb_s"].repeats[0].model_copy(update={"timers_s": {"load_weight": (1e-6,) * 28}})
    records["disk_gb_s"] = records["disk_gb_s"].model_copy(update={"repeats": (fast,)})
    monkeypatch.setattr(calibration.lab, "run", lambda *_, **__: calibration.lab.Sweep(records))
    said = []
    found = calibration.calibrate(CEILINGS, tmp_path, say=said.append)
    assert [line.split(":")[0] for line in said] == ["relay_gb_s", "disk_gb_s"]
    assert "no room" in said[0] and "1.7" in said[1]
    assert found.disk_gb_s == CEILINGS.disk_read_gb_s and found.relay_gb_s == from_ceilings(CEILINGS).relay_gb_s
    assert found.h2d_gb_s == pytest.approx(1.0, rel=0.02)
