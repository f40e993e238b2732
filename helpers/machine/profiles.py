"""A machine's achieved rates as one frozen value: named profiles with a source for each number, or a JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from helpers import paths
from helpers.errors import Refused
from helpers.settings import Frozen
from helpers.units import GIB, MIB

# Files that the machine notebook keeps.
CEILINGS_NAME = "machine.json"
PROFILE_NAME = "machine-profile.json"

SMALLEST, LARGEST = 1e-12, 1e12  # beyond any machine; keeps seconds and bytes from overflowing
Rate = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
MOST_SHOWN = 200  # characters of a name in a message
Amount = Annotated[float, Field(ge=0, le=LARGEST)]


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("characters that cannot be printed")
    return name


class MachineProfile(Frozen):
    """Achieved rates and sizes of a machine; GB are 10^9 bytes, GiB 2^30. `sources` says where each number is from.

    The overheads are memory that a run's tensors can't use: Python, torch and CUDA's context. `mapped_files_gib` is the
    active page cache of libraries and other processes. It gives way to a run's memory, but not to files that the run
    reads once a pass, whose page cache is the rest.
    """

    name: Annotated[str, Field(min_length=1, max_length=MOST_SHOWN), AfterValidator(_printable)]
    gpu_mem_gib: Rate
    gpu_overhead_gib: Amount
    gpu_mem_gb_s: Rate
    gpu_fp16_tflop_s: Rate
    dequantize_gb_s: Rate  # fp16 bytes of 4-bit weights, decompressed on the GPU
    dequantize_overhead_us: Amount  # launches, per 4-bit tensor
    layer_overhead_us: Rate  # Python, launches and a sync, per layer and micro-batch
    prefill_kernel_loading_s: Amount  # CUDA loads a phase's kernels once per process, in the measured time
    decode_kernel_loading_s: Amount  # in the first decode pass
    h2d_gb_s: Rate  # from pinned memory
    d2h_gb_s: Rate  # to pinned memory
    cache_store_gb_s: Rate  # new keys and values, through the copy threads to pageable memory
    cache_overhead_us: Amount  # per micro-batch's keys and values of a layer fetched from host memory
    host_copy_gb_s: Rate  # from pageable to pinned host memory
    page_cache_gb_s: Rate  # by the copy threads, from the page cache
    large_file_gb_s: Rate  # by one copy thread, of a matrix larger than the CPU's cache
    file_overhead_us: Amount  # to open, map and hand over a matrix's file, on top of its bytes; and once per layer
    cpu_attention_gb_s: Rate  # fp16 bytes of keys and values attended to on the CPU, in large batches
    relay_gb_s: Rate  # stored bytes of 4-bit weights that a copy thread converts on their way from the disk
    disk_gb_s: Rate  # by FlexGen's copy threads
    direct_disk_gb_s: Rate  # by the direct reader
    disk_write_gb_s: Rate
    host_ram_gib: Rate
    host_overhead_gib: Amount
    mapped_files_gib: Amount
    cublas_workspace_mib: Amount
    sources: dict[str, str] = {}

    def __hash__(self) -> int:  # pydantic's own would need hashable sources
        return hash((self.name, *(getattr(self, field) for field in numbers())))

    @property
    def cublas_workspace_bytes(self) -> int:
        return int(self.cublas_workspace_mib * MIB)

    @property
    def usable_gpu_bytes(self) -> int:
        return int((self.gpu_mem_gib - self.gpu_overhead_gib) * GIB)

    @property
    def usable_host_bytes(self) -> int:
        return int((self.host_ram_gib - self.host_overhead_gib) * GIB)

    @property
    def shared_host_bytes(self) -> int:
        """Host memory for a run's tensors and the page cache of its files together."""
        return self.usable_host_bytes - int(self.mapped_files_gib * GIB)


def numbers() -> tuple[str, ...]:
    """Names of the numeric fields."""
    return tuple(field for field in MachineProfile.model_fields if field not in ("name", "sources"))


def load(name_or_path: str) -> MachineProfile:
    """A named profile, or one from a JSON file with the fields of MachineProfile (`sources` may be left out).

    Raises Refused for an unknown name, a file that isn't a JSON object, and a missing or wrong field.
    """
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(os.path.expanduser(name_or_path))
    if not os.path.isfile(path):
        there = name_or_path and os.path.exists(path)
        what = f"it is {paths.kind(path)}" if there else "there is no such file"
        raise Refused(
            f"machine {name_or_path[:MOST_SHOWN]!r}: neither a profile ({', '.join(PROFILES)}) nor a JSON file with "
            f"one: {what}; notebook 00 writes outputs/{PROFILE_NAME} on a machine with a GPU"
        )
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(given, dict):
        raise Refused(f"{path}: {type(given).__name__} instead of a JSON object with a machine profile")
    if "machine" in given and "name" not in given:
        raise Refused(
            f"{path}: a machine's ceilings instead of a profile; notebook 00 writes {PROFILE_NAME} next to them"
        )
    unknown = [field for field in given if field not in MachineProfile.model_fields]
    missing = [field for field in ("name", *numbers()) if field not in given]
    for field, what in ((missing, "is missing"), (unknown, "is not a field of a machine profile")):
        if field:
            raise Refused(f"{path}: {field[0]} {what}; if another version wrote it, run notebook 00 again")
    try:
        return MachineProfile(**given)
    except Refused as error:
        raise Refused(f"{path}: {error}") from None


def kept_in(folder: Path) -> MachineProfile | None:
    """The profile that the machine notebook kept in an output folder, if any. Raises Refused if it is damaged."""
    path = folder / PROFILE_NAME
    return load(str(path)) if path.is_file() else None


