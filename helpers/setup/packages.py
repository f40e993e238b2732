"""Install missing packages without changing installed ones. Needs only the standard library."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from helpers.errors import Refused

APT_LIMIT_S = 120.0
# Needed only to open notebooks, and one is already open.
NOT_IN_A_NOTEBOOK = {"jupyter"}
# Versions that pip can compare (PEP 440); a system package may have another kind, which can't be a constraint.
VERSION = re.compile(r"v?(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?", re.IGNORECASE)


def on_colab() -> bool:
    return "COLAB_RELEASE_TAG" in os.environ


def install_missing(requirements: Path, say: Callable[[str], None] = print) -> list[str]:
    """Install a requirements file's missing packages; installed ones keep their versions.

    Returns the installed packages as `name version`. Raises Refused with pip's own reason if that cannot be done; pip
    has then changed nothing.
    """
    lacking = missing(requirements)
    if not lacking:
        return []
    say(f"installing {', '.join(lacking)}; packages that are there stay as they are ...")
    before = installed()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        pins = [f"{name}=={version}" for name, version in before.items() if VERSION.fullmatch(version)]
        constraints.write_text("\n".join(pins))
        pip = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-input",
                "--constraint",
                str(constraints),
                *lacking,
            ],
            capture_output=True,
            text=True,
        )
    importlib.invalidate_caches()
    after = installed()
    if pip.returncode:
        if "externally-managed-environment" in pip.stderr:  # PEP 668
            raise Refused(
                f"cannot install {' '.join(lacking)}: the system manages this Python's packages (PEP 668); run "
                "`make run` once, which makes a .venv, and open the notebooks with `.venv/bin/jupyter lab`"
            )
        said = [line for line in pip.stderr.splitlines() if line.startswith(("ERROR", "error"))]
        said = said or pip.stderr.splitlines()[-1:]
        raise Refused(f"cannot install {' '.join(lacking)}: {' '.join(said) or 'pip gave no reason'}")
    changed = [f"{name} {old} -> {after.get(name, 'gone')}" for name, old in before.items() if after.get(name) != old]
    if changed:  # a version that could not be pinned
        say(f"pip changed {', '.join(changed)}: restart the runtime before you go on")
    return [f"{name} {version}" for name, version in after.items() if name not in before]


def missing(requirements: Path) -> list[str]:
    """The requirements whose package this Python lacks, whatever its version."""
    there = installed()
    return [requirement for requirement in wanted(requirements) if _name(requirement) not in there]


def wanted(requirements: Path) -> list[str]:
    """The lines of a requirements file, without their comments, that a notebook needs."""
    lines = [line.split("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and _name(line) not in NOT_IN_A_NOTEBOOK]


def installed() -> dict[str, str]:
    """Every installed package's version by its normalised name; of two in the path the one that Python imports."""
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        if package.metadata["Name"]:
            versions.setdefault(_name(package.metadata["Name"]), package.version or "")
    return versions


def _name(requirement: str) -> str:
    """The package that a requirement names, as PEP 503 normalises it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def install_iostat() -> None:
    """Install sysstat with apt if it lets us; without it /proc/diskstats is read."""
    install = ["apt-get", "install", "-y", "-qq", "sysstat"]
    for commands in ([install], [["apt-get", "update", "-qq"], install]):
        if shutil.which("iostat") or not shutil.which("apt-get"):
            return
        for command in commands:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=APT_LIMIT_S, stdin=subprocess.DEVNULL)
