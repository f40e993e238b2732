"""Mends: each fault is FlexGen's own, and gone where it is mended."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from factories import done, mini, quiet, run_one
from helpers import paths
from helpers.engine import patches, worker
from helpers.weights import store


@pytest.fixture(scope="module")
def flexgen():
    return patches.import_flexgen()


@pytest.fixture
def backend(flexgen, monkeypatch):
    """FlexGen's backend; what a test mends in it is as it was afterwards."""
    from flexgen import compression, pytorch_backend

    for holder, name in (
        (compression, "get_compressed_indices"),
        (pytorch_backend, "general_copy"),
        (pytorch_backend, "global_cpu_device"),
        (pytorch_backend.TorchTensor, "move"),
        (pytorch_backend.TorchTensor, "load_from_np_file"),
        (flexgen.OptLM, "load_weight"),
        (flexgen.OptLM, "load_cache"),
        (flexgen.OptLM, "store_cache"),
    ):
        monkeypatch.setattr(holder, name, getattr(holder, name))
    return pytorch_backend


@pytest.fixture
def disk(backend, tmp_path):
    """FlexGen's disk tier without its copy threads: what they would be given is in `asked`."""
    disk = SimpleNamespace(path=str(tmp_path), name="disk", device_type=backend.DeviceType.DISK, asked=[])
    disk.allocate = lambda *args, **kwargs: backend.TorchDisk.allocate(disk, *args, **kwargs)
    disk.delete = lambda tensor: backend.TorchDisk.delete(disk, tensor)
    disk.submit_copy = lambda *copy: disk.asked.append(copy)
    return disk


@pytest.fixture
def cpu(backend):
    """FlexGen's CPU tier, unpinned: nothing can be pinned without CUDA."""
    cpu = backend.TorchDevice("cpu")
    allocate = cpu.allocate
    cpu.allocate = lambda shape, dtype, pin_memory=None, name=None: allocate(shape, dtype, False, name)
    return cpu


# ---- importing


def test_flexgen_is_imported_without_transformers():
    code = (
        "import sys; from helpers.engine import patches; flex_opt = patches.import_flexgen(); "
        "assert flex_opt.OptLM and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, check=True)


def test_a_transformers_that_is_there_stays_there(monkeypatch):
    there = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "transformers", there)
    patches.import_flexgen()
    assert sys.modules["transformers"] is there


# ---- indices of compressed tensors


def test_a_compressed_copy_indexes_with_lists_unless_mended(backend, cpu):
    from flexgen import compression

    config = compression.CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    source = cpu.compressed_device.compress(torch.rand(128, 8), config)

    def copied():
        to = cpu.compressed_device.allocate((128, 8), np.float16, config)
        compression.general_copy_compressed(to, None, source, None)
        return to.data[0].data

    with pytest.warns(UserWarning, match="non-tuple sequence"):
        copied()
    patches.index_with_tuples(compression)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copied(), source.data[0].data)


# ---- weights on disk


def loaded(backend, disk, file):
    tensor = disk.allocate((3, 4), np.float16)
    tensor.load_from_np_file(str(file))
    return tensor


@pytest.fixture
def weight_file(tmp_path):
    file = tmp_path / "a.weight"
    with open(file, "wb") as out:
        np.save(out, np.arange(12, dtype=np.float16).reshape(3, 4))
    return file


def test_a_weight_on_disk_is_copied_unless_mended(backend, disk, weight_file):
    assert not os.path.samefile(loaded(backend, disk, weight_file).data, weight_file)
    patches.link_weights_on_disk(backend)
    tensor = loaded(backend, disk, weight_file)
    assert os.path.samefile(tensor.data, weight_file)
    assert np.array_equal(np.load(tensor.data), np.load(weight_file))
    tensor.delete()
    assert np.load(weight_file)[2, 3] == 11


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system that anyone may write to")
def test_where_no_link_can_be_made_the_weight_is_copied(backend, disk, weight_file, tmp_path_factory):
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == os.stat(weight_file).st_dev:
            pytest.skip("/dev/shm is the file system of the temporary folder")
        disk.path = other
        patches.link_weights_on_disk(backend)
        tensor = loaded(backend, disk, weight_file)
        assert np.array_equal(np.load(tensor.data), np.load(weight_file))