_COST_MODEL = "FlexGen's own cost model, fitted by its authors on a T4 of Google Cloud (experimental/cost_model.py)"
_PAPER = "FlexGen paper (Sheng et al., ICML 2023), section Experiments"
_PAGE_CACHE = "2.84 GB a pass from the page cache of an H200 machine in 0.32 s, not on this machine"
_TWO_EPYC_CORES = "measured with torch on two EPYC cores, not on this machine"

T4_GCP_CPUS = 32  # of a Google Cloud machine of the N1 series with 208 GB

# The machine of FlexGen's paper. Its authors fitted five of these rates to their own runs on it, so the paper's
# throughputs, on which the profile is judged, are not independent of them.
_T4_GCP = {
    "gpu_mem_gib": (14.56, "a T4's total memory as torch gives it: 14,912 MiB"),
    "gpu_overhead_gib": (0.4, "CUDA's context: about 400 MB (github.com/pytorch/pytorch/issues/109888)"),
    "gpu_mem_gb_s": (239.6, "CUDA's bandwidthTest on a T4, device to device (github.com/router-gao/cuda-demo)"),
    "gpu_fp16_tflop_s": (21.24, f"{_COST_MODEL}: mm_flops_p"),
    "dequantize_gb_s": (18.75, "the same GPU's in t4-colab"),
    "dequantize_overhead_us": (0.0, "within dequantize_gb_s"),
    "layer_overhead_us": (
        250.0,
        "10 operators a layer (counted) at 25 us, the upper end of what torch's eager mode "
        "takes for one (jiahuanglin.xyz, From PyTorch op to kernel launch)",
    ),
    "prefill_kernel_loading_s": (0.0, "not known, and little in runs of minutes"),
    "decode_kernel_loading_s": (0.0, "not known, and little in runs of minutes"),
    "h2d_gb_s": (13.84, f"{_COST_MODEL}: ctog_bdw, 12.89 GiB/s"),
    "d2h_gb_s": (5.18, f"{_COST_MODEL}: gtoc_bdw_hidden, 4.82 GiB/s"),
    "cache_store_gb_s": (1.04, f"{_COST_MODEL}: gtoc_bdw_cache, 0.97 GiB/s"),
    "cache_overhead_us": (0.0, "not known, and little with large batches"),
    "host_copy_gb_s": (8.8, _PAGE_CACHE),
    "page_cache_gb_s": (8.8, _PAGE_CACHE),
    "large_file_gb_s": (8.8, _PAGE_CACHE),
    "file_overhead_us": (0.0, "within page_cache_gb_s and disk_gb_s, which are of whole passes"),
    "cpu_attention_gb_s": (12.3, f"{_COST_MODEL}: cpu_flops, one a byte of the fp16 cache"),
    "relay_gb_s": (1.4, f"uint8 to fp16 and back: {_TWO_EPYC_CORES}"),
    "disk_gb_s": (2.0, f"{_PAPER}: about 2 GB/s reading"),
    "direct_disk_gb_s": (2.0, f"{_PAPER}: about 2 GB/s reading"),
    "disk_write_gb_s": (1.0, f"{_PAPER}: about 1 GB/s writing"),
    "host_ram_gib": (208.0, f"{_PAPER}: 208 GB"),
    "host_overhead_gib": (2.22, "a process with torch and CUDA: 2,271 MiB (github.com/pytorch/pytorch/issues/106511)"),
    "mapped_files_gib": (0.0, "not known, and little of 208 GB"),
    "cublas_workspace_mib": (8.125, "torch's default below Hopper, :4096:2:16:8 (CublasHandlePool.cpp)"),
}
_Q1 = "calibrated on the hand-in's --percent"
# The hand-in's machine: four of its runs give four rates, the others are published or borrowed, as `sources` says. Of
# its five other runs two are independent of these four: `50 0`, and 4-bit weights on disk.
_T4_COLAB = _T4_GCP | {
    "dequantize_gb_s": (18.75, f"{_Q1} 100 0 100 0 100 0 --compress-weight: 24.107 token/s"),
    "layer_overhead_us": (1199.1, f"{_Q1} 100 0 100 0 100 0: 65.771 token/s"),
    "prefill_kernel_loading_s": (0.0, "within layer_overhead_us, which is calibrated on a whole run"),
    "decode_kernel_loading_s": (0.0, "within layer_overhead_us, which is calibrated on a whole run"),
    "h2d_gb_s": (10.41, f"{_Q1} 50 50 100 0 100 0: 28.908 token/s"),
    "disk_gb_s": (0.2357, f"{_Q1} 0 0 100 0 100 0: 0.357 token/s, 9 % of it from the page cache"),
    "direct_disk_gb_s": (0.2586, "the most that its disk's counter showed: 252,500 KiB/s"),
    "disk_write_gb_s": (0.2357, "not measured: as it reads"),
    "cpu_attention_gb_s": (0.77, "t4-gcp's, by CPUs: 2 instead of 32"),
    "host_ram_gib": (12.67, "the hand-in's own list: 12,975 MB, which are MiB (its 14,912 MB of GPU memory are)"),
    "mapped_files_gib": (
        2.01,
        "the notebook's process, with torch and CUDA too: 2,056,600 kB (github.com/pytorch/pytorch/issues/113326)",
    ),
}


def _profile(name: str, with_sources: dict[str, tuple[float, str]]) -> MachineProfile:
    return MachineProfile(
        name=name,
        sources={field: source for field, (_, source) in with_sources.items()},
        **{field: value for field, (value, _) in with_sources.items()},
    )


T4_GCP = _profile("t4-gcp", _T4_GCP)
T4_COLAB = _profile("t4-colab", _T4_COLAB)
PROFILES = {profile.name: profile for profile in (T4_COLAB, T4_GCP)}
