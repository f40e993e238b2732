"""The layers of `helpers`: a module imports only from layers below its own, and there are no cycles.

Imports inside functions count, and so do those for type checking.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from helpers.paths import ROOT

# Top to bottom. A package is one layer; modules in the lowest layer may import each other.
LAYERS = """
__main__
suite
ladder exercises
notebook
explorer setup
calibration forecast
lab
report
analysis
engine
sampling
predict
weights
machine
flexgen_command progress printing
homework
runs
results
placement settings options models home paths errors units
"""
RANK = {name: rank for rank, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}
LOWEST = max(RANK.values())


def modules() -> dict[str, Path]:
    files = sorted((ROOT / "helpers").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


MODULES = modules()


def imports(module: str, source: str) -> Iterator[str]:
    """Modules of the lab that a module imports, anywhere in its text."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports are not followed here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "helpers":
                yield name if name in MODULES else name.rpartition(".")[0]


GRAPH = {name: set(imports(name, file.read_text(encoding="utf-8"))) - {name} for name, file in MODULES.items()}


def unit(module: str) -> str:
    """The package or top-level module that a module belongs to."""
    return module.split(".")[1]


def test_every_module_has_a_layer():
    assert {unit(name) for name in MODULES if name != "helpers"} == set(RANK)


@pytest.mark.parametrize("module", [name for name in GRAPH if name != "helpers"])
def test_a_module_imports_from_lower_layers_only(module):
    mine = RANK[unit(module)]
    others = {name for name in GRAPH[module] if name != "helpers" and unit(name) != unit(module)}
    assert {name for name in others if RANK[unit(name)] <= mine and not mine == RANK[unit(name)] == LOWEST} == set()


def test_there_are_no_cycles():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_are_found_wherever_they_are():
    source = (
        "from helpers import paths\nimport helpers.units\ndef f():\n    from helpers.machine.disks import free_bytes\n"
    )
    assert set(imports("here", source)) == {"helpers.paths", "helpers.units", "helpers.machine.disks"}