def test_a_weight_in_memory_is_read_as_before(backend, cpu, weight_file):
    patches.link_weights_on_disk(backend)
    tensor = cpu.allocate((3, 4), np.float16)
    tensor.load_from_np_file(str(weight_file))
    assert tensor.data[2, 3] == 11 and os.stat(weight_file).st_nlink == 1


def test_a_run_leaves_the_weights_as_they_were(tmp_path):
    folder = store.prepare("opt-mini", quiet).path / "opt-mini-np"

    def contents():
        files = [file for file in folder.iterdir() if file.is_file()]
        assert all(file.stat().st_nlink == 1 for file in files)
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    before = contents()
    done(run_one(mini("0 0 0 0 0 0"), tmp_path))
    assert contents() == before


# ---- activations on disk


def on_cpu(backend, cpu, values):
    return backend.TorchTensor.create_from_torch(values.clone(), cpu)


def test_what_moves_to_disk_is_deleted_before_it_is_copied_unless_mended(backend, disk, cpu):
    values = torch.rand(2, 3, 4).half()
    on_cpu(backend, cpu, values).move(disk)
    ((_, _, source, _),) = disk.asked
    assert source.data is None  # what a copy thread would now read

    disk.asked.clear()
    patches.finish_moves_to_and_from_disk(backend)
    moved = on_cpu(backend, cpu, values).move(disk)
    assert np.array_equal(np.load(moved.data), values.numpy())
    file = moved.data
    back = moved.move(cpu)
    assert torch.equal(back.data, values) and back.device is cpu
    assert not os.path.exists(file) and disk.asked == []


def test_what_is_there_already_does_not_move(backend, disk, cpu):
    patches.finish_moves_to_and_from_disk(backend)
    for tensor in (on_cpu(backend, cpu, torch.zeros(2)), disk.allocate((2,), np.float16)):
        assert tensor.move(tensor.device) is tensor


# ---- sparse attention


def test_a_gather_from_memory_fails_unless_mended(backend, cpu):
    rows = torch.tensor([[4, 0], [1, 1], [2, 3]])  # three of five positions, for each of two heads
    source = on_cpu(backend, cpu, torch.rand(5, 2, 8).half())

    def gathered():
        to = cpu.allocate((4, 2, 8), np.float16)
        to.data.zero_()
        backend.general_copy(to, (slice(0, 3), slice(0, 2)), source, rows)
        return to.data

    with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
        gathered()
    patches.gather_in_memory(backend)
    expected = np.take_along_axis(source.data.numpy(), rows.numpy()[:, :, None], axis=0)
    assert np.array_equal(gathered()[:3].numpy(), expected) and not gathered()[3].any()


def test_a_gather_from_disk_and_a_plain_copy_are_flexgens(backend, disk, cpu):
    patches.gather_in_memory(backend)
    to, rows = cpu.allocate((2, 2, 8), np.float16), torch.tensor([[1, 0], [0, 1]])
    stored = disk.allocate((5, 2, 8), np.float16)
    backend.general_copy(to, (slice(0, 2), slice(0, 2)), stored, rows)
    assert disk.asked == [(to, (slice(0, 2), slice(0, 2)), stored, rows)]
    values = torch.rand(2, 2, 8).half()
    backend.general_copy(to, None, on_cpu(backend, cpu, values), None)
    assert torch.equal(to.data, values)


# ---- no overlap


@pytest.mark.parametrize("step", ["load_weight", "load_cache", "store_cache"])
def test_without_overlap_nothing_waits_for_the_copy_threads_unless_mended(backend, flexgen, step):
    order = []
    layer = SimpleNamespace(**{step: lambda *arguments: order.append("asked")})
    lm = SimpleNamespace(
        layers=[layer],
        num_layers=1,
        num_gpu_batches=1,
        execute_gen_len=4,
        task=SimpleNamespace(gen_len=4),
        weight_home=[None],
        weight_read_buf=[None],
        cache_home=[[None]],
        cache_read_buf=[[None]],
        cache_write_buf=[[None]],
        load_weight_stream=None,
        load_cache_stream=None,
        store_cache_stream=None,
        env=SimpleNamespace(disk=SimpleNamespace(synchronize=lambda: order.append("there"))),
    )
    getattr(flexgen.OptLM, step)(lm, 1, 0, 0, overlap=False)
    assert order == ["asked"]
    order.clear()
    patches.wait_where_nothing_overlaps(flexgen)
    getattr(flexgen.OptLM, step)(lm, 1, 0, 0, overlap=False)
    assert order == ["asked", "there"]
    order.clear()
    getattr(flexgen.OptLM, step)(lm, 1, 0, 0, overlap=True)
    assert order == ["asked"]


