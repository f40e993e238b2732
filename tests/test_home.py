"""The lab's folder, its locks, and run folders that outlive nobody."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from helpers import home
from helpers.errors import Refused


def test_home_falls_back_to_the_cache_then_to_tmp(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFLOAD_LAB_HOME", str(tmp_path / "a" / "b"))
    assert home.home() == tmp_path / "a" / "b"
    monkeypatch.delenv("OFFLOAD_LAB_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home.home() == tmp_path / "cache" / "offload-lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert home.home() == tmp_path / "me" / ".cache" / "offload-lab"
    (tmp_path / "me").touch()  # nothing can be made below a file
    assert home.home().parent == Path(tempfile.gettempdir()) and str(os.getuid()) in home.home().name
    assert not (tmp_path / "a").exists() and not (tmp_path / "cache").exists()


def owned_by(tmp_path, pid, created, name, where=None):
    folder = tmp_path / f"run-{pid}-{created:.0f}-{where or home.whereabouts()}-{name}"
    (folder / "offload").mkdir(parents=True)
    return folder


def test_only_what_dead_runs_left_is_removed(tmp_path):
    me = psutil.Process()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = owned_by(tmp_path, me.pid, me.create_time(), "mine")
    clock_was_set = owned_by(tmp_path, me.pid, me.create_time() + 1, "clock")
    left = owned_by(tmp_path, ended.pid, time.time(), "left")
    reused = owned_by(tmp_path, me.pid, me.create_time() - 3600, "reused")  # this id was another process's
    half_removed = owned_by(tmp_path, ended.pid, time.time(), "half")
    (half_removed / "offload").rmdir()
    elsewhere = owned_by(tmp_path, ended.pid, time.time(), "container", where="0123abcd")  # its ids are not ours
    others, unnamed = tmp_path / "something", tmp_path / "run-of-someones"
    others.mkdir()
    unnamed.mkdir()
    assert set(home.remove_leftovers(tmp_path)) == {left, reused, half_removed}
    assert set(tmp_path.iterdir()) == {mine, clock_was_set, elsewhere, others, unnamed}


def test_a_folder_that_cannot_be_listed_has_no_leftovers(tmp_path):
    (tmp_path / "file").touch()
    assert home.remove_leftovers(tmp_path / "nowhere") == home.remove_leftovers(tmp_path / "file") == []


@pytest.fixture
def private(tmp_path, monkeypatch):
    """The folder in the temporary folder that stands in for a cache that can't be written."""
    monkeypatch.delenv("OFFLOAD_LAB_HOME", raising=False)
    (tmp_path / "me").touch()  # nothing can be made below a file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "me"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"offload-lab-{os.getuid()}"


def test_the_temporary_home_is_private(private):
    assert home.home() == home.home() == private
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["a link", "open to others", "another user's", "a file"])
def test_a_temporary_home_that_others_control_is_refused(private, tmp_path, trap):
    (tmp_path / "victim").mkdir(mode=0o700)
    if trap == "a link":
        private.symlink_to(tmp_path / "victim")
    elif trap == "a file":
        private.touch()
    else:
        private.mkdir(mode=0o700)
        if trap == "open to others":
            private.chmod(0o777)
        elif os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        else:
            os.chown(private, 12345, 12345)
    with pytest.raises(Refused, match=private.name):
        home.home()


def test_a_lock_neither_follows_a_link_nor_empties_a_file(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(OSError), home.locked(link, when_taken=lambda: None):
        pass
    with home.locked(victim, when_taken=lambda: None):
        pass
    assert victim.read_text() == "precious"
