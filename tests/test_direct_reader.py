"""Weights by O_DIRECT: the same bytes and tokens as FlexGen's reader, every byte from the disk, in whole blocks."""

import errno
import os
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings as budget, strategies as st

from factories import done, mini, run_one
from helpers.engine import direct_reader
from helpers.engine.direct_reader import ALIGNMENT, BUFFER_BYTES, PART_BYTES, DirectReader, PartQueue, cut
from helpers.placement import place
from helpers.settings import Workload

SHORT = Workload(gpu_batch_size=2, prompt_len=16, gen_len=2)


@given(st.integers(0, ALIGNMENT), st.integers(1, 2**28), st.sampled_from([ALIGNMENT, 10 * ALIGNMENT, PART_BYTES]))
def test_a_file_is_cut_into_aligned_parts_that_are_all_of_it(header, payload, part_bytes):
    parts = cut(header, payload, part_bytes)
    ends = [offset + length for offset, length in parts]
    assert [offset for offset, _ in parts] == [0, *ends[:-1]] and ends[-1] == header + payload
    assert all(offset % ALIGNMENT == 0 and 0 < length <= part_bytes + ALIGNMENT for offset, length in parts)
    assert len(parts) <= -(-payload // part_bytes)


def test_a_part_fits_a_buffer():
    assert max(length for _, length in cut(128, 2**30 + 1)) <= BUFFER_BYTES


class Disk:
    """As much of FlexGen's TorchDisk as the reader meets."""

    def __init__(self):
        self.copy_queue = queue.Queue()

    def submit_copy(self, *item):
        self.copy_queue.put_nowait(item)


def tensor_on(disk, path, values):
    return SimpleNamespace(data=str(path), device=disk, bytes=values.nbytes)


def tensor_on_gpu(values):
    return SimpleNamespace(data=torch.from_numpy(np.zeros_like(values)), bytes=values.nbytes)


@pytest.fixture
def no_gpu(monkeypatch):
    """Events and pinned memory on a machine without CUDA: a copy is over when it returns."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    aligned = direct_reader.aligned_buffers
    monkeypatch.setattr(direct_reader, "aligned_buffers", lambda count, nbytes: aligned(count, nbytes, pin=False))


def copy_with_threads(disk, reader, threads=4):
    """Runs copy threads until the queue is empty; returns what they got of FlexGen's own items."""
    left, errors = [], []

    def work():
        mine = PartQueue(disk.copy_queue, reader)
        try:
            while (item := mine.get()) is not None:
                left.append(item)
                mine.task_done()
            mine.task_done()
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for _ in workers:
        disk.copy_queue.put_nowait(None)
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    disk.copy_queue.join()  # each item was told done, once
    return left


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["<f2", "|u1"])), max_size=4),
    st.sampled_from([ALIGNMENT, 3 * ALIGNMENT, PART_BYTES]),
    st.integers(0, 40_000),
)
@budget(max_examples=40, deadline=None)
def test_every_byte_comes_as_it_is_in_the_file(tmp_path_factory, shapes, part_bytes, smallest):
    folder = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        no_gpu.__wrapped__(patch)
        patch.setattr(direct_reader, "SMALLEST_DIRECT_BYTES", smallest)
        patch.setattr(direct_reader, "cut", lambda header, payload: cut(header, payload, part_bytes))
        disk, reader, read = Disk(), None, []
        reader = DirectReader(after_read=read.append)
        files = []
        for number, (rows, columns, dtype) in enumerate(shapes):
            bits = np.random.default_rng(number).integers(0, 256, (rows, columns * np.dtype(dtype).itemsize), np.uint8)
            values = bits.view(dtype)
            np.save(folder / f"{number}.npy", values)
            files.append((tensor_on(disk, folder / f"{number}.npy", values), values))
        reader.take_over(disk, [file for file, _ in files])
        targets = [tensor_on_gpu(values) for _, values in files]
        for (file, _), target in zip(files, targets):
            disk.submit_copy(target, None, file, None)
        assert copy_with_threads(disk, reader) == []
        for (_, values), target in zip(files, targets):
            assert target.data.numpy().tobytes() == values.tobytes()
        assert sum(read) == sum(os.stat(file.data).st_size for file, _ in files)
        bytes_ = [values.nbytes for _, values in files]
        small = sum(size for size in bytes_ if size < smallest)
        assert len(reader.notes) == (small > 0.02 * sum(bytes_))


