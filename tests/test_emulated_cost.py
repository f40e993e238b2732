"""What an emulated run takes is known before it starts, and too much of it is refused."""

from __future__ import annotations

import pytest

from factories import mini, run_one
from helpers import homework
from helpers.engine import emulated_cost, launcher
from helpers.engine.emulated_cost import check, cost
from helpers.errors import Refused
from helpers.machine.limits import MemoryAllowance
from helpers.units import GIB

PLENTY = MemoryAllowance(10**15, 10**15, "RAM", "RAM")


def every_run():
    return {name: run for question in homework.QUESTIONS for name, run in homework.plan(question, "emulated").items()}


@pytest.mark.parametrize("name, run", every_run().items())
def test_the_homework_is_quick_and_small(name, run):
    found = cost(run, weights_are_kept=False)
    assert found.measured_s < found.seconds < 30 and found.written_gib < 0.1 and found.host_gib < 1
    check(run, False, PLENTY, allow_long=False)


@pytest.mark.parametrize("percent", ["0 50 100 0 100 0", "0 0 100 0 100 0"])
def test_a_large_model_is_refused_unless_allowed(percent, monkeypatch):
    monkeypatch.setattr(emulated_cost, "LONGEST_S", 300.0)
    settings = mini(percent, model="opt-30b")
    with pytest.raises(Refused, match=r"opt-30b .* about \d+ h .* write 5\d\.\d GiB .*--allow-long"):
        check(settings, False, PLENTY, allow_long=False)
    check(settings, False, PLENTY, allow_long=True)


def test_a_run_beyond_ram_is_always_refused():
    settings = mini(model="opt-6.7b")
    with pytest.raises(Refused, match="8.0 GiB are free"):
        check(settings, True, MemoryAllowance(8 * GIB, 8 * GIB, "RAM", "RAM"), allow_long=True)


def test_a_refused_run_starts_nothing_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "warm_server", lambda: pytest.fail("a server was started"))
    record = run_one(mini("0 50 100 0 100 0", model="opt-30b"), tmp_path, allow_long=False)
    assert record.failure.kind == "refused" and "opt-30b" in record.failure.message
