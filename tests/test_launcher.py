"""Faults, caused for real: each is named, costs one run, leaves nothing running, and what was measured is kept."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from factories import at_phase, done, mini, quiet, run_one, workers
from helpers import lab, paths, results
from helpers.engine import worker
from helpers.results import Log
from helpers.settings import Workload
from helpers.weights import store

GONE_WITHIN_S = 20  # a bound, not a wait: what has to end is waited for
# Runs for many seconds on the emulated disk, unless something ends it.
LONG = mini("0 0 100 0 100 0", Workload(gpu_batch_size=1, prompt_len=16, gen_len=200))


@pytest.fixture
def root(lab_home, tmp_path):
    """An offload folder of this test's own, on a disk."""
    with tempfile.TemporaryDirectory(dir=lab_home) as folder:
        yield Path(folder)


def assert_nothing_is_left(root, processes=()):
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert alive == [] and list(root.iterdir()) == []


def kill(processes, how=signal.SIGKILL):
    for process in processes:
        process.send_signal(how)


def failed(record, kind):
    assert record.status == "failed" and record.failure.kind == kind, record.failure
    assert record.failure.message and "\n" not in record.failure.message
    return record


# ---- a process dies


def test_a_run_that_is_killed_is_a_record_and_the_next_one_runs(monkeypatch, tmp_path, root):
    seen = []
    at_phase(monkeypatch, "measured", lambda: (seen.extend(workers()), kill(workers())))
    killed = failed(run_one(LONG, tmp_path, offload_root=root), "killed")
    assert "SIGKILL" in killed.failure.message and killed.repeats == ()
    assert len(seen) == 1
    assert_nothing_is_left(root, seen)
    done(run_one(mini(), tmp_path, offload_root=root))
    assert [record.status for record in Log(tmp_path / results.LOG_NAME)] == ["failed", "done"]


