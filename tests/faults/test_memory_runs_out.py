"""Memory that runs out, caused for real: which memory it was, what was needed, what there was, what to change."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from factories import at_phase, mini, run_one, workers
from helpers.engine import launcher, out_of_memory, worker
from helpers.machine import limits, mounts
from helpers.results import Failure, Log
from helpers.settings import Workload

GIB = 2**30
SPLIT = ("--percent", "100", "0", "100", "0", "100", "0")
RUN = ("measure", "--device", "emulated", "--repeats", "1", "--json")
MEASURE = (*RUN, *SPLIT)
TINY = ("--gpu-batch-size", "1", "--prompt-len", "16", "--gen-len", "2")
LARGE = ("--gpu-batch-size", "128", "--prompt-len", "500", "--gen-len", "2")  # 0.25 GiB of attention scores, thrice
CGROUP_LIMIT = 900 << 20  # a tiny run fits, a large one does not


# ---- the GPU's


@pytest.mark.parametrize(
    "capacity_gib, work",
    [
        (0.002, Workload(gpu_batch_size=1, prompt_len=16, gen_len=2)),  # not even the weights
        (0.02, Workload(gpu_batch_size=32, prompt_len=64, gen_len=2)),  # the KV cache or the activations
    ],
)
def test_the_gpus_memory(capacity_gib, work, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "EMULATED_T4", launcher.EMULATED_T4.model_copy(update={"gpu_mem_gib": capacity_gib}))
    failure = run_one(mini(workload=work), tmp_path).failure
    assert failure.kind == "gpu_oom" and len(failure.message.splitlines()) == 1
    for words in ("Tried to allocate", "is free", "need about", "--percent", "--gpu-batch-size"):
        assert words in failure.message
    assert run_one(mini("0 100 100 0 100 0"), tmp_path).failure is None or capacity_gib < 0.01


def test_what_fits_to_the_last_segment_runs(tmp_path, monkeypatch):
    settings = mini()
    reserved = run_one(settings, tmp_path / "free").peak_gpu_reserved_gib
    for capacity_gib, kind in ((reserved, None), (reserved * 0.5, "gpu_oom")):
        monkeypatch.setattr(
            launcher, "EMULATED_T4", launcher.EMULATED_T4.model_copy(update={"gpu_mem_gib": capacity_gib})
        )
        failure = run_one(settings, tmp_path / str(kind)).failure
        assert (failure and failure.kind) == kind


# ---- the host's


def test_address_space_that_a_limit_refuses(command_line, tmp_path):
    """FlexGen's four copy threads ask for 2 GiB each; under `ulimit -v` the allocator is told no."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (6 * GIB, 6 * GIB))

    on_disk = ("--percent", "0", "0", "100", "0", "100", "0")  # elsewhere nothing passes through their buffers
    ended = command_line.run(*RUN, *TINY, *on_disk, "--output", tmp_path, preexec_fn=limit)
    assert ended.returncode == 1, ended.stderr
    figures = json.loads(ended.stdout)
    assert figures["status"] == "host_oom", figures["reason"]
    assert "ulimit -v allows 6.00 GiB" in figures["reason"]
    raise_to_gib = float(figures["reason"].split("raise it to ")[1].split(" GiB")[0])
    ended = command_line.run(
        *RUN,
        *TINY,
        *on_disk,
        "--output",
        tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, 2 * (int((raise_to_gib + 0.01) * GIB),)),
    )
    assert ended.returncode == 0, ended.stdout


def test_memory_that_cannot_be_pinned_is_not_called_the_gpus():
    """CUDA's own words for it (cudaHostAlloc); a GPU's allocator says `CUDA out of memory`."""
    error = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    assert worker.kind_of(error) == "host_pin_oom"
    settings = mini("0 100 100 0 100 0", device="cuda", model="opt-30b")
    before = limits.MemoryAllowance(12 * GIB, 9 * GIB, "RAM of this machine", "RAM of this machine")
    failure = Failure(kind="host_pin_oom", message=worker.one_line(error))
    message = out_of_memory.explained(failure, settings, before).message
    for words in ("pinned", "9.00 GiB of 12.00 GiB", "--pin-weight false", "--percent"):
        assert words in message
    pinned_gib = float(message.split("this run pins ")[1].split(" GiB")[0])
    assert pinned_gib > 8 + settings.opt_model.weight_bytes / GIB * 0.99  # copy buffers and all weights, rounded up


