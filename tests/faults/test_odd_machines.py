"""Odd machines: homes, locales, paths, networks, shared memory and GPUs that are not what one expects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from helpers import lab, paths, results
from helpers.machine import gpus, limits
from helpers.results import Log
from helpers.setup import doctor

MEASURE = (
    "measure",
    "--device",
    "emulated",
    "--percent",
    "0",
    "50",
    "100",
    "0",
    "100",
    "0",
    "--prompt-len",
    "16",
    "--gen-len",
    "2",
    "--gpu-batch-size",
    "1",
    "--repeats",
    "1",
    "--json",
)
ODD_NAME = "Größe 100 % & 'ünï' 日本"


def assert_measured(ended: subprocess.CompletedProcess, output: Path) -> dict:
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert figures["status"] == "done" and figures["total_throughput_tok_s"] > 0
    assert [record.status for record in Log(output / results.LOG_NAME)] == ["done"]
    return figures


# ---- home


def test_without_a_home(command_line, tmp_path):
    """Neither HOME nor OFFLOAD_LAB_HOME: the user's entry in the system's list says where, and XDG_CACHE_HOME."""
    script = (
        "import os, sys; del os.environ['HOME'], os.environ['OFFLOAD_LAB_HOME']; import runpy; "
        "sys.argv[0] = 'helpers'; runpy.run_module('helpers', run_name='__main__')"
    )
    ended = command_line.run(
        *MEASURE, "--output", tmp_path / "out", program=("-c", script), env={"XDG_CACHE_HOME": str(tmp_path / "cache")}
    )
    assert_measured(ended, tmp_path / "out")
    assert (tmp_path / "cache" / "offload-lab" / "weights").is_dir()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can become someone else")
def test_a_home_that_cannot_be_written(command_line, tmp_path):
    """Another user, whose home is not theirs: weights and runs go to the temporary folder, and it works."""
    output, temporary, home = tmp_path / "out", tmp_path / "tmp", tmp_path / "home"
    for folder in (output, temporary):
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    home.mkdir(mode=0o700)  # root's
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:  # pytest's own folders are root's alone
            folder.chmod(folder.stat().st_mode | 0o011)
    # They may read everything, as this Python may be root's own, and write nothing.
    reader = "+dac_read_search"
    become = ("--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps", reader, "--ambient-caps", reader)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(paths.ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ended = command_line.run(
        *become,
        "env",
        "-u",
        "OFFLOAD_LAB_HOME",
        sys.executable,
        "-m",
        "helpers",
        *MEASURE,
        "--output",
        output,
        program=(),
        env=environment,
        executable=shutil.which("setpriv"),
    )
    if "setpriv:" in ended.stderr:
        pytest.skip(ended.stderr)
    assert_measured(ended, output)
    assert (temporary / "offload-lab-65534" / "weights").is_dir()


# ---- streams


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed, command_line, tmp_path):
    """What is opened first must not be taken for one of them."""
    ended = command_line.run(
        "-c",
        f'exec "$@" {closed}',
        "bash",
        sys.executable,
        "-m",
        "helpers",
        *MEASURE,
        "--output",
        tmp_path,
        program=(),
        executable=shutil.which("bash"),
    )
    assert ended.returncode == 0, ended.stderr
    assert [record.status for record in Log(tmp_path / results.LOG_NAME)] == ["done"]


# ---- locale, paths


@pytest.mark.parametrize("locale", ["C", "de_DE.UTF-8", "nonsense"])
def test_a_locale(locale, command_line, tmp_path):
    """Python falls back to UTF-8 for C; one that is not installed is C to the C library."""
    environment = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    output = tmp_path / "aus gabe ü"
    figures = assert_measured(command_line.run(*MEASURE, "--output", output, env=environment), output)
    assert isinstance(figures["peak_gpu_mem_gib"], float)
    ended = command_line.run("analyze", output / results.LOG_NAME, "--output", tmp_path / "berícht", env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "FlexGen" in (tmp_path / "berícht" / "report.md").read_text(encoding="utf-8")


def test_a_checkout_at_a_path_with_spaces_and_letters_of_every_kind(command_line, tmp_path):
    checkout = tmp_path / ODD_NAME / "my lab"
    shutil.copytree(paths.ROOT / "helpers", checkout / "helpers", ignore=shutil.ignore_patterns("__pycache__"))
    output = tmp_path / ODD_NAME / "out put"
    environment = {"OFFLOAD_LAB_HOME": str(tmp_path / ODD_NAME / "ho me")}
    ended = command_line.run(*MEASURE, "--output", output, checkout=checkout, env=environment)
    assert_measured(ended, output)
    assert (tmp_path / ODD_NAME / "ho me" / "weights").is_dir()
    ended = command_line.run(
        "analyze", output / results.LOG_NAME, "--output", output / "repört", checkout=checkout, env=environment
    )
    assert ended.returncode == 0, ended.stderr


# ---- namespaces: a machine without a network, without shared memory


def in_namespace(kind: str, then: str, command_line, *arguments, **options) -> subprocess.CompletedProcess:
    """A command in a mount or network namespace of its own, after `then` in a shell there."""
    if not shutil.which("unshare") or subprocess.run(["unshare", kind, "true"], capture_output=True).returncode:
        pytest.skip(f"unshare {kind} is not there or not permitted")
    script = f'{then} exec {sys.executable} -m helpers "$@"'
    return command_line.run(
        kind, "sh", "-c", script, "sh", *arguments, program=(), executable=shutil.which("unshare"), **options
    )


def test_without_a_network(command_line, tmp_path):
    """No interface but a loopback that is down: nothing is asked of it, from the first weight to the report."""
    environment = {"OFFLOAD_LAB_HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hub")}
    ended = in_namespace("--net", "", command_line, *MEASURE, "--output", tmp_path / "out", env=environment)
    assert_measured(ended, tmp_path / "out")


@pytest.mark.parametrize(
    "then",
    [
        "mount -t tmpfs -o ro none /dev/shm &&",  # there, and nothing can be written
        "mount -t tmpfs none /dev/shm && mount --bind /dev/null /dev/shm/x 2>/dev/null; umount -l /dev/shm && "
        "umount -l /dev/shm 2>/dev/null;",  # the mount is gone
    ],
)
def test_without_shared_memory(then, command_line, tmp_path):
    """Nothing here uses /dev/shm: no semaphores, no shared tensors, and the run's process is forked, not loaded."""
    ended = in_namespace("--mount", then, command_line, *MEASURE, "--output", tmp_path / "out")
    assert_measured(ended, tmp_path / "out")


