"""Import torch and FlexGen in a child process, and ask torch about the GPUs it can use."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from helpers import paths

LIMIT_S = 120.0
SCRIPT = """
import json
from helpers.engine import patches
patches.import_flexgen()
import torch
gpus, error = [], ""
try:
    if torch.version.cuda:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            gpus.append([torch.cuda.get_device_name(index), total / 2**30, free / 2**30])
except Exception as failure:
    error = f"{type(failure).__name__}: {failure}"
print(json.dumps({"cuda_build": torch.version.cuda, "gpus": gpus, "cuda_error": error.partition("\\n")[0]}))
"""


@dataclass(frozen=True)
class TorchCheck:
    """`import_error`: why torch or FlexGen can't be imported, in one line, or empty.

    `gpus`: name, total GiB and free GiB of each GPU that torch can use; `cuda_error`: why it can use none.
    """

    import_error: str = ""
    cuda_build: str | None = None
    gpus: tuple[tuple[str, float, float], ...] = ()
    cuda_error: str = ""


def run() -> TorchCheck:
    """Import both, once for each value of the variables that change the answer."""
    return _run(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("PYTHONPATH"))


@functools.cache
def _run(visible_devices: str | None, python_path: str | None) -> TorchCheck:
    search_path = os.pathsep.join(filter(None, (str(paths.ROOT), python_path)))
    try:
        child = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return TorchCheck(import_error=f"importing torch and FlexGen takes longer than {LIMIT_S:.0f} s")
    if child.returncode < 0:
        return TorchCheck(import_error=f"importing torch and FlexGen ends by {signal.Signals(-child.returncode).name}")
    if child.returncode:
        last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
        return TorchCheck(import_error=last[:300])
    said = json.loads(child.stdout.splitlines()[-1])
    return TorchCheck("", said["cuda_build"], tuple(tuple(gpu) for gpu in said["gpus"]), said["cuda_error"])