@pytest.fixture
def small_cgroup():
    """A cgroup with little memory, of whichever version this machine has."""
    version, parent = _memory_hierarchy()
    group = parent / f"offload-lab-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if version == "v2" else "memory.limit_in_bytes")).write_text(str(CGROUP_LIMIT))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no cgroup {version} with a memory limit can be made here ({error})")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    for _ in range(100):  # the last of them is still ending
        with contextlib.suppress(OSError):
            group.rmdir()
            break
        time.sleep(0.1)


def _memory_hierarchy() -> tuple[str, Path]:
    mounted = mounts.parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    for mount in mounted:
        top = Path(mount.mount_point)
        if mount.filesystem == "cgroup2" and "memory" in (top / "cgroup.controllers").read_text().split():
            try:
                (top / "cgroup.subtree_control").write_text("+memory")
            except OSError:
                continue
            return "v2", top
        if mount.filesystem == "cgroup" and "memory" in mount.options:
            return "v1", top
    pytest.skip("no cgroup with a memory controller is mounted writable")


def test_the_kernels_oom_killer_in_a_cgroup(small_cgroup, command_line, tmp_path):
    def enter():
        (small_cgroup / "cgroup.procs").write_text(str(os.getpid()))

    ended = command_line.run(*MEASURE, *LARGE, "--output", tmp_path, preexec_fn=enter)
    figures = json.loads(ended.stdout)
    assert figures["status"] in ("killed", "refused") and ended.returncode in (1, 2), ended.stderr
    if figures["status"] == "killed":
        assert all(words in figures["reason"] for words in ("OOM killer", "memory ran out", "of 900.0 MiB"))
    assert "cgroup" in figures["reason"]
    small = command_line.run(*MEASURE, *TINY, "--output", tmp_path, preexec_fn=enter)
    assert small.returncode == 0, small.stderr
    assert [record.status for record in Log(tmp_path / "results.jsonl")] == ["failed", "done"]


def test_the_oom_killer_while_torch_is_imported(small_cgroup, command_line, tmp_path):
    """The kernel kills the server that the run would be forked from, unless the run is refused before."""
    v1 = small_cgroup / "memory.limit_in_bytes"
    (v1 if v1.exists() else small_cgroup / "memory.max").write_text(str(150 << 20))

    def enter():
        (small_cgroup / "cgroup.procs").write_text(str(os.getpid()))

    ended = command_line.run(*MEASURE, *TINY, "--output", tmp_path, preexec_fn=enter)
    if ended.returncode == -signal.SIGKILL:
        pytest.skip("the kernel killed the program itself, not its server")
    figures = json.loads(ended.stdout)
    assert figures["status"] in ("killed", "refused"), figures["reason"]
    assert "cgroup" in figures["reason"] and "offload-lab-test" in figures["reason"]


def test_a_person_is_not_taken_for_the_oom_killer(tmp_path, monkeypatch):
    if limits.oom_kills() is None:
        pytest.skip("nothing counts what the OOM killer ends here")
    at_phase(monkeypatch, "measured", lambda: [process.kill() for process in workers()])
    failure = run_one(mini(), tmp_path).failure
    assert failure.kind == "killed" and "not by the kernel's OOM killer" in failure.message


@pytest.mark.parametrize(
    "files, count",
    [
        ({"cg/me/memory.events": "low 0\noom 3\noom_kill 2\n", "vmstat": "oom_kill 9\n"}, 2),
        ({"cg/memory.events": "oom_kill 5\n"}, 5),  # a container shows its own cgroup as the mount's root
        ({"vmstat": "pgfault 1\noom_kill 9\n"}, 9),
        ({}, None),
    ],
)
def test_kills_are_counted_where_this_process_is(files, count, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/me\n")
    (tmp_path / "self" / "mountinfo").write_text(f"30 1 0:26 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    assert limits.oom_kills(tmp_path) == count
