"""Truth under disturbance: others on the disk are noticed, and a clock that jumps spoils no duration."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time

import pytest

from factories import done, mini, run_one
from helpers import home, paths, results
from helpers.machine import disks
from helpers.results import Log
from helpers.settings import Workload

BLOCK = 4 << 20


class OtherReader:
    """Reads a file of its own past the page cache, again and again, from when it is entered."""

    def __init__(self, path) -> None:
        self.path, self.stopping, self.read_bytes = path, threading.Event(), 0
        path.write_bytes(os.urandom(16 * BLOCK))
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def _read(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK) as buffer:
            while not self.stopping.is_set():
                for block in range(16):
                    self.read_bytes += os.preadv(descriptor, [buffer], block * BLOCK)
        os.close(descriptor)

    def __enter__(self):
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stopping.set()
        self.thread.join()


LONG_ENOUGH = Workload(gpu_batch_size=1, prompt_len=16, gen_len=6)  # 6 passes of 4 MB from a disk of 12.5 MB/s


def named_as_readers(record) -> list[str]:
    return [note for note in record.samples.notes if "by something other than this run" in note]


@pytest.mark.paced
def test_another_reader_of_the_same_disk_is_on_the_record(tmp_path, lab_home):
    device = disks.disk_of(home.home()).device
    if device is None or disks.disk_of(tmp_path).device != device:
        pytest.skip("no disk that counts its reads")
    settings = mini("0 0 100 0 100 0", LONG_ENOUGH)
    try:
        reader = OtherReader(tmp_path / "others")
        with reader:
            disturbed = done(run_one(settings, tmp_path / "disturbed"))
    except OSError as error:
        pytest.skip(f"no O_DIRECT here ({error})")
    if disturbed.samples.disk is None or reader.read_bytes < 512 << 20:
        pytest.skip("this disk is too slow, or counts nothing")
    (note,) = named_as_readers(disturbed)
    assert f"from {device}" in note
    assert disturbed.samples.disk.idle_read_kib_per_s > 1024  # seen before the run too
    from helpers.analysis import readers
    from helpers.report import document

    document.write(readers.read(tmp_path / "disturbed" / results.LOG_NAME), tmp_path / "report")
    assert "by something other than this run" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


JUMPING = """
import itertools, time
real, jumps = time.time, itertools.cycle((0, 3600, -86400 * 365, 7, 86400 * 365))
time.time = lambda: real() + next(jumps)
"""


def test_a_clock_that_jumps_spoils_no_duration(command_line, tmp_path):
    """time.time() of every process (program, server, worker) goes back and forth by years."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(JUMPING)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(paths.ROOT), os.environ.get("PYTHONPATH", "")])
    }
    check = command_line.run(
        program=("-c", "import time; print(max(time.time() for _ in range(5)) - min(time.time() for _ in range(5)))"),
        env=environment,
    )
    assert float(check.stdout) > 86400, "the clock does not jump"
    began = time.monotonic()
    ended = command_line.run(
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
        "6",
        "--gpu-batch-size",
        "1",
        "--repeats",
        "2",
        "--json",
        "--output",
        tmp_path,
        env=environment,
    )
    took_s = time.monotonic() - began
    assert ended.returncode == 0, ended.stderr
    assert 0 < json.loads(ended.stdout)["total_latency_s"] < took_s
    (record,) = Log(tmp_path / results.LOG_NAME)
    assert 0 < record.duration_s < took_s
    assert all(seconds >= 0 for seconds in record.phases_s.values()) and sum(record.phases_s.values()) < took_s
    for repeat in record.repeats:
        assert 0 < repeat.started_s < repeat.ended_s < took_s
        assert all(seconds > 0 for seconds in repeat.pass_latencies_s)
        assert sum(repeat.pass_latencies_s) <= repeat.ended_s - repeat.started_s + 1e-3
    for series in (record.samples.disk, record.samples.host):
        if series:
            assert list(series.time_s) == sorted(series.time_s) and series.time_s[-1] < took_s
    assert not (home.home() / "offload").exists()
