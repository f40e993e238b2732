"""What this machine is and can do: its GPU, the memory one may use, the disk behind a path, measured ceilings."""

from __future__ import annotations

import math
import mmap
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pynvml

from helpers import data_sheets
from helpers.data_sheets import Nameplate, Theoretical
from helpers.engine.emulation import EMULATED_T4
from helpers.results import Machine
from helpers.settings import Frozen
from helpers.units import GIB, KIB, MIB

SECTOR_BYTES = 512  # /proc/diskstats counts in these, whatever the disk's own sector is


def describe(device: Literal["cuda", "emulated"], profile_name: str | None) -> Machine:
    """This machine, for a record; RAM in GiB is what this process may use of it. Creates no CUDA context."""
    found = gpus() if device == "cuda" else ()
    if device == "emulated":
        name = f"emulated {profile_name}" if profile_name else "emulated"
        gpu_mem_gib = EMULATED_T4.gpu_mem_gib
    else:
        name = found[0].name if found else "CUDA GPU that NVML does not name"
        gpu_mem_gib = round(found[0].total_gib, 3) if found else None
    return Machine(
        name=name,
        cpu=_cpu_name(),
        cpu_count=cpu_count(),
        ram_gib=round(memory_allowance().total_bytes / GIB, 3),
        gpu_mem_gib=gpu_mem_gib,
        platform=platform.platform(),
        profile=profile_name,
    )


# ---------------------------------------------------------------- GPU, through NVML: no torch, no CUDA context


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA may use here; `index` counts as CUDA does. `other_processes`: None where NVML won't say."""

    index: int
    name: str
    total_gib: float
    free_gib: float
    other_processes: int | None


def cuda_available() -> bool:
    """Whether CUDA may use a GPU here: a driver, a GPU, and not hidden by CUDA_VISIBLE_DEVICES."""
    return bool(gpus())


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA may use here; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(index, handle) for index, handle in enumerate(visible_handles()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, handle: Any) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = gpu_process_ids(handle)
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        total_gib=memory.total / GIB,
        free_gib=memory.free / GIB,
        other_processes=None if processes is None else len(processes - {os.getpid()}),
    )


