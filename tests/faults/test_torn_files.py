"""Reports on a disk that fills up, or under a file size limit: the earlier files stay whole."""

from __future__ import annotations

import errno
import resource
import subprocess

import pytest

from helpers import paths
from helpers.report.comparison import REFERENCE


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_old_file_whole(small_disk):
    kept = paths.write_atomically(small_disk / "report.html", "the first one")
    with pytest.raises(OSError) as raised:
        paths.write_atomically(kept, b"x" * 2**20)
    assert raised.value.errno == errno.ENOSPC and str(kept) in str(raised.value)
    assert kept.read_text() == "the first one" and list(small_disk.iterdir()) == [kept]


def test_a_file_size_limit_leaves_the_report_whole(command_line, tmp_path):
    assert command_line.run("analyze", REFERENCE, "--output", tmp_path).returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, 200 * 1024))

    limited = command_line.run("analyze", REFERENCE, "--output", tmp_path, preexec_fn=limit)
    assert limited.returncode == 1 and "report.html" in limited.stderr
    assert len(limited.stderr.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
