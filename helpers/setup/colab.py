"""What each notebook's first cell calls: install what is missing, change nothing that is there, check the machine.

It imports nothing but the standard library until that is done.
"""

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

from helpers import paths
from helpers.errors import Refused

DRIVE = Path("/content/drive")
APT_LIMIT_S = 120.0

# Opens notebooks; whoever runs this has one open.
NOT_IN_A_NOTEBOOK = {"jupyter"}
# Versions that pip can compare (PEP 440); a system package's own kind cannot be a constraint.
VERSION = re.compile(r"v?(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?", re.IGNORECASE)


def set_up() -> None:
    """Make this machine ready and say what it is: one line a check. Raises Refused if packages cannot be had.

    Called again it finds everything there and only checks.
    """
    install_missing(paths.ROOT / "requirements.txt")
    if on_colab():
        install_iostat()
    from helpers.setup import doctor

    print(*doctor.check(), sep="\n")


def on_colab() -> bool:
    return "COLAB_RELEASE_TAG" in os.environ


def install_missing(requirements: Path, say: Callable[[str], None] = print) -> list[str]:
    """Install what a requirements file names and this Python lacks; what is there already keeps its version.

    Returns what was installed, as `name version`. Raises Refused with pip's own reason if that cannot be done; pip
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
        said = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or pip.stderr.splitlines()[-1:]
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


def mount_drive(folder: Path) -> None:
    """Mount Google Drive if a folder is on it and it is not mounted yet: Colab then asks for permission.

    Raises Refused outside Colab, and if permission was not given.
    """
    if not folder.is_relative_to(DRIVE) or (DRIVE / "MyDrive").is_dir():
        return
    try:
        from google.colab import drive

        drive.mount(str(DRIVE))
    except ImportError:
        raise Refused(f"output_dir {folder}: Google Drive is there in Colab only; choose a folder here") from None
    except Exception as error:  # Colab's own, none of them documented
        raise Refused(f"output_dir {folder}: Google Drive was not mounted ({error}); run this cell again") from error
