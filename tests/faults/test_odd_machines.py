"""Odd machines: homes, locales, paths, networks, shared memory and GPUs that are not what one expects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pynvml
import pytest

from fake_nvml import FakeDriver, Gpu
from helpers import lab, paths, results
from helpers.engine import out_of_memory
from helpers.machine import gpus, limits, torch_check
from helpers.machine.torch_check import TorchCheck
from helpers.results import Failure, Log
from helpers.settings import OffloadSplit, RunSettings
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
def test_a_home_that_cannot_be_written(command_line, tmp_path, request):
    """Another user, whose home is not theirs: weights and runs go to the temporary folder, and it works."""
    output, home = tmp_path / "out", tmp_path / "home"
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short: it holds a socket
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    output.mkdir()
    for folder in (output, temporary):
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
        "PYTHONPATH": os.pathsep.join([str(paths.ROOT), os.environ.get("PYTHONPATH", "")]),
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


def test_a_checkout_path_may_hold_spaces_and_any_letters(command_line, tmp_path):
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


@pytest.fixture
def no_torch_gpu(monkeypatch):
    """torch, built with CUDA, that can use no GPU."""
    monkeypatch.setattr(lab, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(torch_check, "run", lambda: TorchCheck(cuda_build="12.8"))


@pytest.fixture
def torch_gpu(monkeypatch):
    """torch, built with CUDA, that can use a GPU."""
    monkeypatch.setattr(lab, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(torch_check, "run", lambda: TorchCheck(cuda_build="12.8", gpus=(("NVIDIA GB10", 119.6, 90.0),)))


def gpu_check():
    return next(check for check in doctor.check() if check.name == "GPU")


@pytest.mark.parametrize("driver", ["none", "without a GPU"])
def test_without_a_gpu_runs_are_emulated(driver, monkeypatch, no_torch_gpu):
    monkeypatch.setattr(gpus, "DEVICE_FILES", ())
    FakeDriver(monkeypatch, init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND if driver == "none" else None)
    assert gpus.visible() == () and lab.choose_device("auto") == "emulated"
    check = gpu_check()
    assert check.status == "warn" and check.text.startswith("none;") and "Colab" not in check.text


def test_only_colab_hears_how_to_get_a_gpu_in_colab(monkeypatch, no_torch_gpu):
    FakeDriver(monkeypatch)
    assert "Runtime" not in gpu_check().text
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    assert "Change runtime type > T4 GPU" in gpu_check().text


@pytest.mark.parametrize("number, reason", [(18, "Version Mismatch"), (999, "Unknown")])
def test_nvmls_reason_is_reported(number, reason, monkeypatch, no_torch_gpu):
    FakeDriver(monkeypatch, init_error=number)
    assert lab.choose_device("auto") == "emulated"
    assert gpu_check().status == "warn" and reason.lower() in gpu_check().text.lower()


@pytest.mark.parametrize("number", [18, 999])
def test_what_torch_can_use_is_used_though_nvml_fails(number, monkeypatch, torch_gpu):
    FakeDriver(monkeypatch, init_error=number)
    assert lab.choose_device("auto") == "cuda"
    here = lab.describe_machine("cuda")
    assert (here.name, here.gpu_mem_gib) == ("NVIDIA GB10", 119.6)
    assert "NVIDIA GB10" in gpu_check().text and "NVML" in gpu_check().text


def test_unified_memory_comes_from_torch(monkeypatch, torch_gpu):
    FakeDriver(monkeypatch, shared := Gpu("NVIDIA GB10"))
    shared.memory_error = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert lab.choose_device("auto") == "cuda"
    here = lab.describe_machine("cuda")
    assert (here.name, here.gpu_mem_gib) == ("NVIDIA GB10", 119.6)
    assert gpu_check().status == "OK" and "90.0 GiB free of 119.6 GiB" in gpu_check().text


@pytest.mark.parametrize("lost, healthy", [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")])
@pytest.mark.parametrize("when", ["always", "asked for memory"])
def test_of_two_gpus_the_healthy_one_is_used(lost, healthy, when, monkeypatch, torch_gpu):
    driver = FakeDriver(monkeypatch, Gpu("Tesla A"), Gpu("Tesla B"))
    setattr(driver.gpus[lost], "broken" if when == "always" else "memory_error", pynvml.NVML_ERROR_GPU_IS_LOST)
    assert [gpu.uuid for gpu in gpus.visible()] == [healthy]
    assert gpus.environment() == {"CUDA_VISIBLE_DEVICES": healthy}
    assert "lost" in gpu_check().text
    assert lab.choose_device("auto") == "cuda"
    assert lab.describe_machine("cuda").name == driver.gpus[healthy].name


def test_a_gpu_that_is_lost_is_as_good_as_none(monkeypatch, no_torch_gpu):
    FakeDriver(monkeypatch, only := Gpu())
    only.broken = pynvml.NVML_ERROR_GPU_IS_LOST
    assert gpus.visible() == () and lab.choose_device("auto") == "emulated"
    assert "lost" in gpu_check().text


def test_several_gpus(monkeypatch, torch_gpu):
    FakeDriver(monkeypatch, Gpu("Tesla T4"), Gpu("Tesla P4"))
    assert [gpu.name for gpu in gpus.visible()] == ["Tesla T4", "Tesla P4"]
    assert "2" in gpu_check().text and "Tesla T4" in gpu_check().text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert lab.describe_machine("cuda").name == "Tesla P4"


def test_a_gpu_that_others_use(monkeypatch, torch_gpu):
    FakeDriver(monkeypatch, Gpu(processes={os.getppid(): 9.5, 10_000_000: 1.0}))
    check = gpu_check()
    assert check.status == "warn" and "2 other processes" in check.text
    assert f"({os.getppid()}) holds 9.5 GiB" in check.text and "process 10000000 holds 1.0 GiB" in check.text


def test_a_gpu_and_a_torch_that_cannot_use_it(monkeypatch):
    FakeDriver(monkeypatch, Gpu())
    monkeypatch.setattr(lab, "_torch_has_cuda", lambda: False)
    assert lab.choose_device("auto") == "emulated"
    assert gpu_check().status == "warn" and "without CUDA" in gpu_check().text


# ---- GPU memory that others have taken, by the same stand-in

ON_GPU = RunSettings(model="opt-1.3b", device="cuda", split=OffloadSplit.parse("100 0 100 0 100 0"))
ROOMY = limits.MemoryAllowance(124 << 30, 120 << 30, "RAM", "RAM")


@pytest.mark.parametrize("kind", ["gpu_oom", "host_pin_oom"])
def test_a_gpu_that_others_fill_is_named_as_the_cause(kind, monkeypatch):
    FakeDriver(monkeypatch, full := Gpu(processes={os.getppid(): 14.5}))
    full.used_gib = 15.0
    monkeypatch.setattr(limits, "memory_allowance", lambda: ROOMY)
    failure = out_of_memory.explained(Failure(kind=kind, message="CUDA error: out of memory"), ON_GPU, ROOMY)
    assert failure.kind == "gpu_oom"
    assert f"({os.getppid()}) holds 14.50 GiB" in failure.message and "15.00 GiB of the GPU's 16.00" in failure.message
    assert "put less on the" not in failure.message


def test_pinning_that_fails_beside_an_empty_gpu_is_the_hosts(monkeypatch):
    FakeDriver(monkeypatch, Gpu())
    small = limits.MemoryAllowance(8 << 30, 1 << 30, "RAM", "RAM")
    failure = out_of_memory.explained(Failure(kind="host_pin_oom", message="CUDA error: out of memory"), ON_GPU, small)
    assert failure.kind == "host_pin_oom" and "1.00 GiB of 8.00 GiB were free" in failure.message


def test_a_run_too_large_for_the_gpu_suggests_offloading(monkeypatch):
    FakeDriver(monkeypatch, Gpu())
    failure = out_of_memory.explained(Failure(kind="gpu_oom", message="CUDA out of memory"), ON_GPU, ROOMY)
    assert "put less on the GPU" in failure.message


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
