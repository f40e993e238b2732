"""Killed at any moment: what was measured is kept, running again does what is missing, nothing stays behind."""

from __future__ import annotations

import collections
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from factories import mini
from helpers import home, models, paths, results
from helpers.results import Log
from helpers.settings import Workload
from helpers.weights import store

SPLITS = ("100 0 100 0 100 0", "50 50 100 0 100 0", "50 0 100 0 100 0", "0 0 100 0 100 0")
WORK = Workload(gpu_batch_size=1, prompt_len=16, gen_len=3)
LIMIT_S = 120
SWEEP = f"""
import sys
sys.path[:0] = [{str(paths.ROOT)!r}, {str(Path(__file__).parents[1])!r}]
from factories import mini, quiet
from helpers import lab
from helpers.settings import Workload
work = Workload(gpu_batch_size={WORK.gpu_batch_size}, prompt_len={WORK.prompt_len}, gen_len={WORK.gen_len})
lab.run({{split: mini(split, work) for split in {SPLITS!r}}}, sys.argv[1], offload_root=sys.argv[2], say=quiet)
"""


def readable(log: Path) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torn line is said; here it may be there or not
        return list(Log(log))


def kill_after(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


def kill_and_go_on(command_line, tmp_path, moments):
    out, offload, home = tmp_path / "out", tmp_path / "offload", tmp_path / "home"
    log = out / results.LOG_NAME

    def start():
        return command_line.start(
            out,
            offload,
            program=("-c", SWEEP),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"OFFLOAD_LAB_HOME": str(home)},
        )

    kept: list = []
    for moment in moments:
        kill_after(start(), moment)
        command_line.wait_for_all_to_end()
        now = readable(log)
        assert now[: len(kept)] == kept, f"killed after {moment:.2f} s: what was measured before is not all there"
        kept = now
        if len(kept) == len(SPLITS):
            log.unlink()  # from the start again: there are moments left
            kept = []
    assert start().wait(timeout=120) == 0
    command_line.wait_for_all_to_end()
    records = readable(log)
    done = collections.Counter(str(record.settings.split) for record in records if record.status == "done")
    assert done == dict.fromkeys(SPLITS, 1), "each split once: none is missing, none was measured twice"
    assert records[: len(kept)] == kept
    assert os.listdir(offload) == []
    kept_weights = home / "weights" / "synthetic"
    assert not store.broken_files(kept_weights / "opt-mini-np", models.EMULATED_MODEL)
    assert sorted(os.listdir(kept_weights)) == [".opt-mini-np.lock", "opt-mini-np"]


def moments(seed: int, count: int) -> list[float]:
    """In the start, the weights and the first run rather often; up to the last run."""
    source = random.Random(seed)
    return [source.triangular(0.05, 7.0, 1.5) for _ in range(count)]


