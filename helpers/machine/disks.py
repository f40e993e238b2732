"""The disk behind a path, and the kernel's counters for it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.machine.kernel_files import read_text
from helpers.machine.mounts import Mount, mount_of, parse_mountinfo

SECTOR_BYTES = 512  # /proc/diskstats counts in these, whatever the disk's own sector is

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
NETWORK_FILESYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "virtiofs",
    "fuse",
    "drive",
    "afs",
    "ceph",
    "lustre",
    "glusterfs",
    "beegfs",
    "gpfs",
    "davfs",
    "vboxsf",
    "prl_fs",
    "vmhgfs",
}
# These file systems may span several disks, and a read can't be traced to one of them.
OVER_SEVERAL_DISKS = {"btrfs", "bcachefs"}
OVERLAYS = {"overlay", "aufs", "fuse.fuse-overlayfs"}
# Without a device number of their own, and yet on this machine's disks; any other may be a network file system.
LOCAL_WITHOUT_DEVICE = {"zfs", *OVER_SEVERAL_DISKS, *OVERLAYS}
# Files that Docker mounts into each container from its own folder, which also holds the overlay's layers.
BESIDE_THE_LAYERS = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
NOT_WHOLE_DISKS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd|nbd)\d")


@dataclass(frozen=True)
class Disk:
    """The block device whose counters count reads of files at a path, by its name in /proc/diskstats.

    `device` is None where there is none (memory, network) or where it is unknown; `found_by` says how it was found, or
    why not. FUSE counts as network, since its backing store is unknown.
    """

    device: str | None
    filesystem: str
    found_by: str
    is_memory: bool = False
    is_network: bool = False


@dataclass(frozen=True)
class DiskCounters:
    """A row of /proc/diskstats, since boot. `counts` is False where every counter is zero, so nothing is counted."""

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
                (int(words[0]), int(words[1])),
                words[2],
                reads=counters[0],
                read_bytes=counters[2] * SECTOR_BYTES,
                busy_ms=counters[9],
                counts=any(counters),
            )
        )
    return tuple(rows)


def disk_of(path: Path) -> Disk:
    """The disk behind a path, which need not exist yet. Never guesses: see `Disk`."""
    path = nearest_existing(path)
    device = os.stat(path).st_dev
    return find_disk(
        path,
        (os.major(device), os.minor(device)),
        parse_mountinfo(read_text(Path("/proc/self/mountinfo"))),
        parse_diskstats(read_text(Path("/proc/diskstats"))),
        Path("/sys"),
    )


def find_disk(
    path: Path, number: tuple[int, int], mounts: Sequence[Mount], rows: Sequence[DiskCounters], sys: Path
) -> Disk:
    """The disk behind `path`, whose files have the device `number` (major, minor), from the kernel's files."""
    mount = mount_of(path, mounts)
    filesystem = mount.filesystem if mount else "unknown file system"
    if filesystem in MEMORY_FILESYSTEMS:
        return Disk(None, filesystem, f"{filesystem} is memory", is_memory=True)
    if filesystem in NETWORK_FILESYSTEMS or (filesystem.startswith("fuse.") and filesystem not in OVERLAYS):
        return Disk(None, filesystem, f"{filesystem}: no local disk counts its reads", is_network=True)

    def named(device: str, found_by: str) -> Disk:
        if paths := _nvme_paths(device, rows):
            if len(paths) > 1:
                return Disk(None, filesystem, f"unknown: {device} is read through {', '.join(paths)}")
            device, found_by = paths[0], f"{found_by}: the only path to {device}, whose own counters are zero"
        return Disk(device, filesystem, found_by, is_memory=device.startswith(("ram", "zram")))

    if mount and filesystem in OVER_SEVERAL_DISKS:
        members = _members(mount, sys)
        if len(members) != 1:
            seen = ", ".join(members) or "not shown here"
            return Disk(None, filesystem, f"unknown: {filesystem} may lie on several disks ({seen})")
    if device := _name_of(number, rows, sys):
        return named(device, f"device number {number[0]}:{number[1]} of {path}")
    if mount and (device := _name_of_source(mount, rows, sys)):
        return named(device, f"{mount.source}, mounted on {mount.mount_point}")
    if filesystem in OVERLAYS:
        for beside in (m for m in mounts if m.mount_point in BESIDE_THE_LAYERS):
            device = _name_of(beside.number, rows, sys) or _name_of_source(beside, rows, sys)
            if device:
                return named(device, f"{beside.mount_point}, which containers keep next to the overlay's layers")
    disks = whole_disks(rows)
    if mount and len(disks) == 1 and (number[0] or filesystem in LOCAL_WITHOUT_DEVICE):
        return named(disks[0], "the only disk of this machine that was ever read")
    seen = f"{len(disks)} disks ({', '.join(disks)})" if disks else "no disk that counts reads"
    return Disk(None, filesystem, f"unknown: {filesystem} has no device of its own, and the machine shows {seen}")


def _members(mount: Mount, sys: Path) -> list[str]:
    """The disks of a btrfs or bcachefs file system, by sysfs or by its mount's source; empty if neither shows them."""
    if mount.filesystem == "bcachefs":
        return [os.path.basename(part) for part in mount.source.split(":") if part]
    source = os.path.basename(os.path.realpath(mount.source))
    for devices in sys.glob("fs/btrfs/*/devices"):
        members = sorted(entry.name for entry in devices.iterdir())
        if source in members:
            return members
    return []


def _nvme_paths(device: str, rows: Sequence[DiskCounters]) -> list[str]:
    """The paths that count a multipath NVMe disk's reads; empty for any other disk and for one that counts itself."""
    nvme = re.fullmatch(r"nvme(\d+)(n\d+)(p\d+)?", device)
    if not nvme or any(row.name == device and row.counts for row in rows):
        return []
    path = re.compile(rf"nvme{nvme[1]}c\d+{nvme[2]}")
    return [row.name for row in rows if row.counts and path.fullmatch(row.name)]


def _name_of(number: tuple[int, int], rows: Sequence[DiskCounters], sys: Path) -> str | None:
    for row in rows:
        if row.number == number:
            return row.name
    try:
        link = os.readlink(sys / f"dev/block/{number[0]}:{number[1]}")
    except OSError:
        return None
    return os.path.basename(link).replace("!", "/")


def _name_of_source(mount: Mount, rows: Sequence[DiskCounters], sys: Path) -> str | None:
    """The device that a mount names as its source: by its node's number, or by name where /dev lacks the node."""
    if not mount.source.startswith("/dev/"):
        return None
    try:
        node = os.stat(mount.source).st_rdev
        if name := _name_of((os.major(node), os.minor(node)), rows, sys):
            return name
    except OSError:
        pass
    name = os.path.basename(os.path.realpath(mount.source))
    return name if any(row.name == name for row in rows) else None


def whole_disks(rows: Sequence[DiskCounters]) -> list[str]:
    """Names of the real disks that were read since boot: no partitions, and nothing that lies on another disk."""
    names = [row.name for row in rows if row.counts and not NOT_WHOLE_DISKS.match(row.name)]
    return [
        name
        for name in names
        if not any(re.fullmatch(re.escape(other) + r"p?\d+", name) for other in names if other != name)
    ]


def free_bytes(path: Path) -> int:
    """Bytes that can still be written at a path, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def nearest_existing(path: Path) -> Path:
    path = Path(os.path.realpath(path))
    while not os.path.exists(path):
        path = path.parent
    return path
