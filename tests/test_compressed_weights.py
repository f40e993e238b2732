"""4-bit weights are compressed once, and what is loaded later is the same byte for byte."""

from __future__ import annotations

import os

import numpy as np
import pytest

from factories import done, mini, run_one
from helpers.engine import compressed_weights, patches

SHAPE = (192, 96)


@pytest.fixture
def backend(monkeypatch):
    """FlexGen's backend, restored afterwards."""
    patches.import_flexgen()
    from flexgen import pytorch_backend

    monkeypatch.setattr(pytorch_backend.TorchTensor, "load_from_np_file", pytorch_backend.TorchTensor.load_from_np_file)
    monkeypatch.setattr(pytorch_backend, "global_cpu_device", pytorch_backend.TorchDevice("cpu"))
    return pytorch_backend


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "w.weight"
    with open(path, "wb") as file:
        np.save(file, np.random.default_rng(1).normal(0, 0.02, SHAPE).astype(np.float16))
    return path


def load(backend, path):
    """The file as FlexGen loads it into 4-bit memory: packed values and scales."""
    from flexgen.compression import CompressionConfig

    config = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    device = backend.global_cpu_device.compressed_device
    tensor = device.allocate(SHAPE, np.float16, config, pin_memory=False)
    tensor.load_from_np_file(str(path))
    return [part.data.numpy().tobytes() for part in tensor.data[:2]]


def no_compressing(*_):
    raise AssertionError("compressed again")


def test_kept_weights_match_flexgens_and_are_compressed_once(backend, weights, monkeypatch):
    stock = load(backend, weights)
    compressed_weights.keep(backend)
    assert load(backend, weights) == stock
    monkeypatch.setattr(compressed_weights, "_compress", no_compressing)
    assert load(backend, weights) == stock


@pytest.mark.parametrize("damage", ["newer weights", "cut off", "another shape", "gone"])
def test_old_or_broken_files_are_made_again(backend, weights, damage):
    stock = load(backend, weights)
    compressed_weights.keep(backend)
    load(backend, weights)
    values = weights.parent / compressed_weights.FOLDER / f"{weights.name}.values.npy"
    if damage == "newer weights":
        with open(weights, "wb") as file:
            np.save(file, np.zeros(SHAPE, np.float16) + np.float16(0.5) * np.eye(*SHAPE, dtype=np.float16))
        os.utime(weights, ns=(values.stat().st_mtime_ns + 10**9,) * 2)
        assert load(backend, weights) != stock
        return
    if damage == "cut off":
        values.write_bytes(values.read_bytes()[:-7])
    elif damage == "another shape":
        np.save(values, np.zeros((3, 4), np.uint8))
    else:
        values.unlink()
    assert load(backend, weights) == stock


def test_a_folder_that_cannot_be_written_is_no_error(backend, weights, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    stock = load(backend, weights)
    compressed_weights.keep(backend)
    monkeypatch.setattr(compressed_weights, "_write", full)
    assert load(backend, weights) == stock


@pytest.mark.parametrize("percent", ["100 0 100 0 100 0", "0 50 100 0 100 0"])
def test_a_run_with_kept_weights_generates_the_same_tokens(percent, tmp_path, monkeypatch):
    monkeypatch.setenv("OFFLOAD_LAB_HOME", str(tmp_path / "home"))
    settings = mini(percent=percent, compress_weight=True)
    first = done(run_one(settings, tmp_path / "first"))
    assert len(list(tmp_path.rglob("*.values.npy"))) > 10
    again = done(run_one(settings, tmp_path / "again"))
    assert again.generated_tokens == first.generated_tokens != ()
