"""A run keeps to cores that nobody else uses, if the machine has such; where it does not, its record says so."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from factories import make_record, mini
from helpers import lab
from helpers.engine import core_speed
from helpers.engine.core_speed import FULL_SPEED, PATIENCE_S, Core

FAST_S, SHARED_S = 0.003, 0.005


def at(*speeds):
    """Repeats whose cores had these speeds."""
    (repeat,) = make_record(latencies=((1.0, 0.5),)).repeats
    return [repeat.model_copy(update={"core_speed": speed}) for speed in speeds]


class Machine:
    """Cores with so many seconds a loop; a list is taken look by look, its last for ever. Loops move the clock."""

    def __init__(self, off=(), **cores):
        self.cores = {int(name.removeprefix("cpu")): list(seconds) for name, seconds in cores.items()}
        self.allowed, self.tried, self.now_s, self.off = set(self.cores), [], 0.0, set(off)

    def sched_getaffinity(self, pid):
        return self.allowed

    def sched_setaffinity(self, pid, cpus):
        self.now_s += 1e-6
        if not set(cpus) - self.off:
            raise OSError(errno.EINVAL, "Invalid argument")
        self.allowed = set(cpus)
        if len(self.allowed) == 1:
            self.tried += self.allowed

    def loop_s(self):
        left = self.cores[self.tried[-1]]
        took_s = left.pop(0) if len(left) > 1 else left[0]
        self.now_s += took_s
        return took_s


@pytest.fixture
def machine(monkeypatch):
    def stand_in(**cores):
        made = Machine(**cores)
        monkeypatch.setattr(core_speed, "loop_s", made.loop_s)
        monkeypatch.setattr(core_speed.time, "monotonic", lambda: made.now_s)
        for name in ("sched_getaffinity", "sched_setaffinity"):
            monkeypatch.setattr(core_speed.os, name, getattr(made, name))
        return made
    return stand_in


def test_it_keeps_to_the_cores_as_fast_as_the_fastest_seen_and_gives_the_others_back(machine):
    here = machine(cpu0=[FAST_S], cpu1=[FAST_S * 1.05], cpu2=[SHARED_S], cpu3=[SHARED_S])
    core = Core(FAST_S)
    with core.off_shared_cores():
        assert here.tried == [0, 1, 2, 3] and here.allowed == {0, 1}
    assert here.allowed == {0, 1, 2, 3} and core.fastest_loop_s == FAST_S


def test_with_nothing_known_the_fastest_is_the_measure(machine):
    here = machine(cpu0=[SHARED_S], cpu1=[FAST_S], cpu2=[SHARED_S])
    core = Core()
    with core.off_shared_cores():
        assert here.allowed == {1} and core.fastest_loop_s == FAST_S


def test_it_takes_the_fastest_there_are_when_others_use_them_all(machine):
    here = machine(cpu0=[SHARED_S], cpu1=[SHARED_S * 1.5], cpu2=[SHARED_S * 1.1])
    with Core(FAST_S).off_shared_cores():
        assert here.allowed == {0, 2}
        assert PATIENCE_S <= here.now_s < PATIENCE_S + 2 * SHARED_S
    assert here.allowed == {0, 1, 2}


def test_a_core_that_others_leave_is_taken(machine):
    here = machine(cpu0=[SHARED_S], cpu1=[SHARED_S] * 5 + [FAST_S])
    with Core(FAST_S).off_shared_cores():
        assert here.allowed == {1} and here.tried == 6 * [0, 1] + [1]


def test_of_very_many_it_sees_as_many_as_it_has_time_for_and_leaves_out_the_slow_of_these(machine):
    here = machine(**{f"cpu{n}": [FAST_S if n % 2 else SHARED_S] for n in range(1000)})
    with Core().off_shared_cores():
        slow = {cpu for cpu in here.tried if cpu % 2 == 0}
        assert 50 < len(here.tried) < 250 and here.allowed == set(range(1000)) - slow
        assert PATIENCE_S <= here.now_s < PATIENCE_S + 0.01
    assert len(here.allowed) == 1000


def test_a_machine_of_ones_own_is_left_as_it_is(machine):
    here = machine(**{f"cpu{n}": [FAST_S] for n in range(1000)})
    with Core(FAST_S).off_shared_cores():
        assert len(here.allowed) == 1000


@pytest.mark.parametrize("off, known", [({1}, {0, 1}), ({0, 1, 2}, {0, 1, 2}), ({0, 1}, {0, 1, 2})])
def test_a_core_that_is_switched_off_is_no_slow_one(machine, off, known):
    here = machine(off=off, cpu0=[FAST_S], cpu1=[FAST_S], cpu2=[SHARED_S])
    with Core(FAST_S).off_shared_cores():
        assert here.allowed == known
    assert here.allowed == {0, 1, 2}


def test_a_run_that_fails_gives_the_cores_back(machine):
    here = machine(cpu0=[FAST_S], cpu1=[SHARED_S])
    with pytest.raises(RuntimeError), Core().off_shared_cores():
        raise RuntimeError("CUDA out of memory")
    assert here.allowed == {0, 1}


def test_the_speed_is_that_of_the_slowest_look_and_a_search_is_none(machine):
    machine(cpu0=[SHARED_S], cpu1=[FAST_S, FAST_S, SHARED_S, FAST_S])
    core = Core(FAST_S)
    with core.off_shared_cores():  # which saw cpu0
        core.look()
        assert core.speed == 1.0
        core.look()
        core.look()
    assert core.speed == pytest.approx(FAST_S / SHARED_S)


def test_an_interrupted_search_gives_the_cores_back(machine, monkeypatch):
    here = machine(cpu0=[FAST_S], cpu1=[FAST_S])
    monkeypatch.setattr(core_speed, "loop_s", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), Core().off_shared_cores():
        pass
    assert here.allowed == {0, 1}


def test_a_sandbox_that_tells_no_cores_is_measured_as_it_is(monkeypatch):
    def refused(pid):
        raise PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(core_speed.os, "sched_getaffinity", refused)
    core = Core()
    with core.off_shared_cores():
        core.look()
    assert core.speed == 1.0


def test_a_real_thread_keeps_to_cores_of_its_own_machine():
    before, core = os.sched_getaffinity(0), Core()
    with core.off_shared_cores():
        kept = os.sched_getaffinity(0)
        core.look()
    assert kept <= before == os.sched_getaffinity(0) and 0 < core.speed <= 1


def test_torchs_threads_may_run_on_every_core_whatever_the_main_thread_is_kept_to():
    """FlexGen attends on the CPU with them, first in the measured window."""
    told = subprocess.run([sys.executable, "-c", """
