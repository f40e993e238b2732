"""A run waits a moment for a core that nobody else uses; where there is none, its record says so."""

from __future__ import annotations

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


class Clock:
    """A core with so many seconds a loop, look by look, the last for ever; loops move the clock."""

    def __init__(self, *seconds):
        self.left, self.now_s = list(seconds), 0.0

    def loop_s(self):
        took_s = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        self.now_s += took_s
        return took_s


@pytest.fixture
def core_with(monkeypatch):
    def stand_in(*seconds):
        made = Clock(*seconds)
        monkeypatch.setattr(core_speed, "loop_s", made.loop_s)
        monkeypatch.setattr(core_speed.time, "monotonic", lambda: made.now_s)
        return made

    return stand_in


@pytest.mark.parametrize(
    "seconds, looks",
    [((FAST_S,), 1), ((FAST_S * 1.1,), 1), ((SHARED_S, FAST_S), 2), ((SHARED_S, SHARED_S, FAST_S * 0.9), 3)],
)
def test_it_is_busy_until_the_core_is_as_fast_as_the_fastest_seen(core_with, seconds, looks):
    here, core = core_with(*seconds), Core(FAST_S)
    core.wait_for_full_speed()
    assert here.now_s == pytest.approx(sum(seconds)) and len(seconds) == looks
    assert core.fastest_loop_s == min(FAST_S, *seconds)


def test_with_nothing_known_it_looks_for_all_of_the_while(core_with):
    here, core = core_with(SHARED_S, SHARED_S, FAST_S, SHARED_S), Core()
    core.wait_for_full_speed()
    assert PATIENCE_S <= here.now_s < PATIENCE_S + 2 * SHARED_S and core.fastest_loop_s == FAST_S


def test_where_others_use_every_core_it_goes_on_after_a_while(core_with):
    here = core_with(SHARED_S)
    Core(FAST_S).wait_for_full_speed()
    assert PATIENCE_S <= here.now_s < PATIENCE_S + 2 * SHARED_S


def test_the_speed_is_that_of_the_slowest_look_and_waiting_is_none(core_with):
    core_with(SHARED_S, FAST_S, FAST_S, SHARED_S, FAST_S)
    core = Core(FAST_S)
    core.wait_for_full_speed()
    core.look()
    assert core.speed == 1.0
    core.look()
    core.look()
    assert core.speed == pytest.approx(FAST_S / SHARED_S)


def test_a_real_core_has_a_speed():
    core = Core()
    core.wait_for_full_speed()
    core.look()
    assert 0 < core.speed <= 1


@pytest.mark.parametrize("speeds", [(0.58,), (0.58, 1.0, 0.61)])
def test_a_shared_core_is_a_note_of_the_record(speeds):
    (note,) = lab._slow_cores(mini(device="cuda"), at(*speeds))
    assert ", ".join(f"{100 * speed:.0f}" for speed in speeds) + " %" in note


def test_a_core_of_its_own_is_no_note_nor_one_that_plays_the_gpu():
    assert not lab._slow_cores(mini(device="cuda"), at(FULL_SPEED))
    assert not lab._slow_cores(mini(), at(0.5))
