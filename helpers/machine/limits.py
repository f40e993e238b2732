"""Memory and CPUs available to this process, with cgroup limits and ulimit -v."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from helpers.machine.kernel_files import read_text
from helpers.machine.mounts import parse_mountinfo
from helpers.units import KIB


def cgroup_folders(controller: str, proc: Path) -> Iterator[tuple[Literal["v1", "v2"], Path]]:
    """The folders of this process's cgroup and of its ancestors, in both cgroup versions."""
    mounts = parse_mountinfo(read_text(proc / "self/mountinfo"))
    for line in read_text(proc / "self/cgroup").splitlines():
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


@dataclass(frozen=True)
class MemoryAllowance:
    """Bytes of memory that this process may use in total, and that are free now, with the limit that binds each."""

    total_bytes: int
    free_bytes: int
    total_limited_by: str
    free_limited_by: str


def memory_allowance(proc: Path = Path("/proc")) -> MemoryAllowance:
    """The least that the machine, each cgroup above this process (v2 and v1) and ulimit -v allow.

    A cgroup's usage includes page cache; the inactive part is reclaimed before anything fails, so it counts as free.
    """
    limits = [_machine_memory(proc)]
    if (address_space := address_space_limit()) is not None:
        free = max(0, address_space - psutil.Process().memory_info().vms)
        limits.append((address_space, free, "address space, ulimit -v"))
    for version, folder in cgroup_folders("memory", proc):
        # Above memory.high a cgroup is throttled almost to a standstill, so it is a limit too.
        files = ("memory.max", "memory.high") if version == "v2" else ("memory.limit_in_bytes",)
        usage = "memory.current" if version == "v2" else "memory.usage_in_bytes"
        inactive_file = "inactive_file" if version == "v2" else "total_inactive_file"
        for file in files:
            limit, used = (read_text(folder / name).strip() for name in (file, usage))
            if not limit.isdecimal() or not used.isdecimal():
                continue  # "max", or no memory controller here
            inactive = re.search(rf"^{inactive_file} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
            busy = max(0, int(used) - (int(inactive[1]) if inactive else 0))
            limits.append((int(limit), max(0, int(limit) - busy), f"cgroup {version} limit {folder / file}"))
    least_total = min(limits, key=lambda limit: limit[0])
    least_free = min(limits, key=lambda limit: limit[1])
    return MemoryAllowance(least_total[0], least_free[1], least_total[2], least_free[2])


def address_space_limit() -> int | None:
    """Bytes of address space that this process may map (ulimit -v); None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def oom_kills(proc: Path = Path("/proc")) -> int | None:
    """How many processes the kernel's OOM killer has killed in this process's cgroup, or on this machine if no cgroup
    counts them (v2's memory.events, v1's memory.oom_control, vmstat); None where nothing does."""
    files = {"v2": "memory.events", "v1": "memory.oom_control"}
    counters = [folder / files[version] for version, folder in cgroup_folders("memory", proc)]
    for counter in (*counters, proc / "vmstat"):
        if counted := re.search(r"^oom_kill (\d+)$", read_text(counter), re.MULTILINE):
            return int(counted[1])
    return None


def _machine_memory(proc: Path) -> tuple[int, int, str]:
    name = "RAM of this machine"
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read_text(proc / "meminfo"), re.MULTILINE))
    if "MemTotal" in kib and "MemAvailable" in kib:
        return int(kib["MemTotal"]) * KIB, int(kib["MemAvailable"]) * KIB, name
    memory = psutil.virtual_memory()
    return memory.total, memory.available, name


def cpu_count(proc: Path = Path("/proc")) -> int:
    """CPUs that this process may use: its affinity, and the CPU quota of each cgroup above it, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for version, folder in cgroup_folders("cpu", proc):
        if version == "v2":
            words = read_text(folder / "cpu.max").split()
        else:
            words = [read_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # neither "max" nor -1
            count = min(count, math.ceil(int(words[0]) / int(words[1])))
    return count


def cpu_name() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()
