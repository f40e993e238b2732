"""Every package that the lab imports is declared, with a reason."""

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

OPTIONAL = {"google", "accelerate"}  # Colab's own; benchmarks/peers.py says how to install it


def declared(*files: str) -> set[str]:
    lines = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    return {normal(name) for name in re.findall(r"^[A-Za-z0-9_.-]+", lines, re.MULTILINE)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(file: Path) -> set[str]:
    """Top-level names of a file's absolute imports, those inside functions included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - OPTIONAL


@pytest.mark.parametrize(
    "folder, files",
    [
        ("helpers", ["requirements.txt"]),
        ("benchmarks", ["requirements.txt"]),
        ("tests", ["requirements.txt", "requirements-dev.txt"]),
    ],
)
def test_every_imported_package_is_declared(folder, files):
    own = {path.stem for root in ("tests", "benchmarks") for path in (ROOT / root).rglob("*")} | {"helpers"}
    packages = importlib.metadata.packages_distributions()
    names = set().union(*map(imported, (ROOT / folder).rglob("*.py"))) - own
    undeclared = {name for name in names if not {normal(one) for one in packages.get(name, [name])} & declared(*files)}
    assert undeclared == set()


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-dev.txt"])
def test_every_line_has_a_reason(file):
    lines = [line for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    assert [line for line in lines if "  # " not in line] == []
