"""Folders that cannot be written, file systems that are no disk: refused first, or a record with one clear sentence."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading

import pytest

from factories import mini, quiet
from helpers import lab, paths, results
from helpers.errors import Refused
from helpers.machine import disks
from helpers.results import Log
from helpers.setup import doctor

MEASURE = (
    "measure",
    "--device",
    "emulated",
    "--percent",
    "0",
    "0",
    "100",
    "0",
    "100",
    "0",
    "--prompt-len",
    "16",
    "--gen-len",
    "2",
    "--gpu-batch-size",
    "1",
    "--repeats",
    "1",
    "--json",
)
REFUSED = 2


def assert_refused(ended: subprocess.CompletedProcess, *words: str) -> None:
    assert ended.returncode == REFUSED and ended.stdout == "", ended
    assert ended.stderr.startswith("refused: ") and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr, ended.stderr


@pytest.fixture
def read_only(tmp_path):
    """A folder on a file system that is mounted read-only: root too cannot write there."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    (folder / "old").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", folder], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_read_only_output_folder(read_only, command_line):
    assert_refused(command_line.run(*MEASURE, "--output", read_only / "out"), str(read_only), "cannot be written")


def test_a_read_only_offload_folder(read_only, command_line, tmp_path):
    ended = command_line.run(*MEASURE, "--output", tmp_path / "out", "--offload-dir", read_only / "offload")
    assert_refused(ended, "offload folder", str(read_only), "cannot be written")
    assert not (tmp_path / "out").exists()


def test_a_read_only_home(read_only, command_line, tmp_path):
    ended = command_line.run(*MEASURE, "--output", tmp_path / "out", env={"OFFLOAD_LAB_HOME": str(read_only / "home")})
    assert_refused(ended, "OFFLOAD_LAB_HOME", str(read_only))


def test_a_read_only_folder_for_a_report(read_only, command_line):
    from helpers.report.comparison import REFERENCE

    assert_refused(command_line.run("analyze", REFERENCE, "--output", read_only / "out"), str(read_only))


