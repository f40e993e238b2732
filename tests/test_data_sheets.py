"""Theoretical ceilings: PCIe, memory and tensor cores by what NVML says, by the data sheet, or not known, and why."""

from __future__ import annotations

from dataclasses import fields, replace

import pynvml
import pytest
from hypothesis import given, strategies as st

from helpers import paths
from helpers.machine import ceilings, data_sheets, gpus, this_machine
from helpers.machine.ceilings import MachineCeilings
from helpers.machine.data_sheets import DATA_SHEETS, Nameplate
from helpers.report import tables

# What NVML says of a Colab T4, and of an H200 (132 SMs of 128 cores).
T4 = Nameplate("Tesla T4", 3, 16, 3, 16, 5001, 1590, 256, 2560, (7, 5))
H200 = Nameplate("NVIDIA H200", 5, 16, 5, 16, 3201, 1980, 6144, 16896, (9, 0))
NAMES = ("gpu_copy_gb_s", "host_to_device_gb_s", "device_to_host_gb_s", "matmul_tflop_s")


def said(plate):
    return {name: found.value for name, found in data_sheets.of_gpu(plate).items()}


# ---- what is known


def test_a_t4():
    assert said(T4) == {
        "host_to_device_gb_s": pytest.approx(15.75, abs=0.01),
        "device_to_host_gb_s": pytest.approx(15.75, abs=0.01),
        "gpu_copy_gb_s": pytest.approx(320, rel=0.001),
        "matmul_tflop_s": 65,
    }


def test_an_h200_is_named_by_nvml_and_by_its_data_sheet():
    found = data_sheets.of_gpu(H200)
    assert found["host_to_device_gb_s"].value == pytest.approx(63.0, abs=0.05)
    assert "PCIe 5 x16 (NVML)" in found["host_to_device_gb_s"].source
    assert found["gpu_copy_gb_s"].value == pytest.approx(4800, rel=0.03)
    assert "NVML" in found["gpu_copy_gb_s"].source and "data sheet: 4,800" in found["gpu_copy_gb_s"].source
    assert found["matmul_tflop_s"].value == 989 and "data sheet" in found["matmul_tflop_s"].source


@pytest.mark.parametrize("generation, lane", [(3, 0.985), (4, 1.969), (5, 3.938)])
def test_a_lane_after_encoding(generation, lane):
    found = data_sheets.host_link(Nameplate(pcie_generation=generation, pcie_width=1))
    assert found.value == pytest.approx(lane, abs=0.0005)


@pytest.mark.parametrize(
    "cores, boost_mhz, capability, tflop_s",
    [
        (5120, 1530, (7, 0), 125),  # a V100, by its data sheet
        (2560, 1590, (7, 5), DATA_SHEETS["T4"][1]),
        (6912, 1410, (8, 0), DATA_SHEETS["A100-SXM4-40GB"][1]),
        (7424, 2040, (8, 9), DATA_SHEETS["L4"][1]),
        (16896, 1830, (9, 0), 989),
        (9216, 1695, (8, 6), 125),  # an A10, by its data sheet
    ],
)
def test_cores_and_boost_clock_give_the_data_sheets_figure(cores, boost_mhz, capability, tflop_s):
    plate = Nameplate("NVIDIA RTX of no sheet", sm_clock_mhz=boost_mhz, cuda_cores=cores, compute_capability=capability)
    assert data_sheets.fp16_products(plate).value == pytest.approx(tflop_s, rel=0.01)


def test_a_geforce_sums_in_fp32_at_half_the_rate():
    """142 TFLOP/s with fp16 sums, 71 with fp32 ones, in NVIDIA's white paper on GA102."""
    plate = Nameplate("NVIDIA GeForce RTX 3090", sm_clock_mhz=1695, cuda_cores=10496, compute_capability=(8, 6))
    found = data_sheets.fp16_products(plate)
    assert found.value == pytest.approx(71, rel=0.01) and "halved" in found.source


