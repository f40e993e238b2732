"""Read the weights in a transformers folder, tensor by tensor, under FlexGen's names."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helpers.errors import Refused
from helpers.units import MIB

# Safetensors first, since such a file can hold nothing but tensors.
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")
CONFIG_FILE = "config.json"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json")
PIECE = 1 << 22  # elements converted at a time
# OPT-175B needs less than 1 MiB for each of these: an index, a safetensors header, a .bin file's pickle.
MAX_HEADER_BYTES = 16 * MIB
LFS_POINTER = b"version https://git-lfs"
# Name parts that wrappers add to every tensor's name: DDP, torch.compile, FSDP.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
DTYPES = {"F64", "F32", "F16", "BF16"}


class Incomplete(Refused):
    """Weight files are missing."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, and `read(rows)`, a torch tensor of some of its rows."""

    file: Path
    name: str
    shape: tuple[int, ...]
    read: Callable[[slice], Any]

    def pieces(self) -> Iterator[np.ndarray]:
        """The values as flat fp16 arrays in C order. Raises Refused for values that fp16 can't hold."""
        import torch

        rows = max(1, PIECE // max(1, int(np.prod(self.shape[1:], dtype=np.int64))))
        for start in range(0, self.shape[0], rows):
            piece = self.read(slice(start, start + rows)).detach().to(torch.float16)
            if not torch.isfinite(piece).all():
                raise Refused(
                    f"{self.file}: {self.name} has values that fp16 can't hold (over 65,504, infinite or NaN)"
                )
            yield piece.flatten().numpy()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold a folder's weights: safetensors before .bin, whole or as the shards of an index.

    Raises Incomplete if there are none, or if the index names a missing shard.
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
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise ValueError(f"over {MAX_HEADER_BYTES // MIB} MiB")
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _check_not_lfs_pointer(index)
        raise Refused(f"{index}: not a readable index of shards ({_short(error)})") from error
    shards = tuple(index.parent / str(name) for name in names)
    for shard in shards:
        if shard.parent != index.parent or not shard.is_file():
            raise Incomplete(f"{index} names {shard.name[:200]}, which is not in the folder; copy or download it again")
    return shards


def tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The folder's tensors by FlexGen's names, exactly those of `shapes`. Reads headers, no values.

    Raises Refused naming tensors that are missing, have another shape, or have no place in FlexGen's model (which
    uses the token embedding as the output layer, so a separate output layer has none either).
    """
    found: dict[str, StoredTensor] = {}
    head = None
    for file in weight_files(folder):
        for tensor in _open(file):
            name = ".".join(part for part in tensor.name.split(".") if part not in WRAPPERS)
            if name == "lm_head.weight":
                head = tensor
            elif not name.endswith("decoder.version"):  # fairseq's version mark, not a weight
                name = name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
                found[name] = tensor
    wrong = [
        f"{name} is {tensor.shape}, {shapes[name]} by its config"
        for name, tensor in found.items()
        if name in shapes and tensor.shape != shapes[name]
    ]
    wrong += [f"{name} {shapes[name]} is missing" for name in shapes if name not in found]
    wrong += [f"{name[:200]} {found[name].shape} has no place in the model" for name in found if name not in shapes]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Refused(f"{folder}: its tensors don't match its config: {'; '.join(wrong[:3])}{more}")
    embedding = found["decoder.embed_tokens.weight"]
    if head is not None and (head.shape != embedding.shape or not _equal(head.pieces(), embedding.pieces())):
        raise Refused(f"{folder}: lm_head.weight differs from the token embedding, and FlexGen uses one for both")
    return found


def _equal(left: Iterable[np.ndarray], right: Iterable[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right))


def _open(file: Path) -> list[StoredTensor]:
    """A file's tensors. Raises Refused, in one line, for whatever is wrong with the file."""
    _check_not_lfs_pointer(file)
    try:
        return _open_safetensors(file) if file.suffix == ".safetensors" else _open_bin(file)
    except Refused:
        raise
    except Exception as error:  # damaged bytes can make torch raise anything
        raise Refused(f"{file}: can't be read as weights ({_short(error)}); copy or download it again") from error


def _open_safetensors(file: Path) -> list[StoredTensor]:
    from safetensors import safe_open

    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
    if header_bytes > min(MAX_HEADER_BYTES, file.stat().st_size):
        raise ValueError(f"its header claims {header_bytes:,} bytes")
    opened_file = safe_open(file, framework="pt")
    slices = {name: opened_file.get_slice(name) for name in opened_file.keys()}  # noqa: SIM118 (safe_open is not a dict)
    for name, one in slices.items():
        if one.get_dtype() not in DTYPES:
            raise ValueError(f"{name[:200]} has dtype {one.get_dtype()}, not one of {', '.join(sorted(DTYPES))}")
    return [StoredTensor(file, name, tuple(one.get_shape()), one.__getitem__) for name, one in slices.items()]


def _open_bin(file: Path) -> list[StoredTensor]:
    import torch

    is_zip = zipfile.is_zipfile(file)  # torch's format since 1.6; only this one can be mapped
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            pickled_bytes = max(entry.file_size for entry in archive.infolist() if entry.filename.endswith(".pkl"))
        if pickled_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"its pickle claims {pickled_bytes:,} bytes")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch's own message advises to unpickle, which can run anything
        raise ValueError(f"torch finds no plain tensors in it: {type(error).__name__}") from error
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise ValueError(f"{str(name)[:200]} in it is not a tensor of floating-point numbers")
    return [StoredTensor(file, str(name), tuple(tensor.shape), tensor.__getitem__) for name, tensor in state.items()]


def _check_not_lfs_pointer(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise Refused(f"{file}: a Git LFS pointer, not the file itself; run `git lfs pull` in {file.parent}")


def _short(error: Exception) -> str:
    """An error on one line, cut short: a damaged file can put megabytes into the message."""
    return " ".join(f"{type(error).__name__}: {str(error)[:200]}".split())