# ---- pinned buffers


class Cuda:
    """Stands in for CUDA's runtime: pins what it is asked to, or refuses with a code."""

    def __init__(self, code=0):
        self.code, self.pinned = code, {}

    def cudaHostRegister(self, address, nbytes, flags):
        self.pinned[address] = nbytes
        return self.code


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_pinned_buffer_is_fully_resident(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    before = resident_bytes()
    with patches.pinned_side_by_side():
        buffer = torch.empty((2**26,), dtype=torch.float16, pin_memory=True)  # as FlexGen asks
    assert cuda.pinned == {buffer.data_ptr(): 2**27}
    assert buffer.shape == (2**26,) and buffer.dtype == torch.float16
    assert resident_bytes() - before > 0.99 * 2**27


def test_a_buffer_of_nothing_is_not_pinned_and_other_tensors_are_torchs_own(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    with patches.pinned_side_by_side():
        assert torch.empty((0,), dtype=torch.float16, pin_memory=True).numel() == 0
        assert torch.empty(7, dtype=torch.float16).shape == (7,) and torch.ones(2).sum() == 2
    assert not cuda.pinned


def test_where_cuda_does_not_pin_it_torch_is_asked_as_before(monkeypatch):
    """In a sandbox, or for lack of memory: the error is then the one that torch gives, not the one before."""
    cuda, told = Cuda(code=801), []

    def next_kernel(*size, device):
        told.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "ones", next_kernel)

    def answer():
        try:
            return torch.empty(5, pin_memory=True).is_pinned()
        except RuntimeError as error:  # no GPU here
            return str(error)

    as_before = answer()
    with patches.pinned_side_by_side():
        assert answer() == as_before
    assert len(cuda.pinned) == 1 and told == ["cuda"]


@pytest.mark.parametrize(
    "percent, options, elements",
    [
        ("0 0 100 0 100 0", {"copy_buffer": "fit"}, 1024 * 256),  # the token embedding
        ("0 0 100 0 100 0", {}, None),
        ("100 0 100 0 100 0", {}, 0),
    ],
)
def test_a_copy_threads_buffer_is_pinned_so_and_nothing_after_it(
    percent, options, elements, flexgen, backend, tmp_path, monkeypatch
):
    """FlexGen's own copy thread, with CUDA stood in for: it asks for its buffer, and then for its first copy."""
    for holder, name in ((backend, "GB"), (backend, "copy_worker_func"), (flexgen.OptLM, "init_all_weights")):
        monkeypatch.setattr(holder, name, getattr(holder, name))
    monkeypatch.setattr(backend, "GB", 4096)  # of which FlexGen has 2**30
    cuda, settings = Cuda(), mini(percent, **options)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    for name in ("set_device", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    modes_at_the_first_copy = []

    class Copies:
        def get(self):
            modes_at_the_first_copy.append(torch._C._len_torch_function_stack())

        def task_done(self):
            pass

    made = worker._prepare_copy_threads(settings, flexgen, None)
    backend.copy_worker_func(Copies(), 0)
    assert list(cuda.pinned.values()) == ([2 * (4096 if elements is None else elements)] if elements != 0 else [])
    assert modes_at_the_first_copy == [0]
    assert made.ready.acquire(blocking=False) and not made.ready.acquire(blocking=False)


# ---- the copy queue


def test_a_copy_is_only_done_when_what_follows_it_is():
    order, copies = [], queue.Queue()
    seen = patches.CopyQueue(copies, lambda: None, after_copy=lambda: order.append(copies.unfinished_tasks))
    copies.put_nowait("a copy")
    assert seen.get() == "a copy" and order == []
    seen.task_done()
    assert order == [1] and copies.unfinished_tasks == 0
