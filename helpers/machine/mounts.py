"""Mounted file systems, as /proc/self/mountinfo lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
    """The mounts in the order of the file; malformed lines are skipped."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3 or not re.fullmatch(r"\d+:\d+", fields[2]):
            continue
        major, minor = map(int, fields[2].split(":"))
        mounts.append(
            Mount(
                (major, minor),
                _unescaped(fields[3]),
                _unescaped(fields[4]),
                rest[0],
                _unescaped(rest[1]),
                frozenset(rest[2].split(",")),
            )
        )
    return tuple(mounts)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that holds an absolute path: the longest mount point above it; of equals, the one mounted last."""
    above = [m for m in mounts if path.is_relative_to(m.mount_point)]
    return max(reversed(above), key=lambda m: len(m.mount_point), default=None)