def test_the_program_is_killed_at_random_moments(command_line, tmp_path):
    kill_and_go_on(command_line, tmp_path, moments(seed=6, count=2))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_the_program_is_killed_at_many_random_moments(seed, command_line, tmp_path):
    kill_and_go_on(command_line, tmp_path, moments(seed, count=25))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_suite_is_killed_at_random_moments(command_line, tmp_path):
    """papermill, its kernel, the server and the worker: four processes deep."""
    source = random.Random(6)
    command = ("run", "q1", "--device", "emulated", "--output", tmp_path / "out")
    environment = {"OFFLOAD_LAB_HOME": str(tmp_path / "home")}
    kept: list = []
    for _ in range(8):
        process = command_line.start(*command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kill_after(process, source.uniform(0.5, 15))
        command_line.wait_for_all_to_end()
        now = readable(tmp_path / "out" / results.LOG_NAME)
        assert now[: len(kept)] == kept
        kept = [record for record in now]
    ended = command_line.run(*command, env=environment)
    assert ended.returncode == 0, ended.stderr
    command_line.wait_for_all_to_end()
    records = readable(tmp_path / "out" / results.LOG_NAME)
    done = collections.Counter(record.key for record in records if record.status == "done")
    assert len(done) == 5 and set(done.values()) == {1}
    assert os.listdir(tmp_path / "home" / "offload") == []
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    "end",
    [
        lambda program: os.killpg(program.pid, signal.SIGINT),  # Ctrl-C, as a terminal does: to all in the foreground
        pytest.param(lambda program: program.terminate(), marks=pytest.mark.long),
        pytest.param(
            lambda program: program.send_signal(signal.SIGHUP), marks=pytest.mark.long
        ),  # its terminal is closed
    ],
)
def test_a_suite_that_is_asked_to_end_says_so_and_keeps_what_was_measured(end, command_line, tmp_path):
    program = command_line.start("run", "q1", "--device", "emulated", "--output", tmp_path, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    while not readable(tmp_path / results.LOG_NAME):
        assert time.monotonic() < deadline and program.poll() is None
        time.sleep(0.1)
    end(program)
    _, said = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 1
    assert said.splitlines()[-1].startswith("interrupted; finished results are kept") and "Traceback" not in said
    assert readable(tmp_path / results.LOG_NAME)[0].status == "done"
    command_line.wait_for_all_to_end()


def test_an_impatient_ctrl_c_is_one_line_too(command_line, tmp_path):
    program = command_line.start(
        "measure",
        "--percent",
        "100",
        "0",
        "100",
        "0",
        "100",
        "0",
        "--device",
        "emulated",
        "--repeats",
        "1000",
        "--output",
        tmp_path,
        env={"OFFLOAD_LAB_HOME": str(tmp_path / "home")},
        start_new_session=True,
    )
    deadline = time.monotonic() + LIMIT_S
    while not list((tmp_path / "home" / "offload").glob("run-*")):
        assert time.monotonic() < deadline and program.poll() is None
        time.sleep(0.1)
    for _ in range(3):
        os.killpg(program.pid, signal.SIGINT)
        time.sleep(0.02)
    _, said = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 1
    assert said.splitlines()[-1].startswith("interrupted; finished results are kept") and "Traceback" not in said
    command_line.wait_for_all_to_end()


@pytest.mark.parametrize("after", ["tempfile.mkdtemp", "psutil.Process.create_time", "os.unlink"])
def test_killed_while_its_folder_is_made_or_removed(after, command_line, tmp_path):
    """The narrowest moments: whatever of a run's folder is there, the next run knows whose it was."""
    offload = tmp_path / "offload"
    module, name = after.rsplit(".", 1)
    script = f"""
import os, psutil, signal, tempfile, shutil
from pathlib import Path
from helpers import home
original, calls = {after}, []
def then_die(*arguments, **options):
    result = original(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
root = Path({str(offload)!r})
{"" if name == "unlink" else f"{module}.{name} = then_die"}
with home.run_folder(root) as folder:
    for number in range(3):
        (folder / str(number)).touch()
    {f"{module}.{name} = then_die" if name == "unlink" else "pass"}
"""
    command_line.run(program=("-c", script))
    assert len(home.remove_leftovers(offload)) == (name != "create_time")  # then there was none yet
    assert os.listdir(offload) == []


def test_a_leftover_of_someone_elses_is_left_alone(tmp_path):
    """Of another user's, another program's or another lab's folder nothing is touched."""
    offload = tmp_path / "offload"
    (offload / "precious").mkdir(parents=True)
    (offload / "run-without-owner").mkdir()
    (offload / "t_0").write_text("FlexGen's own, of a command typed by hand")
    from factories import done, run_one

    done(run_one(mini("0 0 100 0 100 0", WORK), tmp_path, offload_root=offload))
    assert sorted(os.listdir(offload)) == ["precious", "run-without-owner", "t_0"]
    shutil.rmtree(offload)


def test_nobody_waits_for_a_lock_of_the_dead(command_line, tmp_path):
    """Weights were being made when their maker was killed: the kernel has given the lock back."""
    environment = {"OFFLOAD_LAB_HOME": str(tmp_path / "home")}
    script = (
        "import sys; from helpers.weights import store, synthetic; import time\n"
        "synthetic.pieces = lambda *a: (print('in', flush=True), time.sleep(60))\nstore.prepare('opt-mini', str)"
    )
    maker = command_line.start(program=("-c", script), env=environment)
    assert maker.stdout.readline().strip() == "in"
    maker.kill()
    maker.communicate()
    began = time.monotonic()
    store.prepare("opt-mini", str, tmp_path / "home")
    assert time.monotonic() - began < 60
