"""torch and FlexGen that can't be imported, or whose import is cut short: the record and the doctor name the cause."""

from __future__ import annotations

import json
import os
import time

import psutil
import pytest

from faults.conftest import SHORT
from helpers.setup import doctor

MEASURE = ("measure", *SHORT, "--percent", "0", "50", "100", "0", "100", "0", "--json")
CAUSES = [
    "OSError('libcurand.so.10: cannot open shared object file: No such file or directory')",
    "ValueError('numpy.dtype size changed, may indicate binary incompatibility')",
    "ImportError('cannot import name foo')",
]


def shadow(folder, package: str, code: str) -> str:
    """A search path on which a package's import runs `code`."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(code)
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@pytest.mark.parametrize("package", ["torch", "flexgen"])
@pytest.mark.parametrize("cause", CAUSES)
def test_an_import_that_fails_is_named(package, cause, command_line, tmp_path, monkeypatch):
    search_path = shadow(tmp_path / "shadow", package, f"raise {cause}")
    ended = command_line.run(*MEASURE, "--output", tmp_path / "out", env={"PYTHONPATH": search_path})
    kind, words = cause.split("(", 1)[0], cause.split("'")[1]
    assert ended.returncode == 1 and f"{kind}: {words}" in json.loads(ended.stdout)["reason"], ended.stderr
    monkeypatch.setenv("PYTHONPATH", search_path)
    (check,) = (check for check in doctor.check() if check.name == "packages")
    assert check.status == "FAIL" and f"{kind}: {words}" in check.text


def test_an_import_that_crashes_is_named(command_line, tmp_path):
    search_path = shadow(tmp_path / "shadow", "torch", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    ended = command_line.run(*MEASURE, "--output", tmp_path / "out", env={"PYTHONPATH": search_path})
    assert ended.returncode == 1 and "SIGSEGV" in json.loads(ended.stdout)["reason"]


def test_a_server_killed_while_it_imports_is_called_killed(command_line, tmp_path):
    search_path = shadow(tmp_path / "shadow", "torch", "import time; time.sleep(60)")
    program = command_line.start(*MEASURE, "--output", tmp_path / "out", env={"PYTHONPATH": search_path})
    while not (servers := [p for p in psutil.Process(program.pid).children() if "forkserver" in " ".join(p.cmdline())]):
        assert program.poll() is None
        time.sleep(0.01)
    time.sleep(1)
    # A killed server's imports are tried in another process; let those succeed.
    (tmp_path / "shadow" / "torch" / "__init__.py").unlink()
    (tmp_path / "shadow" / "torch").rmdir()
    servers[0].kill()
    out, err = program.communicate(timeout=120)
    figures = json.loads(out)
    assert figures["status"] == "killed", err
    assert "while it imported torch" in figures["reason"] and "GiB were free before it" in figures["reason"]
