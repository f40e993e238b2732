"""The weights in a folder that transformers saved a model in, tensor by tensor, under FlexGen's names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helpers.errors import Refused

# In this order: safetensors needs no torch, and can hold nothing but tensors.
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")
CONFIG_FILE = "config.json"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json")
PIECE = 1 << 22  # elements converted at a time

# Dtypes of safetensors; NumPy has no bfloat16, which is the upper half of a float32.
SAFETENSORS_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Incomplete(Refused):
    """Files of weights are not there."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, and `pieces()`: its values as flat fp16 arrays in C order."""

    file: Path
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold a folder's weights: safetensors before .bin, the shards of an index.

    Raises Incomplete if there are none, or if the index names a shard that is not there.
    """
    for whole in WHOLE_FILES:
        if (folder / whole).is_file():
            return (folder / whole,)
        index = folder / f"{whole}.index.json"
        if index.is_file():
            return _shards(index)
    raise Incomplete(f"{folder}: no weights in it (looked for {' and '.join(WHOLE_FILES)}, whole or with an index)")


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{index}: not a readable index of shards ({error!r})") from error
    shards = tuple(index.parent / str(name) for name in names)
    for shard in shards:
        if shard.parent != index.parent or not shard.is_file():
            raise Incomplete(f"{index} names {shard.name}, which is not in the folder; copy or download it again")
    return shards


def tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The folder's tensors by FlexGen's names, exactly those of `shapes`; no values are read.

    Raises Refused naming the tensors that are missing, are shaped otherwise, or that FlexGen has no place for
    (an output layer of its own among them: FlexGen's is the token embedding).
    """
    found: dict[str, StoredTensor] = {}
    head = None
    for file in weight_files(folder):
        for name, tensor in _open(file):
            if name == "lm_head.weight":
                head = tensor
            elif not name.endswith("decoder.version"):  # fairseq's mark, no weight
                found[_flexgen_name(name)] = tensor
    wrong = [
        f"{name} is {tensor.shape}, {shapes[name]} by its config"
        for name, tensor in found.items()
        if name in shapes and tensor.shape != shapes[name]
    ]
    wrong += [f"{name} {shapes[name]} is missing" for name in shapes if name not in found]
    wrong += [f"{name} {found[name].shape} has no place in the model" for name in found if name not in shapes]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Refused(f"{folder}: its tensors are not those of its config: {'; '.join(wrong[:3])}{more}")
    embedding = found["decoder.embed_tokens.weight"]
    if head is not None and (head.shape != embedding.shape or not _equal(head.pieces(), embedding.pieces())):
        raise Refused(f"{folder}: lm_head.weight differs from the token embedding, FlexGen has one tensor for both")
    return found


def _flexgen_name(name: str) -> str:
    return name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")


def _equal(left: Iterable[np.ndarray], right: Iterable[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right))


def _open(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_bin(file)


def _open_safetensors(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Read here and not by the safetensors package, whose NumPy side refuses bfloat16."""
    try:
        header, data = _safetensors_header(file)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(int(length) for length in entry["shape"])
            start, end = entry["data_offsets"]
            dtype = np.dtype(SAFETENSORS_DTYPES[entry["dtype"]])
            if end - start != math.prod(shape) * dtype.itemsize or start < 0 or end > len(data):
                raise Refused(f"{file}: {name} does not fit in the file, it is cut off; copy or download it again")
            values = data[start:end].view(dtype)
            yield name, StoredTensor(file, shape, _halves(file, name, values, entry["dtype"] == "BF16"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{file}: not a readable safetensors file ({error!r}); copy or download it again") from error


def _safetensors_header(file: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The format (github.com/huggingface/safetensors): 8 bytes of length, a JSON header, the values."""
    mapped = np.memmap(file, np.uint8, mode="r")
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > len(mapped) - 8:
        raise ValueError(f"a header of {length} bytes in a file of {len(mapped)}")
    return json.loads(mapped[8 : 8 + length].tobytes()), mapped[8 + length :]


def _open_bin(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    import torch

    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):  # torch's format of before 1.6
                raise
            state = torch.load(file, map_location="cpu", weights_only=True)
        for name, tensor in state.items():
            flat = tensor.detach().contiguous().flatten()
            values = flat.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else flat.numpy()
            is_bfloat16 = tensor.dtype == torch.bfloat16
            yield name, StoredTensor(file, tuple(tensor.shape), _halves(file, name, values, is_bfloat16))
    except Exception as error:  # torch raises whatever the pickle made it trip over
        if isinstance(error, Refused):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise Refused(f"{file}: torch cannot load it as plain weights ({reason}); copy or download it again") from error


def _halves(file: Path, name: str, values: np.ndarray, is_bfloat16: bool) -> Callable[[], Iterator[np.ndarray]]:
    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, len(values), PIECE):
            piece = values[start : start + PIECE]
            if is_bfloat16:
                piece = (piece.astype(np.uint32) << 16).view(np.float32)
            with np.errstate(over="ignore"):
                half = np.asarray(piece, np.float16)
            if not np.isfinite(half).all():
                raise Refused(f"{file}: {name} has values fp16 cannot hold (over 65,504, infinite or not a number)")
            yield half

    return pieces
