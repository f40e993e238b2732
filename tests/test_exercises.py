"""Exercises: right, wrong or not answered yet; and the figures that they ask for, from independent arithmetic."""

from __future__ import annotations

import pytest

from helpers import exercises, homework, models

RUN = homework.plan("q1", "cuda")["q1-1"]


@pytest.mark.parametrize(
    "answer, mark", [(..., "✏️"), (None, "✏️"), (10, "✅"), (10.4, "✅"), (11, "❌"), ("ten", "❌"), (True, "❌")]
)
def test_an_answer_is_right_wrong_or_still_open(answer, mark):
    assert exercises.check(answer, 10.0).text.startswith(mark)


@pytest.mark.parametrize("guess, said", [(10, "Spot on"), (13, "Close"), (100, "factor of 10"), (1, "factor of 10")])
def test_a_guess_hears_how_far_off_it_was(guess, said):
    assert said in exercises.how_far_off(guess, 10.0).text


@pytest.mark.parametrize("guess", [..., None, 0, -3, "many"])
def test_without_a_usable_guess_the_figure_is_still_shown(guess):
    assert "10" in exercises.how_far_off(guess, 10.0).text


def test_without_a_figure_a_guess_is_no_error():
    assert exercises.how_far_off(3, None).text


def test_the_figures_that_exercises_ask_for():
    model = models.resolve("opt-1.3b")
    assert exercises.percent_on_gpu(RUN, "20 80 100 0 100 0") == pytest.approx(7.4, abs=0.05)
    assert exercises.gib_per_pass(RUN, homework.DISK, "disk") == pytest.approx(2.643, abs=0.001)
    assert exercises.kv_cache_mib(RUN) == 2 * model.num_layers * 144 * model.hidden_size * 2 / 2**20
    assert 3.5 < exercises.size_ratio_of_4bit(RUN) < 128 / 36
    assert 180 < exercises.largest_batch(RUN, 8) < 8 * 1024 / exercises.kv_cache_mib(RUN)
