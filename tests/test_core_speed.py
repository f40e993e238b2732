"""A CUDA run keeps its core busy for a second, and its record says if the core slowed down afterwards."""

from __future__ import annotations

import pytest

from factories import make_record
from helpers import lab
from helpers.engine import core_speed
from helpers.engine.core_speed import BUSY_S, FULL_SPEED


def at(*speeds):
    (repeat,) = make_record(latencies=((1.0, 0.5),)).repeats
    return [repeat.model_copy(update={"core_speed": speed}) for speed in speeds]


def test_the_core_is_busy_for_a_second_and_its_fastest_loop_counts(monkeypatch):
    now_s, loops = [0.0], iter([0.3, 0.2, 0.4, 0.3, 0.3])

    def loop_s():
        now_s[0] += (took_s := next(loops))
        return took_s

    monkeypatch.setattr(core_speed, "loop_s", loop_s)
    monkeypatch.setattr(core_speed.time, "monotonic", lambda: now_s[0])
    assert core_speed.keep_busy() == 0.2
    assert now_s[0] >= BUSY_S


@pytest.mark.parametrize("speeds", [(0.58,), (0.58, 1.0, 0.61)])
def test_a_core_that_slowed_down_is_a_note(speeds):
    (note,) = lab._slow_core_notes(at(*speeds))
    assert ", ".join(f"{100 * speed:.0f}" for speed in speeds) + " %" in note


def test_full_speed_needs_no_note():
    assert not lab._slow_core_notes(at(FULL_SPEED)) and not lab._slow_core_notes(at(None))
