"""Each badge opens its own notebook; one command stamps all badges and set-up cells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import nbformat
import pytest

from helpers import paths
from helpers.errors import Refused
from helpers.setup import badges

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def project(tmp_path):
    """A copy of the files that get stamped."""
    shutil.copy(paths.ROOT / "README.md", tmp_path)
    shutil.copytree(paths.ROOT / "notebooks", tmp_path / "notebooks")
    return tmp_path


def links(path):
    return links_in(path.read_text(encoding="utf-8"))


def links_in(text):
    return [(repository, file) for _, repository, _, file in badges.LINK.findall(text)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_one_badge_that_opens_it(path):
    ((repository, file),) = links(path)
    assert file == f"notebooks/{path.name}"
    head = nbformat.read(path, 4).cells[0].source
    assert badges.badge(repository, file) in head
    (in_cell,) = (found[1] for found in badges.CELL.findall(path.read_text(encoding="utf-8")))
    assert in_cell == repository, "the first cell clones the repository that the badge points to"


def test_the_readme_has_a_badge_for_every_notebook():
    files = [file for _, file in links(paths.ROOT / "README.md")]
    assert sorted(set(files)) == [f"notebooks/{path.name}" for path in NOTEBOOKS]


def test_every_badge_points_to_one_repository():
    assert len({repository for path in (paths.ROOT / "README.md", *NOTEBOOKS) for repository, _ in links(path)}) == 1


def test_an_unstamped_badge_points_to_no_possible_account():
    assert not re.fullmatch(badges.REPOSITORY, badges.UNSTAMPED)


def test_stamping_changes_the_repository_and_nothing_else(project):
    before = {path: path.read_text(encoding="utf-8") for path in project.rglob("*") if path.is_file()}
    changed = badges.stamp("somebody/their.lab", project)
    assert {path.name for path in changed} == {path.name for path in before}
    for path, text in before.items():
        stamped = path.read_text(encoding="utf-8")
        (was,) = {repository for repository, _ in links_in(text)}
        assert stamped.replace("somebody/their.lab", was) == text
        assert {repository for repository, _ in links(path)} == {"somebody/their.lab"}
        if path.suffix == ".ipynb":
            nbformat.validate(json.loads(stamped))


def test_stamping_twice_changes_nothing_the_second_time(project):
    assert badges.stamp("somebody/lab", project)
    assert badges.stamp("somebody/lab", project) == []


@pytest.mark.parametrize("wrong", ["", "lab", "a/b/c", "https://github.com/a/b", "a b/c", "-a/b", 'a/b"; import os'])
def test_a_wrong_repository_is_refused_and_nothing_changes(project, wrong):
    before = (project / "README.md").read_bytes()
    with pytest.raises(Refused, match="OWNER/NAME"):
        badges.stamp(wrong, project)
    assert (project / "README.md").read_bytes() == before


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/somebody/the-lab.git",
        "https://github.com/somebody/the-lab",
        "git@github.com:somebody/the-lab.git",
        "ssh://git@github.com/somebody/the-lab.git/",
        "https://token@github.com/somebody/the-lab",
    ],
)
def test_the_repository_is_that_of_the_git_remote(tmp_path, url):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", url], check=True)
    assert badges.from_remote(tmp_path) == "somebody/the-lab"


@pytest.mark.parametrize("url", [None, "/srv/git/lab.git", "https://gitlab.com/somebody/lab"])
def test_without_a_github_remote_the_command_asks_for_one(tmp_path, url):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if url:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", url], check=True)
    with pytest.raises(Refused, match="make badges REPO=owner/name"):
        badges.from_remote(tmp_path)
