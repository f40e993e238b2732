"""The doctor: one line a check, in words that say what to do, and a verdict."""

from __future__ import annotations

import json
import shutil

import pytest

from helpers.__main__ import DONE, FAILED, main
from helpers.setup import doctor
from helpers.weights import store


@pytest.fixture
def checks(tmp_path):
    return {check.name: check for check in doctor.check(tmp_path / "offload", tmp_path / "out")}


def test_every_check_is_one_line_with_its_status(checks):
    assert {"GPU", "RAM", "disk", "packages", "iostat", "weights", "Q1", "Q2", "Q3", "Q4"} <= set(checks)
    for check in checks.values():
        assert "\n" not in str(check)
        assert str(check).startswith((f"[{check.status}]", f"[{check.status}] "))
        assert check.status in ("OK", "warn", "FAIL") and check.text


def test_looking_changes_nothing(tmp_path, checks):
    assert list(tmp_path.iterdir()) == []


def test_installed_packages_match_the_requirements(checks):
    assert checks["packages"].status == "OK" and "flexgen 0.1.8" in checks["packages"].text


def test_as_json_it_is_ready_unless_something_fails(checks):
    report = doctor.as_json(list(checks.values()))
    assert report["ready"] is (all(check.status != "FAIL" for check in checks.values()))
    assert [found["name"] for found in report["checks"]] == list(checks)
    failing = doctor.as_json([*checks.values(), doctor.Check("FAIL", "x", "y")])
    assert failing["ready"] is False


def test_memory_that_passes_for_a_disk_is_1_and_says_what_to_do(monkeypatch, capsys, folder_in_memory):
    monkeypatch.setenv("OFFLOAD_LAB_HOME", folder_in_memory)
    assert main(["doctor", "--json"]) == FAILED
    report = json.loads(capsys.readouterr().out)
    (disk,) = [check for check in report["checks"] if check["name"] == "disk"]
    assert report["ready"] is False and disk["status"] == "FAIL" and "OFFLOAD_LAB_HOME" in disk["text"]


def test_a_machine_that_is_ready_is_0_and_a_line_a_check(capsys):
    assert main(["doctor"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 6 and all(line.startswith("[") for line in lines)


def test_without_iostat_it_says_what_is_read_instead(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (check,) = [check for check in doctor.check(tmp_path, tmp_path) if check.name == "iostat"]
    assert check.status == "warn" and "/proc/diskstats" in check.text


def test_weights_that_a_disk_has_no_room_for_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.disks, "free_bytes", lambda path: 2**20)
    monkeypatch.setattr(store, "kept", lambda name: None)
    check = doctor._weights("cuda", tmp_path)
    assert check.status == "FAIL" and "opt-1.3b" in check.text
