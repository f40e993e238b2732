"""What every test has: a home of its own for weights and runs, on a disk, and no figures left in the user's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from helpers import lab, paths
from helpers.engine import emulated_cost, launcher
from helpers.machine import disks

# However slow or busy the machine is, a test says the same.
settings.register_profile("at its own pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("at its own pace")


def pytest_collection_modifyitems(items):
    """The long one last."""
    items.sort(key=lambda item: item.name.startswith("test_the_homework_from_one_command"))


@pytest.fixture(scope="session", autouse=True)
def lab_home(tmp_path_factory):
    """The lab's home for the whole session: opt-mini's weights are made once."""
    with tempfile.TemporaryDirectory(dir=_folder_on_a_disk(tmp_path_factory.getbasetemp())) as home:
        before = os.environ.get("OFFLOAD_LAB_HOME")
        os.environ["OFFLOAD_LAB_HOME"] = home
        yield home
        if before is None:
            del os.environ["OFFLOAD_LAB_HOME"]
        else:
            os.environ["OFFLOAD_LAB_HOME"] = before


@pytest.fixture(autouse=True)
def unpaced(request, monkeypatch):
    """Let the emulated machine keep no pace, so that runs take no longer than the CPU does; `paced` tests keep it."""
    if "paced" not in request.keywords:
        rates = dict.fromkeys(("gpu_mem_gb_s", "gpu_fp16_tflop_s", "dequantize_gb_s", "h2d_gb_s", "d2h_gb_s"), 1e9)
        fast = launcher.EMULATED_T4.model_copy(update=rates | {"disk_gb_s": 1e9, "layer_overhead_us": 1e-6})
        monkeypatch.setattr(launcher, "EMULATED_T4", fast)
        monkeypatch.setattr(lab, "MOST_REPLACED", 0)
        monkeypatch.setattr(lab, "_pace_notes", lambda repeats: [])
        monkeypatch.setattr(emulated_cost, "LONGEST_S", float("inf"))


@pytest.fixture
def folder_in_memory():
    """A folder on a file system that passes for a disk and is memory."""
    if not os.path.isdir("/dev/shm") or not disks.disk_of(Path("/dev/shm")).is_memory:
        pytest.skip("no memory here that passes for a disk")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def _folder_on_a_disk(temporary):
    """Where /tmp is memory, the disk tier would be refused there."""
    if not disks.disk_of(temporary).is_memory:
        return temporary
    paths.DEFAULT_OUTPUT.mkdir(exist_ok=True)
    return paths.DEFAULT_OUTPUT