@pytest.mark.parametrize("make", [os.mkdir, lambda path: path.symlink_to(path)], ids=["folder", "loop"])
def test_a_log_that_is_no_file(make, command_line, tmp_path):
    make(tmp_path / results.LOG_NAME)
    assert_refused(command_line.run(*MEASURE, "--output", tmp_path), results.LOG_NAME)


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can become someone else")
def test_someone_elses_folders(tmp_path):
    """As a user who may neither write the output folder, nor read the log in it, nor write the offload folder."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    become = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
    packages = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{paths.ROOT}{os.pathsep}{sysconfig.get_path('purelib')}"}
    again = "import pydantic, psutil, subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', '']))"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/{version}"):  # the first may be in a folder of root's own
        tried = subprocess.run([*become, "sh", "-c", '"$0" -c "$1"', python, again], cwd="/", env=packages)
        if tried.returncode == 0:
            break
    else:
        pytest.skip("another user cannot use this Python")
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir(mode=0o755)
    mine.mkdir()
    os.chown(mine, 65534, 65534)
    (mine / results.LOG_NAME).write_text("")
    (mine / results.LOG_NAME).chmod(0o600)  # root's

    def measure(*arguments):
        return subprocess.run(
            [*become, python, "-m", "helpers", *MEASURE, *arguments],
            cwd="/",
            env=packages | {"HOME": str(mine)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert_refused(measure("--output", theirs / "out"), str(theirs), "cannot be written")
    assert_refused(measure("--output", mine), results.LOG_NAME, "cannot be read")
    assert_refused(measure("--output", mine / "new", "--offload-dir", theirs), "offload folder", str(theirs))
    assert os.listdir(theirs) == [] and sorted(os.listdir(mine)) == [results.LOG_NAME]


# ---- FUSE, as Google Drive's is


class EmptyFuse:
    """An empty FUSE file system in which nothing can be made: the kernel's protocol (fuse.h), answered here."""

    IN, OUT = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")  # fuse_in_header, fuse_out_header
    GETATTR, STATFS, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS = 3, 17, 26, 27, 28, 29, 34
    NO_ANSWER = (2, 42)  # FORGET, BATCH_FORGET

    def __init__(self, folder) -> None:
        self.folder = folder
        self.device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"empty", os.fsencode(folder), b"fuse", 0, options):
            os.close(self.device)
            raise OSError(ctypes.get_errno(), "mount")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        attributes = struct.pack("=QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
        answers = {
            # 7.31, then: readahead, flags, background requests, largest write and the rest of fuse_init_out
            self.INIT: struct.pack("=IIIIHHIIHHI28x", 7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0, 0),
            self.GETATTR: struct.pack("=QII", 1, 0, 0) + attributes,
            self.STATFS: struct.pack("=QQQQQIIII24x", 1 << 30, 1 << 30, 1 << 30, 1 << 20, 1 << 20, 4096, 255, 4096, 0),
            self.OPENDIR: struct.pack("=QII", 1, 0, 0),
            self.READDIR: b"",
            self.RELEASEDIR: b"",
            self.ACCESS: b"",
        }
        while True:
            try:
                request = os.read(self.device, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, opcode, unique, *_ = self.IN.unpack_from(request)
            if opcode in self.NO_ANSWER:
                continue
            body = answers.get(opcode)
            error = 0 if body is not None else -(errno.ENOENT if opcode == 1 else errno.ENOSYS)
            body = body or b""
            os.write(self.device, self.OUT.pack(self.OUT.size + len(body), error, unique) + body)

    def close(self) -> None:
        subprocess.run(["umount", "-l", self.folder], check=True)
        os.close(self.device)


@pytest.fixture
def fuse(tmp_path):
    folder = tmp_path / "drive"
    folder.mkdir()
    try:
        mounted = EmptyFuse(folder)
    except OSError as error:
        pytest.skip(f"no FUSE here ({error})")
    yield folder
    mounted.close()


def test_a_fuse_file_system_is_known_as_one(fuse):
    disk = disks.disk_of(fuse / "offload")
    assert disk.is_network and disk.device is None and disk.filesystem == "fuse"


def test_a_fuse_offload_folder_that_cannot_be_written_is_refused(fuse, command_line, tmp_path):
    ended = command_line.run(*MEASURE, "--output", tmp_path / "out", "--offload-dir", fuse / "offload")
    assert_refused(ended, "offload folder", str(fuse), "Function not implemented")


def test_offload_files_on_fuse_are_noted(fuse):
    notes = lab._check(mini("0 0 100 0 100 0"), lab.describe_machine("emulated"), fuse / "offload")
    assert any("FUSE" in note and str(fuse) in note for note in notes)
    assert not lab._check(mini(), lab.describe_machine("emulated"), fuse / "offload")  # nothing goes there


def test_doctor_warns_of_fuse_and_an_unwritable_mount(fuse, monkeypatch):
    (check,) = [check for check in doctor.check(offload_root=fuse) if check.name == "disk"]
    assert check.status == "FAIL" and "Function not implemented" in check.text
    monkeypatch.setattr(doctor.paths, "try_out", lambda *_: None)
    (check,) = [check for check in doctor.check(offload_root=fuse) if check.name == "disk"]
    assert check.status == "warn" and "FUSE" in check.text


# ---- the log's disk fills up


def test_an_unwritable_record_is_reported_and_earlier_ones_kept(tmp_path, command_line):
    """The output folder's disk fills up between two runs: one sentence, and no half record counts."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        first = command_line.run(*MEASURE, "--output", small)
        assert first.returncode == 0, first.stderr
        (small / "filler").write_bytes(b"x" * (shutil.disk_usage(small).free))
        second = command_line.run(*MEASURE, "--fresh", "--output", small)
        assert second.returncode == 1 and "Traceback" not in second.stderr, second.stderr
        assert "failed: " in second.stderr and "could not be recorded" in second.stderr
        os.remove(small / "filler")
        third = command_line.run(*MEASURE, "--output", small)
        assert third.returncode == 0 and json.loads(third.stdout)["status"] == "done"
        assert [record.status for record in Log(small / results.LOG_NAME)] == ["done"]
    finally:
        subprocess.run(["umount", small], check=True)


def test_refused_is_what_a_notebook_gets_too(read_only):
    with pytest.raises(Refused, match="cannot be written"):
        lab.run(mini(), read_only / "out", say=quiet)
