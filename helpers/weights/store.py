"""Weights in FlexGen's layout, one .npy file a tensor: from the hub, from a local folder, or synthetic."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helpers import models, paths
from helpers.errors import Refused
from helpers.models import FP16_BYTES, OptModel
from helpers.units import GIB
from helpers.weights import checkpoint, hub, synthetic

THREADS = 4
PROGRESS_EVERY_S = 10.0
FILE_OVERHEAD_BYTES = 4096  # .npy header and the last disk block

# FlexGen's benchmark sentence is `BOS Paris is the capital city of` in OPT's tokens. Without the tokenizer's
# files: the same, but for one token (Paris) whose real id is over the smallest vocabulary here.
SENTENCE = "Paris is the capital city of"
FIXED_PROMPT_IDS = (2, 826, 16, 5, 812, 343, 9)
FIXED_PROMPT = "fixed token ids (no tokenizer files)"
BOS_ID = 2

# Beside the tensors: where they came from. FlexGen does not look at it.
PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Weights:
    """Weights ready for FlexGen: `path` is its --path, `source` says where they came from in one line.

    `prompt_ids` is FlexGen's benchmark sentence, unpadded; `prompt` says what made the ids.
    """

    path: Path
    source: str
    prompt_ids: tuple[int, ...]
    prompt: str


@dataclass(frozen=True)
class Source:
    """Where tensors come from: `provenance` is kept beside them, `pieces(name)` gives one as flat fp16 arrays."""

    provenance: dict[str, Any]
    pieces: Callable[[str], Iterable[np.ndarray]]


def home() -> Path:
    """The folder for what is kept between runs: $OFFLOAD_LAB_HOME, or offload-lab in the user's cache.

    Where the cache cannot be written: one in the temporary folder. Nothing is created here. Raises Refused for an
    $OFFLOAD_LAB_HOME that cannot be written: what one asks for is not silently elsewhere.
    """
    named = os.environ.get("OFFLOAD_LAB_HOME")
    if named:
        return paths.folder(named, "OFFLOAD_LAB_HOME")
    cache = os.environ.get("XDG_CACHE_HOME", "")
    wanted = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")).absolute() / "offload-lab"
    there = _nearest_existing(wanted)
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return wanted
    return Path(tempfile.gettempdir()).absolute() / f"offload-lab-{os.getuid()}"


def prepare(model_name: str, say: Callable[[str], None] = print, home_dir: Path | None = None) -> Weights:
    """The weights of a model, whole and verified: a known name's, or those of a transformers folder.

    The first call for a model downloads and converts, or generates; later ones look at each file's header and
    size. A broken file is named through `say` and made again. A name that the hub does not give gets synthetic
    weights, and `source` says why. Raises Refused if the disk is too small, if a folder's tensors are not those
    of its config, or if a broken file cannot be made again.
    """
    model = models.resolve(model_name)
    folder = models.local_folder(model_name)
    root = (home_dir or home()).absolute() / "weights"
    try:
        if folder:
            return _from_folder(model, folder, root, say)
        if model in models.SYNTHETIC_MODELS:
            return _synthetic(model, root, say, "this model exists here only")
        try:
            return _from_hub(model, root, say)
        except hub.Unavailable as unavailable:
            say(f"{model.name}: {unavailable}; using synthetic weights")
            return _synthetic(model, root, say, f"hub: {unavailable}")
    except OSError as error:
        raise Refused(_what_the_disk_said(error, root)) from error


def kept(model_name: str, home_dir: Path | None = None) -> str | None:
    """Where the weights of a known name came from, if `prepare` would find them whole and use them as they are.

    Reads headers, asks no network, changes nothing.
    """
    model = models.resolve(model_name)
    kind = "synthetic" if model in models.SYNTHETIC_MODELS else "hub"
    target = (home_dir or home()).absolute() / "weights" / kind / f"{model.name}-np"
    provenance = _read_provenance(target)
    return provenance["source"] if provenance and not broken_files(target, model) else None


def _from_folder(model: OptModel, folder: Path, root: Path, say: Callable[[str], None]) -> Weights:
    kind = f"folder-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    target = root / kind / f"{model.name}-np"
    identity = _identity(folder)

    def open_source(kept: dict[str, Any] | None) -> Source:
        return _checkpoint(model, folder, {"source": f"folder: {folder}", "identity": identity})

    def is_current(provenance: dict[str, Any]) -> bool:
        return not identity or provenance.get("identity") == identity

    return _weights(target, _keep_whole(target, model, is_current, open_source, say))


def _from_hub(model: OptModel, root: Path, say: Callable[[str], None]) -> Weights:
    """A finished conversion asks the network nothing; to repair one, its own commit is asked for."""
    target = root / "hub" / f"{model.name}-np"
    repo = f"facebook/{model.name}"

    def open_source(kept: dict[str, Any] | None) -> Source:
        converted = 0 if kept else _bytes_of(model, model.files)

        def check_space(cache: Path, download: int) -> None:
            _check_space(model.name, {cache: download, target.parent: converted})

        snapshot = hub.fetch(repo, say, check_space, revision=kept and kept["commit"])
        provenance = {"source": f"hub: {repo}@{snapshot.commit}", "commit": snapshot.commit}
        return _checkpoint(model, snapshot.folder, provenance)

    return _weights(target, _keep_whole(target, model, lambda kept: "commit" in kept, open_source, say))


def _identity(folder: Path) -> dict[str, list[int]]:
    """Size and time of the files that a conversion depends on; empty if the folder's weights are gone."""
    try:
        files = checkpoint.weight_files(folder)
    except checkpoint.Incomplete:
        return {}
    files += tuple(folder / name for name in checkpoint.TOKENIZER_FILES if (folder / name).is_file())
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _synthetic(model: OptModel, root: Path, say: Callable[[str], None], why: str) -> Weights:
    target = root / "synthetic" / f"{model.name}-np"
    provenance = {
        "source": f"synthetic: random, seed {synthetic.SEED}, real model's scale",
        "recipe": synthetic.RECIPE,
        "prompt_ids": list(_fixed_prompt_ids(model)),
        "prompt": FIXED_PROMPT,
    }
    source = Source(provenance, lambda name: synthetic.pieces(name, model.files[name]))
    kept = _keep_whole(target, model, provenance.__eq__, lambda kept: source, say)
    return _weights(target, {**kept, "source": f"{kept['source']} ({why})"})


