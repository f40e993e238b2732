"""A run starts on a core of its own, if the machine has one; where it does not, its record says so."""

from __future__ import annotations

import itertools

import pytest

from factories import make_record, mini
from helpers import lab
from helpers.engine import core_speed
from helpers.engine.core_speed import FULL_SPEED, PATIENCE_S, Core

FAST_S, SHARED_S = 0.003, 0.005


@pytest.fixture
def cores(monkeypatch):
    """Cores that take these seconds a loop, one after the other, the last one for ever; and a clock that loops move."""
    def stand_in(*seconds):
        now, looks = [0.0], itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def loop_s():
            took_s = next(looks)
            now[0] += took_s
            return took_s

        monkeypatch.setattr(core_speed, "loop_s", loop_s)
        monkeypatch.setattr(core_speed.time, "monotonic", lambda: now[0])
        return now
    return stand_in


def at(*speeds):
    """Repeats whose cores had these speeds."""
    (repeat,) = make_record(latencies=((1.0, 0.5),)).repeats
    return [repeat.model_copy(update={"core_speed": speed}) for speed in speeds]


def test_it_goes_on_as_soon_as_the_core_is_as_fast_as_the_fastest_seen(cores):
    clock = cores(SHARED_S, SHARED_S, FAST_S * 1.05)
    core = Core(FAST_S)
    core.wait_for_full_speed()
    assert clock[0] == pytest.approx(2 * SHARED_S + 1.05 * FAST_S) and core.fastest_loop_s == FAST_S


def test_it_does_not_wait_for_ever(cores):
    clock = cores(SHARED_S)
    Core(FAST_S).wait_for_full_speed()
    assert PATIENCE_S <= clock[0] < PATIENCE_S + 2 * SHARED_S


def test_with_nothing_known_it_waits_as_long_as_a_better_core_takes_to_be_found(cores):
    clock = cores(SHARED_S, FAST_S)
    core = Core()
    core.wait_for_full_speed()
    assert clock[0] >= PATIENCE_S and core.fastest_loop_s == FAST_S


def test_the_speed_is_that_of_the_slowest_look_and_a_wait_is_no_look(cores):
    cores(SHARED_S, FAST_S, SHARED_S, FAST_S)
    core = Core(FAST_S)
    core.wait_for_full_speed()
    core.look()
    core.look()
    assert core.speed == pytest.approx(FAST_S / SHARED_S)


def test_a_real_core_is_seen_at_some_speed():
    core = Core()
    core.look()
    core.look()
    assert 0 < core.speed <= 1


@pytest.mark.parametrize("speeds", [(0.58,), (0.58, 1.0, 0.61)])
def test_a_shared_core_is_a_note_of_the_record(speeds):
    (note,) = lab._slow_cores(mini(device="cuda"), at(*speeds))
    assert ", ".join(f"{100 * speed:.0f}" for speed in speeds) + " %" in note


def test_a_core_of_its_own_is_no_note_nor_one_that_plays_the_gpu():
    assert not lab._slow_cores(mini(device="cuda"), at(FULL_SPEED))
    assert not lab._slow_cores(mini(), at(0.5))
