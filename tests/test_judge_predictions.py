"""Predictions against the kept references: how far off they are, and that the documents say so."""

import statistics
import sys

import pytest

from helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import judge_predictions

JUDGED = judge_predictions.references()


@pytest.mark.parametrize(
    "machine, mean, largest", [("t4-colab", 0.10, 0.25), ("t4-gcp", 0.12, 0.25), ("H200, machine 6", 0.10, 0.35)]
)
def test_errors_stay_small(machine, mean, largest):
    errors = [abs(one.error) for one in JUDGED[machine]]
    assert statistics.fmean(errors) <= mean
    assert max(errors) <= largest


@pytest.mark.parametrize("machine", JUDGED)
def test_bounds_and_ranges_hold_for_every_run(machine):
    assert all(one.within_bounds for one in JUDGED[machine])
    assert all(one.peaks_within_range for one in JUDGED[machine])


def test_the_documents_have_the_table_as_it_is_now():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(judge_predictions.summary(JUDGED) in file.read_text(encoding="utf-8") for file in documents)