def _weights(target: Path, provenance: dict[str, Any]) -> Weights:
    return Weights(
        path=target.parent,
        source=provenance["source"],
        prompt_ids=tuple(provenance["prompt_ids"]),
        prompt=provenance["prompt"],
    )


def _checkpoint(model: OptModel, folder: Path, provenance: dict[str, Any]) -> Source:
    """A transformers folder as a source. Raises Refused if its tensors are not the model's."""
    tensors = checkpoint.tensors(folder, model.files)
    ids, prompt = prompt_of(folder, model)
    return Source({**provenance, "prompt_ids": list(ids), "prompt": prompt}, lambda name: tensors[name].pieces())


# ---------------------------------------------------------------- a folder of tensors, kept whole


def _keep_whole(
    target: Path,
    model: OptModel,
    is_current: Callable[[dict[str, Any]], bool],
    open_source: Callable[[dict[str, Any] | None], Source],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Make `target` hold every tensor of the model, from `open_source` where something is not there or broken.

    `open_source` is given the provenance of what is to be repaired, or None. Returns the provenance. What was
    made from a source that `is_current` no longer knows is made anew.
    """
    with _locked(target, say):
        _remove_leftovers(target)
        provenance = _read_provenance(target)
        if provenance is None or not is_current(provenance):
            if target.exists():
                say(f"{target}: {'made from something else' if provenance else 'of unknown origin'}, making it anew")
            source = open_source(None)
            _make(target, model, source, say)
            return source.provenance
        faults = broken_files(target, model)
        if faults:
            _repair(target, model, faults, lambda: open_source(provenance), say)
        return provenance


def broken_files(target: Path, model: OptModel) -> dict[str, str]:
    """What is wrong with which file of a weights folder, by name, shape, dtype and size; reads headers only."""
    faults = {}
    for name, shape in model.files.items():
        fault = _fault(target / name, shape)
        if fault:
            faults[name] = fault
    return faults


def _fault(file: Path, shape: tuple[int, ...]) -> str | None:
    try:
        values = np.lib.format.open_memmap(file, mode="r")  # as FlexGen opens it
        size = file.stat().st_size
    except FileNotFoundError:
        return "missing"
    except Exception as error:  # NumPy raises whatever the bytes of a header made it trip over
        return f"unreadable ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    if values.dtype != np.float16:
        return f"dtype {values.dtype}, not float16"
    if values.shape != shape:
        return f"shape {values.shape}, not {shape}"
    if not values.flags.c_contiguous:
        return "columns first, not rows first"
    expected = values.offset + values.nbytes
    if size != expected:
        return f"{size} bytes, not {expected}"
    return None


def _make(target: Path, model: OptModel, source: Source, say: Callable[[str], None]) -> None:
    partial = target.parent / f".{target.name}.partial"
    needed = _bytes_of(model, model.files)
    _check_space(model.name, {target.parent: needed})
    say(f"{model.name}: writing weights, {needed / GIB:.2f} GiB, to {target}")
    try:
        partial.mkdir()
        _write_all(partial, model, list(model.files), source, say)
        (partial / PROVENANCE).write_text(json.dumps(source.provenance, indent=1), encoding="utf-8")
        if target.exists():
            target.rename(target.parent / f".{target.name}.partial-old")
        partial.rename(target)
    finally:
        _remove_leftovers(target)


def _repair(
    target: Path, model: OptModel, faults: dict[str, str], open_source: Callable[[], Source], say: Callable[[str], None]
) -> None:
    for name, fault in faults.items():
        say(f"{target / name}: {fault}; making it again")
    try:
        source = open_source()
    except Refused as refusal:
        name, fault = next(iter(faults.items()))
        others = f" (and {len(faults) - 1} other files)" if len(faults) > 1 else ""
        raise Refused(
            f"{target / name}{others}: {fault}, and it cannot be made again: {refusal}; "
            f"bring the source back, or delete {target} to start over"
        ) from refusal
    _check_space(model.name, {target.parent: _bytes_of(model, faults)})
    _write_all(target, model, list(faults), source, say)


def _write_all(folder: Path, model: OptModel, names: list[str], source: Source, say: Callable[[str], None]) -> None:
    """Each tensor to its file, a few at a time; a file has its name only when it is whole."""

    def write(name: str) -> str:
        partial = folder / f".{name}.partial"
        with partial.open("wb") as file:
            header = {"descr": "<f2", "fortran_order": False, "shape": model.files[name]}
            np.lib.format.write_array_header_1_0(file, header)
            for piece in source.pieces(name):
                file.write(piece.astype("<f2", copy=False))
        partial.rename(folder / name)
        return name

    total, done = _bytes_of(model, names), 0
    said_at = time.monotonic()
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    try:
        for written in as_completed([pool.submit(write, name) for name in names]):
            done += _bytes_of(model, [written.result()])
            if time.monotonic() - said_at >= PROGRESS_EVERY_S:
                said_at = time.monotonic()
                say(f"{model.name}: {done / GIB:.2f} of {total / GIB:.2f} GiB written")
    finally:
        pool.shutdown(cancel_futures=True)


def _bytes_of(model: OptModel, names: Iterable[str]) -> int:
    return sum(FP16_BYTES * int(np.prod(model.files[name], dtype=np.int64)) + FILE_OVERHEAD_BYTES for name in names)


def _read_provenance(target: Path) -> dict[str, Any] | None:
    try:
        provenance = json.loads((target / PROVENANCE).read_text(encoding="utf-8"))
        ids = provenance["prompt_ids"]
        if not isinstance(provenance["source"], str) or not isinstance(provenance["prompt"], str):
            return None
        return provenance if ids and all(type(i) is int for i in ids) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_leftovers(target: Path) -> None:
    """What a process that died left behind; whoever holds the lock is the only one alive here."""
    for leftover in target.parent.glob(f".{target.name}.partial*"):
        if leftover.is_symlink():
            leftover.unlink()  # what it leads to is someone's own
        else:
            shutil.rmtree(leftover)
    for leftover in target.glob(".*.partial"):
        leftover.unlink()


@contextmanager
def _locked(target: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process at a time prepares a target; the kernel gives the lock back when its holder dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{target}: another process is preparing it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- the disk


def _check_space(what: str, needed: dict[Path, int]) -> None:
    """Raises Refused if the disks behind some folders have not the bytes that each is to get."""
    by_disk: dict[int, list[Path]] = {}
    for folder in needed:
        by_disk.setdefault(_nearest_existing(folder).stat().st_dev, []).append(folder)
    for folders in by_disk.values():
        wanted, free = sum(needed[folder] for folder in folders), free_bytes(folders[0])
        if wanted > free:
            raise Refused(
                f"{what}: {wanted / GIB:.2f} GiB are needed in {' and '.join(map(str, folders))}, {free / GIB:.2f} GiB "
                "are free there; free some, or set OFFLOAD_LAB_HOME (and HF_HOME) to a folder on a larger disk"
            )


def free_bytes(path: Path) -> int:
    """Bytes that may still be written where `path` is, or will be."""
    return shutil.disk_usage(_nearest_existing(path)).free


def _nearest_existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if os.path.exists(p))  # Path's raises where one may not look


def _what_the_disk_said(error: OSError, root: Path) -> str:
    where = error.filename or root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}: the disk is full; free some space, or set OFFLOAD_LAB_HOME to a folder on a larger disk"
    return f"{where}: {error.strerror or error}; set OFFLOAD_LAB_HOME to a folder that can be written and locked"


# ---------------------------------------------------------------- the prompt


def prompt_of(folder: Path, model: OptModel) -> tuple[tuple[int, ...], str]:
    """The ids of FlexGen's benchmark sentence by the tokenizer in `folder`, or the fixed ones; and which."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "merges.txt").is_file():
        return _fixed_prompt_ids(model), FIXED_PROMPT
    try:
        ids = _tokenize(folder)
    except Exception as error:  # tokenizers raises bare Exception
        return _fixed_prompt_ids(model), f"fixed token ids (tokenizer in {folder} cannot be read: {error})"
    if max(ids) >= model.vocab_size:
        return _fixed_prompt_ids(model), f"fixed token ids (tokenizer in {folder} has more tokens than the model)"
    return ids, "tokenizer"


def _tokenize(folder: Path) -> tuple[int, ...]:
    import tokenizers

    if (folder / "merges.txt").is_file():
        bpe = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    else:
        bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tuple(bpe.encode(SENTENCE).ids)
    return ids if ids[0] == BOS_ID else (BOS_ID, *ids)  # OPT's tokenizer puts it first, the bare BPE does not


def _fixed_prompt_ids(model: OptModel) -> tuple[int, ...]:
    """The fixed ids, brought into a smaller vocabulary above its special tokens 0 to 3."""
    return tuple(i if i < model.vocab_size else 4 + i % (model.vocab_size - 4) for i in FIXED_PROMPT_IDS)
