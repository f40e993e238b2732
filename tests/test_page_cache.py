"""Cold and natural reads: what the page cache gave, and what the disk had to, by the kernel's own counts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from factories import done, mini, run_one
from helpers.engine import page_cache
from helpers.machine import disks
from helpers.sampling import own_read_bytes
from helpers.settings import Workload

MIB = 2**20
COUNTED = own_read_bytes() is not None
# One prefill, over the disk tier's 8 MiB and what they take at the emulated disk's pace.
ONE_PASS = Workload(gpu_batch_size=1, num_gpu_batches=1, prompt_len=16, gen_len=1)

pytestmark = [
    pytest.mark.skipif(not COUNTED, reason="/proc/self/io counts no read_bytes here"),
    pytest.mark.usefixtures("on_a_disk"),
]


@pytest.fixture(scope="module")
def on_a_disk(lab_home):
    disk = disks.disk_of(lab_home)
    if disk.is_memory or disk.is_network:
        pytest.skip(f"the test's folder is on {disk.filesystem}: nothing there is read from a disk")


@pytest.fixture
def file(lab_home):
    """8 MiB on the disk, as an array, and in the page cache."""
    path = Path(lab_home) / "some.array"
    with open(path, "wb") as out:
        np.save(out, np.zeros(8 * MIB // 2, np.float16))
        out.flush()
        os.fsync(out.fileno())
    path.read_bytes()
    yield str(path)
    path.unlink()


def bytes_read(action):
    before = own_read_bytes()
    action()
    return own_read_bytes() - before


# ---- one file


def test_a_dropped_file_is_read_from_the_disk_again(file):
    assert bytes_read(lambda: Path(file).read_bytes()) == 0
    page_cache.drop(file)
    assert bytes_read(lambda: Path(file).read_bytes()) >= 8 * MIB


def test_a_mapped_file_stays_until_it_is_unmapped_from_memory(file):
    """Why dropping alone is not enough: the kernel keeps what a process maps."""
    mapped = np.lib.format.open_memmap(file, mode="r")
    assert mapped.sum() == 0
    page_cache.drop(file)
    assert bytes_read(lambda: mapped.sum()) == 0


@pytest.fixture
def cold(monkeypatch):
    monkeypatch.setattr(np.lib.format, "open_memmap", np.lib.format.open_memmap)
    cold = page_cache.ColdReads()
    cold.watch_memory_maps()
    return cold


def test_what_a_thread_mapped_is_dropped_after_its_copy(cold, file):
    def copy():
        return np.array(np.lib.format.open_memmap(file, mode="r"))

    copy()
    cold.drop_opened()
    assert bytes_read(copy) >= 8 * MIB
    assert bytes_read(copy) == 0  # nothing was dropped in between
    cold.drop_opened()
    assert bytes_read(copy) >= 8 * MIB


def test_a_map_that_is_still_held_reads_the_disk_after_it_was_dropped(cold, file):
    mapped = np.lib.format.open_memmap(file, mode="r")
    mapped.sum()
    cold.drop_opened()
    assert bytes_read(lambda: mapped.sum()) >= 8 * MIB


def test_each_thread_drops_its_own(cold, file):
    np.lib.format.open_memmap(file, mode="r").sum()
    other = threading.Thread(target=cold.drop_opened)
    other.start()
    other.join()
    assert bytes_read(lambda: Path(file).read_bytes()) == 0


def test_what_is_mapped_for_writing_is_written(cold, tmp_path):
    path = str(tmp_path / "written")
    mapped = np.lib.format.open_memmap(path, mode="w+", shape=(1000,), dtype=np.float16)
    mapped[:] = 7
    cold.drop_opened()
    assert (np.load(path) == 7).all() and (mapped == 7).all()


# ---- a run


def test_a_cold_run_reads_from_the_disk_all_that_it_needs(tmp_path):
    record = done(run_one(mini("0 0 100 0 100 0", ONE_PASS, page_cache="cold"), tmp_path))
    (repeat,) = record.repeats
    assert record.bytes_expected_from_disk > 4 * MIB
    assert repeat.own_read_bytes >= record.bytes_expected_from_disk
    if repeat.disk_read_bytes is not None:
        assert repeat.disk_read_bytes >= record.bytes_expected_from_disk
        assert record.bytes_from_disk == repeat.disk_read_bytes


def test_every_pass_of_a_cold_run_is_cold(tmp_path):
    """The second pass finds as little as the first."""
    work = ONE_PASS.model_copy(update={"gen_len": 2})
    record = done(run_one(mini("40 40 100 0 100 0", work, page_cache="cold"), tmp_path))
    assert record.repeats[0].own_read_bytes >= record.bytes_expected_from_disk > MIB // 2


def test_a_natural_run_of_what_is_in_the_page_cache_reads_next_to_nothing(tmp_path):
    settings = mini("0 0 100 0 100 0", ONE_PASS)
    done(run_one(settings, tmp_path))
    record = done(run_one(settings, tmp_path, fresh=True))
    assert record.repeats[0].own_read_bytes < record.bytes_expected_from_disk / 100