def test_a_link_that_runs_slower_now_says_so():
    found = data_sheets.host_link(replace(T4, pcie_width_now=8))
    assert found.value == data_sheets.host_link(T4).value and "now PCIe 3 x8" in found.source
    found = data_sheets.host_link(replace(T4, pcie_generation=None))
    assert found.value == data_sheets.host_link(T4).value and "now" in found.source


def test_memory_is_by_the_data_sheet_where_nvml_says_nothing():
    found = data_sheets.gpu_memory(replace(T4, memory_bus_bits=None))
    assert (found.value, found.source) == (320, "NVIDIA's data sheet of the T4")


# ---- what is not


@pytest.mark.parametrize(
    "plate, unknown",
    [
        (Nameplate(), NAMES),
        (Nameplate("GRID T4-4Q"), NAMES),  # a virtual GPU
        (replace(H200, name="NVIDIA H200 MIG 1g.18gb"), ("gpu_copy_gb_s", "matmul_tflop_s")),
        (replace(H200, name="NVIDIA GH200 480GB"), ("host_to_device_gb_s", "device_to_host_gb_s")),
        (replace(H200, name="NVIDIA B200", compute_capability=(10, 0)), ("matmul_tflop_s",)),
        (replace(T4, name="NVIDIA GeForce GTX 1650"), ("matmul_tflop_s",)),  # of Turing, without tensor cores
        (replace(H200, pcie_generation=9, pcie_width_now=0), ("host_to_device_gb_s", "device_to_host_gb_s")),
    ],
)
def test_what_cannot_be_known_is_none_with_a_word_why(plate, unknown):
    found = data_sheets.of_gpu(plate)
    assert {name for name, one in found.items() if one.value is None} == set(unknown)
    assert all(found[name].source.startswith("not known: ") for name in unknown)


numbers = st.none() | st.integers(0, 10**6)


@given(
    st.builds(
        Nameplate,
        st.none() | st.sampled_from([f"NVIDIA {name}" for name in DATA_SHEETS] + ["GeForce", ""]),
        *[numbers] * 8,
        st.none() | st.tuples(st.integers(0, 13), st.integers(0, 9)),
    )
)
def test_each_ceiling_is_a_positive_number_or_a_reason(plate):
    for found in data_sheets.of_gpu(plate).values():
        assert found.source and (found.value is None) == found.source.startswith("not known: ")
        assert found.value is None or found.value > 0


@given(st.sampled_from(sorted(data_sheets.PCIE)), st.sampled_from(data_sheets.PCIE_WIDTHS))
def test_more_lanes_and_newer_generations_are_faster(generation, width):
    def of(*link):
        return data_sheets.host_link(Nameplate(pcie_generation=link[0], pcie_width=link[1])).value

    assert of(generation, width) == pytest.approx(width * of(generation, 1))
    assert generation == 1 or of(generation, width) > 1.9 * of(generation - 1, width)


# ---- NVML, stood in for


ANSWERS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetUUID": "GPU-a",
    "nvmlDeviceGetHandleByUUID": "handle",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxClockInfo": {pynvml.NVML_CLOCK_MEM: 3201, pynvml.NVML_CLOCK_SM: 1980},
    "nvmlDeviceGetMemoryBusWidth": 6144,
    "nvmlDeviceGetNumGpuCores": 16896,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
}


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def stands_in(answer):
        return lambda *arguments: answer[arguments[-1]] if isinstance(answer, dict) else answer

    for name, answer in ANSWERS.items():
        monkeypatch.setattr(pynvml, name, stands_in(answer), raising=False)


def test_the_nameplate_is_what_nvml_says(driver):
    assert gpus.nameplate() == H200