# ---- GPUs, by a driver that stands in


class Driver:
    """NVML with these GPUs, as (name, processes on it)."""

    def __init__(self, monkeypatch, *gpus: tuple[str, int]) -> None:
        def handle(uuid):
            return next(i for i in range(len(gpus)) if f"GPU-{i}" == uuid)

        for name, stand_in in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": handle,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
            "nvmlDeviceGetName": lambda index: gpus[index][0],
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=15 << 30, free=14 << 30, used=1 << 30),
            "nvmlDeviceGetComputeRunningProcesses": lambda index: [
                SimpleNamespace(pid=10_000_000 + i) for i in range(gpus[index][1])
            ],
            "nvmlDeviceGetGraphicsRunningProcesses": lambda index: [],
        }.items():
            monkeypatch.setattr(pynvml, name, stand_in)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpu_check():
    return next(check for check in doctor.check() if check.name == "GPU")


def test_a_driver_without_a_gpu(monkeypatch):
    Driver(monkeypatch)
    assert gpus.visible() == () and lab.choose_device("auto") == "emulated"
    assert gpu_check().status == "warn"


def test_no_driver(monkeypatch):
    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert gpus.visible() == () and lab.choose_device("auto") == "emulated"
    assert gpu_check().status == "warn"


def test_a_driver_that_is_broken(monkeypatch):
    """A driver that starts and then fails at everything: as good as none."""
    Driver(monkeypatch, ("Tesla T4", 0))

    def lost(*arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
    assert gpus.visible() == () and lab.choose_device("auto") == "emulated"


def test_several_gpus(monkeypatch):
    Driver(monkeypatch, ("Tesla T4", 0), ("Tesla P4", 0))
    monkeypatch.setattr(lab, "_torch_has_cuda", lambda: True)
    assert [gpu.name for gpu in gpus.visible()] == ["Tesla T4", "Tesla P4"]
    assert "2" in gpu_check().text and "Tesla T4" in gpu_check().text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert lab.describe_machine("cuda").name == "Tesla P4"


@pytest.mark.parametrize("processes", [1, 3])
def test_a_gpu_that_others_use(processes, monkeypatch):
    Driver(monkeypatch, ("Tesla T4", processes))
    monkeypatch.setattr(lab, "_torch_has_cuda", lambda: True)
    assert gpu_check().status == "warn" and str(processes) in gpu_check().text


def test_a_gpu_and_a_torch_that_cannot_use_it(monkeypatch):
    Driver(monkeypatch, ("Tesla T4", 0))
    monkeypatch.setattr(lab, "_torch_has_cuda", lambda: False)
    assert lab.choose_device("auto") == "emulated"
    assert gpu_check().status == "warn"


# ---- /proc that is not there


def test_without_proc_files_memory_is_psutils(tmp_path):
    allowance = limits.memory_allowance(tmp_path)
    assert allowance.total_bytes == psutil.virtual_memory().total and allowance.free_bytes > 0
    assert limits.cpu_count(tmp_path) >= 1


def other_pythons() -> list[str]:
    found = []
    for name in ("python3.11", "python3.12", "python3.13"):
        path = shutil.which(name)
        if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            found.append(path)
    return found


@pytest.mark.parametrize("python", other_pythons())
def test_every_file_is_python_there(python, tmp_path):
    """Whether the syntax is that version's; the packages need not be there."""
    script = "import ast, pathlib, sys\nfor f in pathlib.Path(sys.argv[1]).rglob('*.py'): ast.parse(f.read_bytes())"
    ended = subprocess.run([python, "-c", script, paths.ROOT / "helpers"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