def test_what_is_no_weight_is_left_to_flexgen(tmp_path, no_gpu):
    disk = Disk()
    values = np.ones((64, 64), np.float16)
    np.save(tmp_path / "weight.npy", values)
    weight, cache = tensor_on(disk, tmp_path / "weight.npy", values), SimpleNamespace(data="cache", device=disk)
    elsewhere = SimpleNamespace(data=torch.zeros(1), device="cpu")
    reader = DirectReader()
    reader.take_over(disk, [weight])
    part_of_it = tensor_on_gpu(values[:8])
    items = [("gpu", "some", cache, "rows"), (cache, None, elsewhere, None), (part_of_it, "rows", weight, "rows")]
    for item in items:
        disk.submit_copy(*item)
    assert copy_with_threads(disk, reader, threads=1) == items


def test_a_file_that_is_too_short_is_named(tmp_path, no_gpu):
    disk, values = Disk(), np.ones((400, 400), np.float16)
    np.save(tmp_path / "weight.npy", values)
    reader, weight = DirectReader(), tensor_on(disk, tmp_path / "weight.npy", values)
    reader.take_over(disk, [weight])
    disk.submit_copy(tensor_on_gpu(values), None, weight, None)
    os.truncate(tmp_path / "weight.npy", 100_000)
    with pytest.raises(OSError, match=r"ends before its tensor does.*weight\.npy"):
        copy_with_threads(disk, reader, threads=1)


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_file_system_without_o_direct_is_read_normally_and_said(where, tmp_path, no_gpu, monkeypatch):
    disk, values = Disk(), np.arange(160_000, dtype=np.float16).reshape(400, 400)
    np.save(tmp_path / "weight.npy", values)
    opened, real_open, real_read = [], os.open, os.preadv

    def open_file(path, flags, *more):
        if flags & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        file = real_open(path, flags, *more)
        opened.append((file, flags))
        return file

    def read(file, *more):
        if dict(opened)[file] & os.O_DIRECT and where == "read":
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(file, *more)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", read)
    reader, weight, target = DirectReader(), tensor_on(disk, tmp_path / "weight.npy", values), tensor_on_gpu(values)
    reader.take_over(disk, [weight])
    disk.submit_copy(target, None, weight, None)
    copy_with_threads(disk, reader)
    np.testing.assert_array_equal(target.data.numpy(), values)
    (note,) = reader.notes
    assert "O_DIRECT" in note and "page cache" in note and str(tmp_path) in note


def test_a_file_that_is_not_there_is_an_error_not_a_note(tmp_path):
    disk = Disk()
    with pytest.raises(FileNotFoundError):
        DirectReader().take_over(disk, [tensor_on(disk, tmp_path / "gone", np.ones(4))])


# ---- in FlexGen


@pytest.mark.parametrize(
    "percent, options",
    [
        ("0 0 100 0 100 0", {}),
        ("0 0 100 0 100 0", {"compress_weight": True}),
        ("40 20 100 0 100 0", {"page_cache": "cold"}),
        ("0 50 100 0 100 0", {"compress_weight": True, "overlap": False}),
        ("30 0 0 0 100 0", {}),  # the KV cache on disk, too
        ("100 0 100 0 100 0", {}),  # nothing to read
    ],
)
def test_the_tokens_are_stocks_and_the_bytes_are_the_disks(percent, options, tmp_path):
    stock = done(run_one(mini(percent, SHORT, **options), tmp_path))
    direct = done(run_one(mini(percent, SHORT, disk_reader="direct", **options), tmp_path))
    assert direct.generated_tokens == stock.generated_tokens
    assert direct.bytes_by_tier == stock.bytes_by_tier
    assert all("are in tensors of less than 64 KiB" in note for note in set(direct.notes) - set(stock.notes))
    (repeat,) = direct.repeats
    if repeat.own_read_bytes is not None:
        split = direct.settings.split
        layers = place(
            direct.settings.opt_model, split.weights_gpu, split.weights_cpu, direct.settings.compress_weight
        ).layers
        # The largest of each layer at least (4-bit values and scales are files apart).
        large = [t.stored_bytes for layer in layers for t in layer if t.tier == "disk" and t.stored_bytes >= 2**17]
        assert repeat.own_read_bytes >= 0.85 * SHORT.gen_len * sum(large)