def compute_capability() -> tuple[int, int] | None:
    """The generation of the GPU that is CUDA's device 0, as CUDA counts; None where NVML won't say."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = visible_handles()
        return tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handles[0])) if handles else None
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def nameplate() -> Nameplate:
    """What NVML says of the GPU that is CUDA's device 0, and of its link; where it says nothing at all, nothing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Nameplate()
    try:
        handles = visible_handles()
        return _nameplate(handles[0]) if handles else Nameplate()
    except pynvml.NVMLError:
        return Nameplate()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nameplate(handle: Any) -> Nameplate:
    def asked(function: str, *arguments: int) -> Any:
        try:
            return getattr(pynvml, function)(handle, *arguments) or None  # a virtual GPU may say 0
        except (pynvml.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py
            return None

    capability = asked("nvmlDeviceGetCudaComputeCapability")
    return Nameplate(
        name=asked("nvmlDeviceGetName"),
        pcie_generation=asked("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=asked("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation_now=asked("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width_now=asked("nvmlDeviceGetCurrPcieLinkWidth"),
        memory_clock_mhz=asked("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM),
        sm_clock_mhz=asked("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        memory_bus_bits=asked("nvmlDeviceGetMemoryBusWidth"),
        cuda_cores=asked("nvmlDeviceGetNumGpuCores"),
        compute_capability=tuple(capability) if capability else None,
    )


def visible_handles() -> list[Any]:
    """NVML handles of the GPUs that CUDA may use, CUDA's device 0 first. Needs nvmlInit; raises pynvml.NVMLError."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    visible = visible_uuids(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in visible]


def visible_uuids(uuids: Sequence[str], cuda_visible_devices: str | None) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA shows, in its order, from all the GPUs' UUIDs and CUDA_VISIBLE_DEVICES.

    As in NVIDIA's CUDA programming guide: indices or (abbreviated) UUIDs, up to the first that is neither.
    An index counts in PCI order here; CUDA's own default, fastest first, differs where GPUs of several kinds
    are mixed and CUDA_DEVICE_ORDER is not PCI_BUS_ID.
    """
    if cuda_visible_devices is None:
        return tuple(uuids)
    visible: list[str] = []
    for entry in cuda_visible_devices.split(","):
        entry = entry.strip()
        if entry.isdecimal() and int(entry) < len(uuids):
            visible.append(uuids[int(entry)])
        elif entry.startswith("MIG-"):
            visible.append(entry)
        elif entry.startswith("GPU-") and len(matches := [uuid for uuid in uuids if uuid.startswith(entry)]) == 1:
            visible += matches
        else:
            break
    return tuple(visible)


def gpu_process_ids(handle: Any) -> set[int] | None:
    """Ids of the processes that hold memory on a GPU; None where NVML won't say. In a container the ids are
    the host's, and others' processes may not be listed."""
    found: set[int] | None = None
    for running in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            found = (found or set()) | {process.pid for process in running(handle)}
        except pynvml.NVMLError:
            continue
    return found


# ---------------------------------------------------------------- mounts and cgroups


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo (proc_pid_mountinfo(5))."""

    number: tuple[int, int]  # major, minor of the files on it
    root: str
    mount_point: str
    filesystem: str
    source: str
    options: frozenset[str]  # of the file system


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts in the order of the file; a line that is none is skipped."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3 or not re.fullmatch(r"\d+:\d+", fields[2]):
            continue
        major, minor = map(int, fields[2].split(":"))
        mounts.append(
            Mount(
                (major, minor), _unescaped(fields[3]), _unescaped(fields[4]),
                rest[0], _unescaped(rest[1]), frozenset(rest[2].split(",")),
            )
        )
    return tuple(mounts)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that holds an absolute path: the longest mount point above it; of equals, the one mounted last."""
    above = [m for m in mounts if path.is_relative_to(m.mount_point)]
    return max(reversed(above), key=lambda m: len(m.mount_point), default=None)


def _text(path: Path) -> str:
    """What a file of the kernel says; nothing where it is missing or not for this process to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cgroup_folders(controller: str, proc: Path) -> Iterator[tuple[Literal["v1", "v2"], Path]]:
    """The folders of this process's cgroup and of all above it, in both cgroup versions."""
    mounts = parse_mountinfo(_text(proc / "self/mountinfo"))
    for line in _text(proc / "self/cgroup").splitlines():
        if line.count(":") < 2:
            continue
        hierarchy, controllers, path = line.split(":", 2)
        version: Literal["v1", "v2"] = "v2" if hierarchy == "0" and not controllers else "v1"
        if version == "v1" and controller not in controllers.split(","):
            continue
        for mount in mounts:
            is_v2 = mount.filesystem == "cgroup2"
            is_v1 = mount.filesystem == "cgroup" and controller in mount.options
            if not (is_v2 if version == "v2" else is_v1):
                continue
            top = Path(mount.mount_point)
            folder = top / path.removeprefix(mount.root.rstrip("/")).lstrip("/")
            if ".." in folder.parts or not folder.is_dir():
                folder = top  # a container shows its own cgroup as the mount's root
            while folder != top:
                yield version, folder
                folder = folder.parent
            yield version, top


# ---------------------------------------------------------------- memory and CPUs that this process may use


@dataclass(frozen=True)
class MemoryAllowance:
    """Bytes of RAM that this process may use in all, and that are free now; which limit binds each."""

    total_bytes: int
    free_bytes: int
    total_limited_by: str
    free_limited_by: str


def memory_allowance(proc: Path = Path("/proc")) -> MemoryAllowance:
    """The least that the machine and each cgroup above this process allow (cgroup v2 and v1).

    A cgroup's usage counts page cache; the inactive part is given back before anything is refused, so it is free.
    """
    limits = [_machine_memory(proc)]
    for version, folder in _cgroup_folders("memory", proc):
        names = {
            "v2": ("memory.max", "memory.current", "inactive_file"),
            "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }[version]
        limit, used = (_text(folder / name).strip() for name in names[:2])
        if not limit.isdecimal() or not used.isdecimal():
            continue  # "max", or no memory controller here
        inactive = re.search(rf"^{names[2]} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        busy = max(0, int(used) - (int(inactive[1]) if inactive else 0))
        limits.append((int(limit), max(0, int(limit) - busy), f"cgroup {version} limit {folder / names[0]}"))
    total = min(limits, key=lambda limit: limit[0])
    free = min(limits, key=lambda limit: limit[1])
    return MemoryAllowance(total[0], free[1], total[2], free[2])


def oom_kills(proc: Path = Path("/proc")) -> int | None:
    """How many processes the kernel's OOM killer has ended so far in this process's cgroup, or on this machine where
    no cgroup counts them (memory.events of v2, memory.oom_control of v1, vmstat); None where nothing does."""
    files = {"v2": "memory.events", "v1": "memory.oom_control"}
    counters = [folder / files[version] for version, folder in _cgroup_folders("memory", proc)]
    for counter in (*counters, proc / "vmstat"):
        if counted := re.search(r"^oom_kill (\d+)$", _text(counter), re.MULTILINE):
            return int(counted[1])
    return None


def _machine_memory(proc: Path) -> tuple[int, int, str]:
    name = "RAM of this machine"
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE))
    if "MemTotal" in kib and "MemAvailable" in kib:
        return int(kib["MemTotal"]) * KIB, int(kib["MemAvailable"]) * KIB, name
    memory = psutil.virtual_memory()
    return memory.total, memory.available, name


def cpu_count(proc: Path = Path("/proc")) -> int:
    """CPUs that this process may use: its affinity, and the CPU quota of each cgroup above it, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for version, folder in _cgroup_folders("cpu", proc):
        if version == "v2":
            words = _text(folder / "cpu.max").split()
        else:
            words = [_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # neither "max" nor -1
            count = min(count, math.ceil(int(words[0]) / int(words[1])))
    return count


def _cpu_name() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


# ---------------------------------------------------------------- the disk behind a path

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
NETWORK_FILESYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "fuse", "drive", "afs", "ceph", "lustre", "glusterfs",
    "beegfs", "gpfs", "davfs", "vboxsf", "prl_fs", "vmhgfs",
}
OVERLAYS = {"overlay", "aufs", "fuse.fuse-overlayfs"}
# Files that Docker mounts into each container from its own folder, the one that holds the overlay's layers too.
BESIDE_THE_LAYERS = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
NOT_WHOLE_DISKS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd)\d")


@dataclass(frozen=True)
class Disk:
    """The block device whose counters count reads of files at a path, by its name in /proc/diskstats.

    `device` is None where there is none (memory, network), or nothing says which; `found_by` says how it was
    found, or why not. FUSE counts as network: nobody knows what is behind it.
    """

    device: str | None
    filesystem: str
    found_by: str
    is_memory: bool = False
    is_network: bool = False


@dataclass(frozen=True)
class DiskCounters:
    """A row of /proc/diskstats, since boot. `counts` is False where every counter is zero: nothing is counted."""

    number: tuple[int, int]
    name: str
    reads: int
    read_bytes: int
    busy_ms: int  # io_ticks: time with at least one request in flight
    counts: bool


def parse_diskstats(text: str) -> tuple[DiskCounters, ...]:
    """The rows of /proc/diskstats (Linux's Documentation/admin-guide/iostats.rst); others are skipped."""
    rows = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 14 or not all(word.isdecimal() for word in words[:2] + words[3:]):
            continue
        # reads completed, reads merged, sectors read, ms reading; four of writing; in flight, io_ticks, ...
        counters = [int(word) for word in words[3:]]
        rows.append(
            DiskCounters(
                (int(words[0]), int(words[1])), words[2], reads=counters[0],
                read_bytes=counters[2] * SECTOR_BYTES, busy_ms=counters[9], counts=any(counters),
            )
        )
    return tuple(rows)


def disk_of(path: Path) -> Disk:
    """The disk behind a path, which need not exist yet. Never guesses: see `Disk`."""
    path = _nearest_existing(path)
    device = os.stat(path).st_dev
    return find_disk(
        path,
        (os.major(device), os.minor(device)),
        parse_mountinfo(_text(Path("/proc/self/mountinfo"))),
        parse_diskstats(_text(Path("/proc/diskstats"))),
        Path("/sys/dev/block"),
    )


def find_disk(
    path: Path,
    number: tuple[int, int],
    mounts: Sequence[Mount],
    rows: Sequence[DiskCounters],
    sys_dev_block: Path,
) -> Disk:
    """The disk behind `path`, whose files have the device `number` (major, minor), from what the kernel says."""
    mount = mount_of(path, mounts)
    filesystem = mount.filesystem if mount else "unknown file system"
    if filesystem in MEMORY_FILESYSTEMS:
        return Disk(None, filesystem, f"{filesystem} is memory", is_memory=True)
    if filesystem in NETWORK_FILESYSTEMS or (filesystem.startswith("fuse.") and filesystem not in OVERLAYS):
        return Disk(None, filesystem, f"{filesystem}: no local disk counts its reads", is_network=True)

    def named(device: str, found_by: str) -> Disk:
        return Disk(device, filesystem, found_by, is_memory=device.startswith(("ram", "zram")))

    if device := _name_of(number, rows, sys_dev_block):
        return named(device, f"device number {number[0]}:{number[1]} of {path}")
    if mount and (device := _name_of_source(mount, rows, sys_dev_block)):
        return named(device, f"{mount.source}, mounted on {mount.mount_point}")
    if filesystem in OVERLAYS:
        for beside in (m for m in mounts if m.mount_point in BESIDE_THE_LAYERS):
            device = _name_of(beside.number, rows, sys_dev_block) or _name_of_source(beside, rows, sys_dev_block)
            if device:
                return named(device, f"{beside.mount_point}, which containers keep beside the overlay's layers")
    disks = whole_disks(rows)
    if mount and len(disks) == 1:
        return named(disks[0], "the only disk of this machine that was ever read")
    seen = f"{len(disks)} disks ({', '.join(disks)})" if disks else "no disk that counts reads"
    return Disk(None, filesystem, f"unknown: {filesystem} has no device of its own, and the machine shows {seen}")


def _name_of(number: tuple[int, int], rows: Sequence[DiskCounters], sys_dev_block: Path) -> str | None:
    for row in rows:
        if row.number == number:
            return row.name
    try:
        link = os.readlink(sys_dev_block / f"{number[0]}:{number[1]}")
    except OSError:
        return None
    return os.path.basename(link).replace("!", "/")


def _name_of_source(mount: Mount, rows: Sequence[DiskCounters], sys_dev_block: Path) -> str | None:
    """The device that a mount names as its source: by its node's number, or by name where /dev lacks the node."""
    if not mount.source.startswith("/dev/"):
        return None
    try:
        node = os.stat(mount.source).st_rdev
        if name := _name_of((os.major(node), os.minor(node)), rows, sys_dev_block):
            return name
    except OSError:
        pass
    name = os.path.basename(os.path.realpath(mount.source))
    return name if any(row.name == name for row in rows) else None


def whole_disks(rows: Sequence[DiskCounters]) -> list[str]:
    """Names of the real disks that were read since boot: no partitions, and nothing that lies on another disk."""
    names = [row.name for row in rows if row.counts and not NOT_WHOLE_DISKS.match(row.name)]
    return [
        name for name in names
        if not any(re.fullmatch(re.escape(other) + r"p?\d+", name) for other in names if other != name)
    ]


def free_bytes(path: Path) -> int:
    """Bytes that one may still write at a path, which need not exist yet."""
    return shutil.disk_usage(_nearest_existing(path)).free


def _nearest_existing(path: Path) -> Path:
    path = Path(os.path.realpath(path))
    while not os.path.exists(path):
        path = path.parent
    return path


# ---------------------------------------------------------------- measured ceilings

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
    """The best that parts of this machine did in a test; GB are 10^9 bytes. None: not applicable, see `notes`.

    `theoretical` is by the measured one's name; empty in what earlier versions have kept.
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
    """Measure this machine in under a minute; a test that fails is None with a note. Leaves nothing in `folder`,
    which is made if it is not there.
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
        machine=describe(device, None), folder=str(folder), notes=tuple(notes), theoretical=_theoretical(device),
        **measured,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _theoretical(device: Literal["cuda", "emulated"]) -> dict[str, Theoretical]:
    """What the measured ceilings can be compared with, and where there is nothing, why."""
    disk = "not known: the provider's or the maker's, and nothing here says which"
    memory = "not known: host memory's, by channels and modules that nothing here says"
    links = dict.fromkeys((test.__name__ for test in GPU_TESTS), "none: no GPU in use")
    if device == "emulated":
        disk += f"; emulated runs hold the disk tier to {EMULATED_T4.disk_gb_s:g} GB/s"
        for name in ("host_to_device_gb_s", "device_to_host_gb_s"):
            links[name] += f"; emulated runs hold this link to {EMULATED_T4.host_link_gb_s:g} GB/s"
    unknown = {"disk_read_gb_s": disk, "page_cache_read_gb_s": memory} | links
    found = {name: Theoretical(value=None, source=source) for name, source in unknown.items()}
    return found | data_sheets.of_gpu(nameplate()) if device == "cuda" else found


def read_rates(folder: Path) -> dict[str, Rate]:
    """What a folder's disk gives, and the page cache, by the ceilings' names: a file of random bytes is read 8 MiB at
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
    disk = disk_of(path)
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
    """Have the next read of a file come from its disk, as far as the kernel follows the advice."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # dirty pages stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def _file_of_random_bytes(folder: Path) -> Iterator[Path]:
    # Random, since some disks and file systems compress; each block flushed, so that the clock sees the disk.
    wanted = min(TEST_FILE_BYTES, free_bytes(folder) // 4, memory_allowance().free_bytes // 4)
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
        torch.cuda.empty_cache()  # or this process would hold the test's buffers beside every later run


def gpu_copy_gb_s() -> float:
    """Device memory's rate: a copy within the GPU, bytes read plus bytes written, median of CUDA event times."""
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
