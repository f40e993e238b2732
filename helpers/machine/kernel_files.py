"""Text from /proc, /sys and cgroup files."""

from pathlib import Path


def read_text(path: Path) -> str:
    """What a file of the kernel says; nothing where it is missing or not for this process to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