import os, torch
from pathlib import Path
from helpers.engine import worker
torch.set_num_threads(4)
before = os.sched_getaffinity(0)
worker._start_torch_threads()
others = {int(task.name) for task in Path("/proc/self/task").iterdir()} - {os.getpid()}
os.sched_setaffinity(0, {min(before)})
torch.ones(64, 256, 256) @ torch.ones(64, 256, 256) + 1
after = {int(task.name) for task in Path("/proc/self/task").iterdir()} - {os.getpid()}
print(len(others), after == others, all(os.sched_getaffinity(task) == before for task in after))
"""], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    started, none_later, on_every_core = told.stdout.split()
    assert int(started) >= 3 and none_later == on_every_core == "True"


@pytest.mark.parametrize("speeds", [(0.58,), (0.58, 1.0, 0.61)])
def test_a_shared_core_is_a_note_of_the_record(speeds):
    (note,) = lab._slow_cores(mini(device="cuda"), at(*speeds))
    assert ", ".join(f"{100 * speed:.0f}" for speed in speeds) + " %" in note


def test_a_core_of_its_own_is_no_note_nor_one_that_plays_the_gpu():
    assert not lab._slow_cores(mini(device="cuda"), at(FULL_SPEED))
    assert not lab._slow_cores(mini(), at(0.5))
