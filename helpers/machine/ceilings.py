"""Measured ceilings: the best rates of this machine's parts."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from helpers.machine import data_sheets, disks, gpus, limits, this_machine
from helpers.machine.data_sheets import Theoretical
from helpers.machine.emulation import EMULATED_T4
from helpers.results import Machine
from helpers.settings import Frozen
from helpers.units import GIB, MIB

BLOCK_BYTES = 8 * MIB
READ_THREADS = 4  # as many as FlexGen's disk copies
TEST_FILE_BYTES = 512 * MIB
WRITE_SECONDS = 4.0  # a slow disk gets a smaller file
READ_SECONDS = 3.0  # and is read once instead of three times
REPEATS = 10


@dataclass(frozen=True)
class Rate:
    """GB (10^9 bytes) a second, and how it was measured; None where it could not be, and why."""

    gb_s: float | None
    how: str


class MachineCeilings(Frozen):
    """The best measured rate of each part of this machine; GB are 10^9 bytes. None: not applicable, see `notes`.

    `theoretical` has the measured ones' names; it is empty in files from earlier versions.
    """

    machine: Machine
    folder: str
    disk_read_gb_s: float | None
    page_cache_read_gb_s: float | None
    gpu_copy_gb_s: float | None  # device memory: bytes read + bytes written
    host_to_device_gb_s: float | None  # from pinned memory
    device_to_host_gb_s: float | None
    matmul_tflop_s: float | None  # fp16
    notes: tuple[str, ...]
    theoretical: dict[str, Theoretical] = {}


def measure_ceilings(device: Literal["cuda", "emulated"], folder: Path) -> MachineCeilings:
    """Measure this machine in under a minute; a failed test gives None and a note. Leaves nothing in `folder`,
    which is created if missing.
    """
    rates = read_rates(folder)
    measured = {name: rate.gb_s for name, rate in rates.items()}
    notes = [f"{name}: {rate.how}" for name, rate in rates.items()]
    for test in GPU_TESTS:
        measured[test.__name__] = None
        if device != "cuda":
            notes.append(f"{test.__name__}: not measured: no GPU in use")
            continue
        try:
            measured[test.__name__] = _freeing_gpu_memory(test)
            notes.append(f"{test.__name__}: {GPU_TESTS[test]}, median of {REPEATS} by CUDA events")
        except (ImportError, RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
            notes.append(f"{test.__name__}: not measured: {_first_line(error)}")
    return MachineCeilings(
        machine=this_machine.describe(device, None),
        folder=str(folder),
        notes=tuple(notes),
        theoretical=_theoretical(device),
        **measured,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _theoretical(device: Literal["cuda", "emulated"]) -> dict[str, Theoretical]:
    """Theoretical values for the measured ceilings, or the reason there is none."""
    disk = "not known: the provider's or the maker's, and nothing here says which"
    memory = "not known: host memory's, by channels and modules that nothing here says"
    links = dict.fromkeys((test.__name__ for test in GPU_TESTS), "none: no GPU in use")
    if device == "emulated":
        disk += f"; emulated runs hold the disk tier to {EMULATED_T4.disk_gb_s:g} GB/s"
        for name in ("host_to_device_gb_s", "device_to_host_gb_s"):
            links[name] += f"; emulated runs hold this link to {EMULATED_T4.h2d_gb_s:g} GB/s"
    unknown = {"disk_read_gb_s": disk, "page_cache_read_gb_s": memory} | links
    found = {name: Theoretical(value=None, source=source) for name, source in unknown.items()}
    return found | data_sheets.of_gpu(gpus.nameplate()) if device == "cuda" else found


def read_rates(folder: Path) -> dict[str, Rate]:
    """Read rates of a folder's disk and of the page cache, by ceiling name: a file of random bytes is read 8 MiB at
    a time in four threads, past the page cache (O_DIRECT) and from it; medians of up to three passes."""
    tests = {"disk_read_gb_s": _disk_rate, "page_cache_read_gb_s": _page_cache_rate}
    found = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _file_of_random_bytes(folder) as path:
            for name, test in tests.items():
                try:
                    found[name] = test(path)
                except OSError as error:
                    found[name] = Rate(None, f"not measured: {error}")
    except OSError as error:
        return dict.fromkeys(tests, Rate(None, f"not measured: {error}")) | found
    return found


def _disk_rate(path: Path) -> Rate:
    disk = disks.disk_of(path)
    if disk.is_memory or disk.is_network:
        return Rate(None, f"not measured: {path.parent} is on {disk.filesystem}, no disk")
    try:
        # O_DIRECT is Linux's own.
        seconds = _median_pass_s(path, lambda: _read(path, os.O_RDONLY | os.O_DIRECT))
        return Rate(_gb_s(path, seconds), "O_DIRECT, 8 MiB blocks, 4 threads")
    except (OSError, AttributeError) as error:
        refused = f"O_DIRECT refused by {disk.filesystem} ({error})"
    before = _bytes_from_storage()
    passes = []

    def read_dropped() -> None:
        drop_from_page_cache(path)
        passes.append(_read(path, os.O_RDONLY))

    seconds = _median_pass_s(path, read_dropped)
    came, after = len(passes) * path.stat().st_size, _bytes_from_storage()
    if before is None or after is None or after - before < 0.9 * came:
        return Rate(None, f"not measured: {refused}, and the page cache could not be dropped")
    return Rate(_gb_s(path, seconds), f"{refused}; page cache dropped, 8 MiB blocks, 4 threads")


def _page_cache_rate(path: Path) -> Rate:
    _read(path, os.O_RDONLY)  # fills it
    seconds = _median_pass_s(path, lambda: _read(path, os.O_RDONLY))
    return Rate(_gb_s(path, seconds), "from the page cache, 8 MiB blocks, 4 threads")


def drop_from_page_cache(path: Path) -> None:
    """Advise the kernel to drop a file from the page cache, so that the next read comes from its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # dirty pages stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def _file_of_random_bytes(folder: Path) -> Iterator[Path]:
    # Random, since some disks and file systems compress; each block flushed, so that the clock sees the disk.
    wanted = min(TEST_FILE_BYTES, disks.free_bytes(folder) // 4, limits.memory_allowance().free_bytes // 4)
    if wanted < BLOCK_BYTES:
        raise OSError(f"{folder}: no room for a test file of {4 * BLOCK_BYTES // MIB} MiB")
    with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-test-") as file:
        started = time.monotonic()
        for _ in range(wanted // BLOCK_BYTES):
            file.write(os.urandom(BLOCK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            if time.monotonic() - started > WRITE_SECONDS:
                break
        path = Path(file.name)
        drop_from_page_cache(path)
        yield path


def _read(path: Path, flags: int) -> int:
    """Read a whole file in blocks, four threads; returns its bytes. Anonymous maps are aligned as O_DIRECT needs."""
    size = path.stat().st_size

    def read_every_fourth(first: int) -> int:
        descriptor = os.open(path, flags)
        try:
            with mmap.mmap(-1, BLOCK_BYTES) as buffer:
                offsets = range(first * BLOCK_BYTES, size, READ_THREADS * BLOCK_BYTES)
                return sum(os.preadv(descriptor, [buffer], offset) for offset in offsets)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(READ_THREADS) as threads:
        read = sum(threads.map(read_every_fourth, range(READ_THREADS)))
    if read != size:
        raise OSError(f"{path}: {read} bytes came of {size}")
    return read


def _median_pass_s(path: Path, read: Callable[[], Any]) -> float:
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < READ_SECONDS:
        started = time.monotonic()
        read()
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def _gb_s(path: Path, seconds: float) -> float:
    return path.stat().st_size / seconds / 1e9


def _bytes_from_storage() -> int | None:
    try:
        return psutil.Process().io_counters().read_bytes
    except (AttributeError, OSError, RuntimeError, psutil.Error):
        return None


def _freeing_gpu_memory(test: Callable[[], float]) -> float:
    import torch

    try:
        return test()
    finally:
        torch.cuda.empty_cache()  # or this process would keep the test's buffers during every later run


def gpu_copy_gb_s() -> float:
    """Device memory bandwidth: a copy within the GPU, bytes read plus bytes written, median of CUDA event times."""
    import torch

    source = torch.empty(_gpu_buffer_bytes(GIB), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_cuda_s(lambda: target.copy_(source)) / 1e9


def host_to_device_gb_s() -> float:
    """Copies from pinned host memory to the GPU, median of CUDA event times."""
    host, device = _host_and_device_buffers()
    return host.numel() / _median_cuda_s(lambda: device.copy_(host, non_blocking=True)) / 1e9


def device_to_host_gb_s() -> float:
    """Copies from the GPU to pinned host memory, median of CUDA event times."""
    host, device = _host_and_device_buffers()
    return host.numel() / _median_cuda_s(lambda: host.copy_(device, non_blocking=True)) / 1e9


def matmul_tflop_s(rows: int = 8192) -> float:
    """fp16 product of two square matrices of `rows`, 2 rows^3 operations, median of CUDA event times."""
    import torch

    # Normal values: products of constants draw less power and run faster than a model's.
    left, right = (torch.randn(rows, rows, dtype=torch.float16, device="cuda") for _ in range(2))
    product = torch.empty_like(left)
    return 2 * rows**3 / _median_cuda_s(lambda: torch.mm(left, right, out=product)) / 1e12


# What each does, in words.
GPU_TESTS = {
    gpu_copy_gb_s: "copy within the GPU, up to 1 GiB",
    host_to_device_gb_s: "copy from pinned memory, up to 256 MiB",
    device_to_host_gb_s: "copy to pinned memory, up to 256 MiB",
    matmul_tflop_s: "product of two square matrices of 8,192 rows, normal values",
}


def _host_and_device_buffers() -> tuple[Any, Any]:
    import torch

    host = torch.empty(_gpu_buffer_bytes(256 * MIB), dtype=torch.uint8, pin_memory=True)
    return host, torch.empty_like(host, device="cuda")


def _gpu_buffer_bytes(wanted: int) -> int:
    import torch

    return min(wanted, torch.cuda.mem_get_info()[0] // 8)


def _median_cuda_s(action: Callable[[], Any]) -> float:
    import torch

    for _ in range(3):
        action()
    seconds = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)
