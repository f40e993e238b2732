"""Theoretical ceilings of a GPU and its link, from PCIe's parameters, clock and bus width, or NVIDIA's data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from helpers.settings import Frozen


class Theoretical(Frozen):
    """A theoretical ceiling in the measured one's unit, and its source; None if unknown, and `source` says why."""

    value: float | None
    source: str


@dataclass(frozen=True)
class Nameplate:
    """What NVML says about a GPU; None where it doesn't say. PCIe's generation drops while a GPU is idle."""

    name: str | None = None
    pcie_generation: int | None = None  # the best that GPU and system support
    pcie_width: int | None = None
    pcie_generation_now: int | None = None
    pcie_width_now: int | None = None
    memory_clock_mhz: int | None = None  # highest
    sm_clock_mhz: int | None = None  # highest
    memory_bus_bits: int | None = None
    cuda_cores: int | None = None
    compute_capability: tuple[int, int] | None = None


# GT/s of a lane and the share that encoding leaves, by generation (PCI Express base specifications): 8b/10b,
# from 3.0 on 128b/130b, in 6.0 242 bytes of a 256-byte flit.
PCIE = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 242 / 256),
}
PCIE_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
TRANSFERS_A_CLOCK = 2  # of GDDR and HBM, by the clock that NVML gives

# GB/s of the memory and dense fp16 TFLOP/s of the tensor cores, by NVML's name without the maker's, of GPUs that Colab
# offers or that this lab ran on. NVIDIA's sheets of the L4 and the H200 give twice the TFLOP/s: with sparsity.
DATA_SHEETS = {
    # nvidia.com/en-us/data-center/tesla-t4
    "T4": (320.0, 65.0),
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "A100-SXM4-40GB": (1555.0, 312.0),
    "A100-SXM4-80GB": (2039.0, 312.0),
    # nvidia.com/en-us/data-center/l4
    "L4": (300.0, 121.0),
    # nvidia.com/en-us/data-center/h200
    "H200": (4800.0, 989.0),
}

# Dense fp16 operations (a multiply-add is two) of the tensor cores, a clock and CUDA core, by compute capability:
# 1,024 a clock and SM of 64 cores in NVIDIA's white papers on V100 and Turing, 2,048 of 64 on A100, 1,024 of 128 on
# GA102 and Ada, 4,096 of 128 on H100.
TENSOR_OPERATIONS = {(7, 0): 16, (7, 5): 16, (8, 0): 32, (8, 6): 8, (8, 9): 8, (9, 0): 32}


def of_gpu(plate: Nameplate) -> dict[str, Theoretical]:
    """The theoretical ceilings of a GPU, by the name of the measured one."""
    link = host_link(plate)
    return {
        "host_to_device_gb_s": link,
        "device_to_host_gb_s": link,
        "gpu_copy_gb_s": gpu_memory(plate),
        "matmul_tflop_s": fp16_products(plate),
    }


def host_link(plate: Nameplate) -> Theoretical:
    """GB/s of the link in one direction, after encoding; packets' headers take a few percent of it."""
    if plate.name and any(chip in plate.name for chip in ("GH200", "GB200", "GB300")):
        return Theoretical(value=None, source="not known: the link to this GPU's CPU is NVLink-C2C, not PCIe")
    best, now = (plate.pcie_generation, plate.pcie_width), (plate.pcie_generation_now, plate.pcie_width_now)
    also = f"; now PCIe {now[0]} x{now[1]}" if now != best else ""
    found = _link(*best, also if _link(*now, "") else "") or _link(*now, " now; NVML doesn't say what it could be")
    if found:
        return found
    return Theoretical(value=None, source="not known: NVML does not say the PCIe link's generation and width")


def _link(generation: int | None, width: int | None, also: str) -> Theoretical | None:
    if generation not in PCIE or width not in PCIE_WIDTHS:
        return None
    transfers, share = PCIE[generation]
    lane = transfers * share / 8
    return Theoretical(
        value=width * lane, source=f"PCIe {generation} x{width} (NVML){also}: {lane:.3f} GB/s a lane, after encoding"
    )


def gpu_memory(plate: Nameplate) -> Theoretical:
    """GB/s of the GPU's memory: from clock and bus width if NVML reports them, else from the data sheet."""
    if why := _is_a_slice(plate):
        return Theoretical(value=None, source=why)
    sheet = _data_sheet(plate)
    clock, bits = plate.memory_clock_mhz, plate.memory_bus_bits
    if clock and bits:
        beside = f"; data sheet: {sheet[0]:,g}" if sheet else ""
        return Theoretical(
            value=clock * 1e6 * TRANSFERS_A_CLOCK * bits / 8 / 1e9,
            source=f"{clock:,} MHz x {TRANSFERS_A_CLOCK} transfers x {bits:,} bits (NVML){beside}",
        )
    if sheet:
        return Theoretical(value=sheet[0], source=f"NVIDIA's data sheet of the {_short(plate)}")
    return Theoretical(
        value=None, source="not known: NVML does not say clock and bus width, and no data sheet of this name is kept"
    )


def fp16_products(plate: Nameplate) -> Theoretical:
    """Dense fp16 TFLOP/s: by the data sheet, else by cores and clock. The sheet goes first: NVML's highest clock is
    above the boost clock that the sheet counts with."""
    if why := _is_a_slice(plate):
        return Theoretical(value=None, source=why)
    if sheet := _data_sheet(plate):
        return Theoretical(
            value=sheet[1], source=f"NVIDIA's data sheet of the {_short(plate)}: fp16, tensor cores, dense"
        )
    cores, clock, capability, name = plate.cuda_cores, plate.sm_clock_mhz, plate.compute_capability, plate.name or ""
    operations = TENSOR_OPERATIONS.get(capability) if capability else None
    if not cores or not clock or not capability:
        return Theoretical(
            value=None, source="not known: no data sheet of this name is kept, and NVML does not say cores and clock"
        )
    if operations is None or (capability == (7, 5) and "RTX" not in name):  # some Turing GPUs have no tensor cores
        return Theoretical(
            value=None,
            source="not known: no data sheet of this name is kept, nor what a core of "
            f"compute capability {'.'.join(map(str, capability))} does in a clock",
        )
    # torch sums fp16 products up in fp32, which GeForces do at half the rate (NVIDIA's white paper on GA102).
    halved = "GeForce" in name
    return Theoretical(
        value=cores * operations * clock * 1e6 / 1e12 / (2 if halved else 1),
        source=f"{cores:,} cores x {operations} operations x {clock:,} MHz (NVML's highest clock)"
        + (", halved: a GeForce, sums in fp32" if halved else ""),
    )


def _is_a_slice(plate: Nameplate) -> str:
    return "not known: a slice (MIG) of a GPU" if plate.name and " MIG " in f"{plate.name} " else ""


def _data_sheet(plate: Nameplate) -> tuple[float, float] | None:
    return DATA_SHEETS.get(_short(plate))


def _short(plate: Nameplate) -> str:
    return (plate.name or "").removeprefix("NVIDIA ").removeprefix("Tesla ")
