"""Text from /proc, /sys and cgroup files."""

from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a kernel file; empty if it is missing or unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