@pytest.mark.parametrize("call", ANSWERS)
@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND]
)
def test_any_call_may_fail_and_only_what_it_says_is_missing(driver, monkeypatch, call, error):
    def refuse(*arguments):
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, call, refuse)
    plate = gpus.nameplate()
    lost = {field.name for field in fields(plate) if getattr(plate, field.name) != getattr(H200, field.name)}
    asked_first = (
        "nvmlInit",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetHandleByUUID",
    )
    if call in asked_first:
        assert plate == Nameplate()
    else:
        assert len(lost) == {"nvmlShutdown": 0, "nvmlDeviceGetMaxClockInfo": 2}.get(call, 1)
    assert set(data_sheets.of_gpu(plate)) == set(NAMES)


def test_an_older_nvml_without_a_call_is_no_error(driver, monkeypatch):
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMemoryBusWidth")
    assert gpus.nameplate() == replace(H200, memory_bus_bits=None)


# ---- kept and shown


KEPT = (paths.ROOT / "outputs" / "reference" / "h200" / "machine.json").read_text(encoding="utf-8")


def measured(**more):
    """The H200's, as they were kept before there were theoretical ones, and what was noted of the disk alone."""
    found = MachineCeilings.model_validate_json(KEPT)
    return found.model_copy(update={"theoretical": {}, "notes": found.notes[:2]} | more)


def test_what_a_real_h200_told_of_itself():
    kept, plate = MachineCeilings.model_validate_json(KEPT).theoretical, data_sheets.of_gpu(H200)
    assert {name: kept[name].value for name in plate} == pytest.approx(
        {name: of.value for name, of in plate.items()}, rel=0.03
    )


def test_ceilings_without_theoretical_values_are_shown():
    table = tables.ceilings(measured())
    assert measured().theoretical == {} and table.frame["theoretical"].isna().all()
    assert set(table.shown["Theoretical"]) == {"—"} and "not kept" in table.markdown


def test_measured_stands_beside_theoretical():
    found = measured(theoretical=data_sheets.of_gpu(H200))
    assert MachineCeilings.model_validate_json(found.model_dump_json()) == found
    table = tables.ceilings(found)
    of = dict(zip(table.shown["What"], table.shown["Measured / theoretical"]))
    assert of["GPU, fp16 matrix product"] == f"{100 * found.matmul_tflop_s / 989:.0f} %"
    assert of["host to GPU, pinned"] == "87 %" and of["disk, sequential reads"] == "—"


def test_more_than_theory_is_said():
    slower = replace(H200, pcie_generation=4)
    assert "more was measured" in tables.ceilings(measured(theoretical=data_sheets.of_gpu(slower))).markdown


def test_the_ceilings_table_reports_a_missing_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings, "TEST_FILE_BYTES", 4 * ceilings.BLOCK_BYTES)
    found = ceilings.measure_ceilings("emulated", tmp_path)
    assert all(one.value is None for one in found.theoretical.values())
    table = tables.ceilings(found)
    assert set(table.frame["what"]) and len(table.frame) == 6
    assert table.markdown.count("no GPU in use") == 4 * 2 + 1  # how, where from; and the caption
    assert "emulated runs hold this link to 0.0336 GB/s" in table.markdown and "the provider's" in table.markdown
    assert table.frame["theoretical"].isna().all()


def test_theoretical_ceilings_need_no_torch(driver, tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("")

    broken.__name__ = "gpu_copy_gb_s"
    monkeypatch.setattr(ceilings, "TEST_FILE_BYTES", 4 * ceilings.BLOCK_BYTES)
    monkeypatch.setattr(ceilings, "_freeing_gpu_memory", lambda test: broken())
    monkeypatch.setattr(this_machine, "describe", lambda *_: measured().machine)
    found = ceilings.measure_ceilings("cuda", tmp_path)
    assert found.gpu_copy_gb_s is None and found.theoretical["gpu_copy_gb_s"].value > 4000
    assert "gpu_copy_gb_s: not measured: RuntimeError" in found.notes
    assert "4,9" in tables.ceilings(found).markdown
