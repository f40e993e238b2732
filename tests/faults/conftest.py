"""What tests of faults share: the command line as its user has it, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from helpers import paths

MARK = "OFFLOAD_LAB_TEST"  # in the environment of a test's processes, and of all that they start
LIMIT_S = 120
SHORT = ("--device", "emulated", "--prompt-len", "16", "--gen-len", "4", "--gpu-batch-size", "1", "--repeats", "1")


class CommandLine:
    """`python -m helpers` as a program of its own, and every process that comes of it."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    def start(self, *arguments: str, program=("-m", "helpers"), checkout: Path = paths.ROOT, env=None, **options):
        search_path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": search_path, **(env or {})}
        return subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)],
            text=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            **{"cwd": checkout, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def run(self, *arguments: str, **options) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **options)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_for_all_to_end(self) -> None:
        """Raises AssertionError naming what is still there after a generous while."""
        deadline = time.monotonic() + 30
        while left := self.alive():
            assert time.monotonic() < deadline, f"still there: {[process.cmdline() for process in left]}"
            time.sleep(0.1)


@pytest.fixture
def command_line():
    line = CommandLine()
    yield line
    for process in line.alive():
        process.send_signal(signal.SIGKILL)