@pytest.mark.parametrize("how, name", [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_is_named(monkeypatch, tmp_path, root, how, name):
    at_phase(monkeypatch, "measured", lambda: kill(workers(), how))
    assert name in failed(run_one(LONG, tmp_path, offload_root=root), "killed").failure.message


def test_a_dead_fork_server_fails_one_run_and_is_replaced(monkeypatch, tmp_path, root):
    seen = []

    def kill_server():
        seen.extend([*workers(), psutil.Process(forkserver._forkserver._forkserver_pid)])
        seen[-1].kill()

    at_phase(monkeypatch, "measured", kill_server)
    failed(run_one(LONG, tmp_path, offload_root=root), "killed")
    assert_nothing_is_left(root, seen[:1])
    done(run_one(mini(), tmp_path, offload_root=root))
    assert forkserver._forkserver._forkserver_pid != seen[-1].pid


def test_a_server_that_dies_between_runs_is_not_missed(tmp_path, root):
    done(run_one(mini(), tmp_path, offload_root=root))
    psutil.Process(forkserver._forkserver._forkserver_pid).kill()
    done(run_one(mini("50 50 100 0 100 0"), tmp_path, offload_root=root))


def test_a_run_has_the_environment_of_who_asks_for_it(monkeypatch, tmp_path):
    """Such as a CUDA_VISIBLE_DEVICES that was set after the first run."""
    monkeypatch.setattr(worker, "_run", lambda job, pipe: pipe.send(dict(os.environ)))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    environment = {"CUDA_VISIBLE_DEVICES": "1", "ODD": "\udcff"}
    job = types.SimpleNamespace(environment=environment, log_path=tmp_path / "log")
    process = multiprocessing.get_context("fork").Process(target=worker.main, args=(job, theirs))
    process.start()
    assert ours.poll(GONE_WITHIN_S) and ours.recv() == environment
    process.join()


@pytest.mark.long
def test_a_repeat_that_stood_still_is_noted_and_measured_again(monkeypatch, tmp_path, root):
    """SIGSTOP for 1.5 s in the measured window of the first try."""
    stopped = []

    def stop_once():
        if not stopped:
            stopped.extend(workers())
            kill(stopped, signal.SIGSTOP)
            threading.Timer(1.5, kill, (stopped, signal.SIGCONT)).start()

    at_phase(monkeypatch, "measured", stop_once)
    record = done(run_one(LONG.model_copy(update={"repeats": 1}), tmp_path, offload_root=root))
    assert len(record.repeats) == record.settings.repeats
    assert any("measured again" in note for note in record.samples.notes)


# ---- a run takes too long


def test_a_run_that_hangs_is_ended_at_its_limit(monkeypatch, tmp_path, root):
    seen = []
    at_phase(monkeypatch, "measured", lambda: (seen.extend(workers()), kill(workers(), signal.SIGSTOP)))
    record = failed(run_one(LONG, tmp_path, offload_root=root, limit_s=3), "timeout")
    assert "phase 'measured'" in record.failure.message
    assert len(seen) == 1
    assert_nothing_is_left(root, seen)


def test_a_limit_that_ends_before_a_run_begins_is_a_timeout(tmp_path, root):
    failed(run_one(mini(), tmp_path, offload_root=root, limit_s=0), "timeout")
    assert workers() == []
    assert_nothing_is_left(root)


# ---- what was measured before


def test_repeats_before_a_failure_are_kept(monkeypatch, tmp_path, root):
    at_phase(monkeypatch, "measured", lambda: kill(workers()), occurrence=3)
    record = failed(run_one(mini(repeats=4), tmp_path, offload_root=root), "killed")
    assert len(record.repeats) == 2 and record.total_throughput_tok_s > 0
    (kept,) = Log(tmp_path / results.LOG_NAME)
    assert kept == record


def test_repeats_before_an_interrupt_are_kept(monkeypatch, tmp_path, root):
    seen = []

    def interrupt():
        seen.extend(workers())
        os.kill(os.getpid(), signal.SIGINT)

    at_phase(monkeypatch, "measured", interrupt, occurrence=2)
    with pytest.raises(KeyboardInterrupt):
        run_one(mini(repeats=3), tmp_path, offload_root=root)
    (record,) = Log(tmp_path / results.LOG_NAME)
    assert len(done(record).repeats) == 1 and "interrupted after 1 of 3 repeats" in record.notes
    assert len(seen) == 1
    assert_nothing_is_left(root, seen)


# ---- files go wrong during a run


def offload_files(root):
    return [file for file in root.glob("run-*/offload/*") if file.is_file()]


def test_an_error_in_a_copy_thread_ends_the_run_with_that_error(monkeypatch, tmp_path, root):
    """FlexGen's copy threads die silently, and the run waits for them for ever."""
    at_phase(monkeypatch, "measured", lambda: [file.unlink() for file in offload_files(root)])
    record = failed(run_one(LONG, tmp_path, offload_root=root, limit_s=60), "error")
    assert "FileNotFoundError" in record.failure.message
    assert "copy_worker_func" in record.failure.log_tail and "Traceback" in record.failure.log_tail
    assert_nothing_is_left(root)


def test_weights_damaged_during_a_run_are_repaired_for_the_next(monkeypatch, tmp_path, root):
    folder = store.prepare("opt-mini", quiet).path / "opt-mini-np"

    def damage():
        for file in folder.glob("decoder.layers.*.fc1.weight"):
            os.truncate(file, 100)

    at_phase(monkeypatch, "measured", damage)
    record = run_one(LONG, tmp_path, offload_root=root, limit_s=60)
    assert record.failure.kind in ("error", "killed")  # a map cut off under a read is a signal
    assert_nothing_is_left(root)
    said = []
    settings = {"a": mini("0 100 100 0 100 0"), "b": mini()}
    sweep = lab.run(settings, tmp_path, offload_root=root, say=said.append)
    assert any("fc1.weight" in text for text in said)
    assert done(sweep.records["a"]).generated_tokens == done(sweep.records["b"]).generated_tokens


def test_a_weight_broken_between_two_runs_is_made_again(monkeypatch, tmp_path, root):
    file = store.prepare("opt-mini", quiet).path / "opt-mini-np" / "decoder.layers.1.fc2.weight"
    before, said = file.read_bytes(), []
    at_phase(monkeypatch, "end", lambda: file.write_bytes(before[:-2]))
    settings = {"first": mini(), "second": mini("0 100 100 0 100 0")}
    sweep = lab.run(settings, tmp_path, offload_root=root, say=said.append)
    assert [done(record).status for record in sweep.records.values()] == ["done", "done"]
    assert file.read_bytes() == before and any("fc2.weight" in text for text in said)


# ---- the disk is full


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 MiB of its own, where this process may mount one."""
    image, mount = tmp_path / "image", tmp_path / "small"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    for command in (["mke2fs", "-q", "-F", "-t", "ext4", image], ["mount", "-o", "loop", image, mount]):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{command[0]} is not there or not permitted")
    yield mount
    subprocess.run(["umount", mount], check=True)


def fill(folder, leave):
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(b"x" * max(free - leave, 0))


def test_a_disk_too_full_for_the_weights_is_named(small_disk, tmp_path):
    fill(small_disk, leave=2 << 20)  # the run's log is there too
    record = failed(run_one(mini("0 0 100 0 100 0"), tmp_path, offload_root=small_disk / "offload"), "disk_full")
    assert record.repeats == () and not (small_disk / "offload").exists()
    done(run_one(mini(), tmp_path, offload_root=small_disk / "offload"))  # needs none of it


def test_a_disk_that_fills_up_during_a_run_is_named(small_disk, tmp_path):
    """The KV cache's files have their size at once and take their blocks as they are written: the write is a signal."""
    fill(small_disk, leave=1 << 20)
    work = Workload(gpu_batch_size=8, prompt_len=200, gen_len=2)  # 3.3 MB of KV cache
    record = failed(run_one(mini("100 0 0 0 100 0", work), tmp_path, offload_root=small_disk / "offload"), "disk_full")
    assert str(small_disk) in record.failure.message and not (small_disk / "offload").exists()


# ---- folders of runs


def test_two_runs_at_once_have_each_their_own_files(tmp_path, root):
    """One offload folder, two programs: FlexGen names its files t_0, t_1, ... in both."""
    script = program(tmp_path, root, {"run": "40 40 100 0 100 0"}, gen_len=4)
    both = [subprocess.Popen([sys.executable, script, tmp_path / name]) for name in ("one", "two")]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    one, two = ([*Log(tmp_path / name / results.LOG_NAME)] for name in ("one", "two"))
    assert done(one[0]).generated_tokens == done(two[0]).generated_tokens != ()
    assert_nothing_is_left(root)


# ---- the program that runs them ends


def program(tmp_path, root, percents, gen_len):
    """A script that runs these splits, into the folder it is given, and says which phase it is in."""
    path = tmp_path / "sweep.py"
    path.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(paths.ROOT)!r}, {str(Path(__file__).parent)!r}]
        from factories import mini, quiet
        from helpers import lab
        from helpers.engine import launcher
        from helpers.settings import Workload

        original = launcher.run
        def run(*arguments, on_phase, **options):
            return original(*arguments, on_phase=lambda name: print(name, flush=True), **options)
        launcher.run = run
        work = Workload(gpu_batch_size=1, prompt_len=16, gen_len={gen_len})
        runs = {{name: mini(percent, work) for name, percent in {percents!r}.items()}}
        lab.run(runs, sys.argv[1], offload_root={str(root)!r}, say=quiet)
    """)
    )
    return path


@pytest.fixture
def sweep(tmp_path, root):
    """A program in the middle of the second of two runs, with all of its processes."""
    script = program(tmp_path, root, {"short": "100 0 100 0 100 0", "long": "0 0 100 0 100 0"}, gen_len=60)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "out"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    measured = 0
    while measured < 2:
        line = process.stdout.readline()
        assert line, "the program ended early"
        measured += line.strip() == "measured"
    process.children = psutil.Process(process.pid).children(recursive=True)
    assert any("forkserver" in " ".join(child.cmdline()) for child in process.children)
    yield process
    kill([child for child in process.children if child.is_running()])
    process.kill()
    process.wait()
    process.stdout.close()


def test_an_interrupted_sweep_leaves_nothing_running_and_goes_on_from_there(sweep, tmp_path, root):
    os.killpg(sweep.pid, signal.SIGINT)  # as Ctrl-C in a terminal does: to all that is in the foreground
    assert sweep.wait(timeout=GONE_WITHIN_S) != 0
    assert_nothing_is_left(root, sweep.children)
    first, second = Log(tmp_path / "out" / results.LOG_NAME)
    done(first)
    failed(second, "interrupted")
    work = Workload(gpu_batch_size=1, prompt_len=16, gen_len=60)
    again = lab.run(
        {"short": mini(workload=work), "other": mini("50 50 100 0 100 0")},
        tmp_path / "out",
        offload_root=root,
        say=quiet,
    )
    assert again.records["short"] == first  # known: not measured again
    done(again.records["other"])


def test_a_killed_program_takes_its_run_along_and_the_next_clears_up(sweep, tmp_path, root):
    sweep.kill()
    sweep.wait()
    _, alive = psutil.wait_procs(sweep.children, timeout=GONE_WITHIN_S)
    assert alive == []
    assert len(list(root.glob("run-*"))) == 1  # nobody was there to remove it
    (first,) = Log(tmp_path / "out" / results.LOG_NAME)
    done(first)
    done(run_one(mini("50 50 100 0 100 0"), tmp_path, offload_root=root))
    assert_nothing_is_left(root)
