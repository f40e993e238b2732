"""4-bit weights, compressed once by FlexGen's own function and kept next to the fp16 files.

With `--compress-weight`, FlexGen compresses every weight again in every run, on the CPU. The result depends on
the file alone, so a kept copy is the same byte for byte, and a quarter of the bytes are read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "4-bit"  # in the folder of the fp16 files, so that replacing the weights removes it too
PARTS = ("values", "scales")  # packed uint8; minimum and scale of each group in fp16


def keep(pytorch_backend: Any) -> None:
    """Make FlexGen load kept 4-bit weights, and keep those that it compresses."""
    load: Callable[[Any, str], None] = pytorch_backend.TorchTensor.load_from_np_file

    def load_from_np_file(tensor: Any, filename: str) -> None:
        if tensor.device.device_type != pytorch_backend.DeviceType.COMPRESSED:
            return load(tensor, filename)
        parts = _kept(Path(filename), [part.shape for part in tensor.data[:2]])
        if parts is None:
            parts = _compress(pytorch_backend, tensor, filename)
            with suppress(OSError):  # a full disk or an unwritable folder: the next run compresses it again
                _write(Path(filename), parts)
        for part, array in zip(tensor.data[:2], parts):
            part.load_from_np(array)

    pytorch_backend.TorchTensor.load_from_np_file = load_from_np_file


def _compress(pytorch_backend: Any, tensor: Any, filename: str) -> list[np.ndarray]:
    """FlexGen's own function; it stores the scales, computed in fp32, in fp16."""
    import torch

    weights = torch.from_numpy(np.load(filename))
    values, scales, _ = pytorch_backend.global_cpu_device.compressed_device.compress(weights, tensor.data[2]).data
    return [values.data.numpy(), scales.data.half().numpy()]


def _paths(weights: Path) -> list[Path]:
    return [weights.parent / FOLDER / f"{weights.name}.{part}.npy" for part in PARTS]


def _kept(weights: Path, shapes: list[tuple[int, ...]]) -> list[np.ndarray] | None:
    """The kept values and scales, or None if missing, broken or older than the weights."""
    try:
        changed_ns = weights.stat().st_mtime_ns
        if any(path.stat().st_mtime_ns < changed_ns for path in _paths(weights)):
            return None
        parts = [np.load(path) for path in _paths(weights)]
    except (OSError, ValueError, EOFError):
        return None
    kinds = [(part.shape, part.dtype) for part in parts]
    return parts if kinds == [(tuple(shapes[0]), np.uint8), (tuple(shapes[1]), np.float16)] else None


def _write(weights: Path, parts: list[np.ndarray]) -> None:
    for path, part in zip(_paths(weights), parts):
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with open(temporary, "wb") as file:
                np.save(file, part)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
