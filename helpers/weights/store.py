"""Weights in FlexGen's layout, one .npy file a tensor: from the hub, from a local folder, or synthetic."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helpers import models
from helpers.errors import Refused
from helpers.home import home, locked
from helpers.machine import disks
from helpers.models import FP16_BYTES, OptModel
from helpers.units import GIB, MIB
from helpers.weights import checkpoint, hub, synthetic
from helpers.weights.prompt import FIXED_PROMPT, fixed_ids, prompt_of

THREADS = 4
PROGRESS_EVERY_S = 10.0
FILE_OVERHEAD_BYTES = 4096  # .npy header and the last disk block
# Next to the tensors: where they came from. FlexGen does not look at it.
PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Weights:
    """Weights ready for FlexGen: `path` is its --path, `source` says where they came from in one line.

    `prompt_ids` is FlexGen's benchmark sentence, unpadded; `prompt` says where the ids come from.
    """

    path: Path
    source: str
    prompt_ids: tuple[int, ...]
    prompt: str


@dataclass(frozen=True)
class Source:
    """Where tensors come from: `provenance` is kept next to them, `pieces(name)` yields one as flat fp16 arrays."""

    provenance: dict[str, Any]
    pieces: Callable[[str], Iterable[np.ndarray]]


def prepare(model_name: str, say: Callable[[str], None] = print, home_dir: Path | None = None) -> Weights:
    """Prepare the weights of a known model or a transformers folder, complete and checked.

    The first call for a model downloads and converts, or generates; later ones check each file's header and size, and
    make the weights again if one is broken. A model that the hub can't provide gets synthetic weights, and `source`
    says why. Raises Refused if the disk is too small, if a folder's tensors don't match its config, or if broken
    weights can't be made again.
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
        raise Refused(_in_words(error, root)) from error


def kept(model_name: str, home_dir: Path | None = None) -> str | None:
    """Where a known model's weights came from, if `prepare` would use the ones on disk unchanged.

    Reads headers only, and changes nothing.
    """
    model = models.resolve(model_name)
    kind = "synthetic" if model in models.SYNTHETIC_MODELS else "hub"
    target = (home_dir or home()).absolute() / "weights" / kind / f"{model.name}-np"
    provenance = _read_provenance(target)
    return provenance["source"] if provenance and not broken_files(target, model) else None


def check_folder(model_name: str) -> None:
    """Raises Refused if a model folder's weights are damaged or don't match its config. Reads headers only."""
    folder = models.local_folder(model_name)
    if folder and identity(folder):
        checkpoint.tensors(folder, models.resolve(model_name).files)


def identity(folder: Path) -> dict[str, list[int]]:
    """Size and modification time of the files that a conversion depends on; empty if the folder's weights are gone."""
    try:
        files = checkpoint.weight_files(folder)
    except checkpoint.Incomplete:
        return {}
    files += tuple(folder / name for name in checkpoint.TOKENIZER_FILES if (folder / name).is_file())
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _from_folder(model: OptModel, folder: Path, root: Path, say: Callable[[str], None]) -> Weights:
    target = root / f"folder-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}" / f"{model.name}-np"
    now = identity(folder)

    def is_current(provenance: dict[str, Any]) -> bool:
        return not now or provenance.get("identity") == now

    def open_source() -> Source:
        return _checkpoint(model, folder, {"source": f"folder: {folder}", "identity": now})

    return _weights(target, _keep(target, model, is_current, open_source, say))


def _from_hub(model: OptModel, root: Path, say: Callable[[str], None]) -> Weights:
    """A finished conversion needs no network."""
    target = root / "hub" / f"{model.name}-np"
    repo = f"facebook/{model.name}"

    def check_space(cache: Path, download: int) -> None:
        _check_space(model.name, {cache: download, target.parent: _bytes_of(model)})

    def open_source() -> Source:
        snapshot = hub.fetch(repo, say, check_space)
        return _checkpoint(model, snapshot.folder, {"source": f"hub: {repo}@{snapshot.commit}"})

    return _weights(target, _keep(target, model, lambda provenance: True, open_source, say))


def _synthetic(model: OptModel, root: Path, say: Callable[[str], None], why: str) -> Weights:
    target = root / "synthetic" / f"{model.name}-np"
    provenance = {
        "source": f"synthetic: random, seed {synthetic.SEED}, real model's scale",
        "recipe": synthetic.RECIPE,
        "prompt_ids": list(fixed_ids(model)),
        "prompt": FIXED_PROMPT,
    }
    source = Source(provenance, lambda name: synthetic.pieces(name, model.files[name]))
    kept = _keep(target, model, provenance.__eq__, lambda: source, say)
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


# ---------------------------------------------------------------- a folder of tensors, all of them or none


def _keep(
    target: Path,
    model: OptModel,
    is_current: Callable[[dict[str, Any]], bool],
    open_source: Callable[[], Source],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Make sure `target` holds every tensor of the model, made from a current source; returns its provenance."""
    waiting = f"{target}: another process is preparing it, waiting"
    with locked(target.parent / f".{target.name}.lock", lambda: say(waiting)):
        partial = target.parent / f".{target.name}.partial"
        _remove(partial)  # left by a process that died
        provenance = _read_provenance(target)
        faults = broken_files(target, model) if provenance else {}
        if provenance and is_current(provenance) and not faults:
            return provenance
        why = f"{'made from another source' if provenance else 'of unknown origin'}, making it anew"
        if faults:
            name, fault = next(iter(faults.items()))
            others = f" (and {len(faults) - 1} other files)" if len(faults) > 1 else ""
            why = f"{name}{others}: {fault}; making these weights again"
        if target.exists():
            say(f"{target}: {why}")
        try:
            source = open_source()
        except Refused as refusal:
            if not faults:
                raise
            way_out = f"bring the source back, or delete {target}"
            raise Refused(f"{target}: {why} failed: {refusal}; {way_out}") from refusal
        _remove(target)
        try:
            _write_all(partial, target, model, source, say)
        finally:
            _remove(partial)
        return source.provenance


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # a link to the user's own files
    elif folder.exists():
        shutil.rmtree(folder)


def broken_files(target: Path, model: OptModel) -> dict[str, str]:
    """The problem of each broken file in a weights folder, by name, shape, dtype and size; reads headers only."""
    faults = {name: _fault(target / name, shape) for name, shape in model.files.items()}
    return {name: fault for name, fault in faults.items() if fault}


def _fault(file: Path, shape: tuple[int, ...]) -> str | None:
    try:
        values = np.lib.format.open_memmap(file, mode="r")  # as FlexGen opens it
        size = file.stat().st_size
    except FileNotFoundError:
        return "missing"
    except Exception as error:  # a damaged header can make NumPy raise anything
        return f"unreadable ({(str(error).splitlines() or [type(error).__name__])[0][:200]})"
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


def _write_all(partial: Path, target: Path, model: OptModel, source: Source, say: Callable[[str], None]) -> None:
    """Write every tensor and the provenance to `partial`, then rename it to `target`."""
    needed = _bytes_of(model)
    _check_space(model.name, {target.parent: needed})
    say(f"{model.name}: writing weights, {needed / GIB:.2f} GiB, to {target}")
    partial.mkdir()

    def write(name: str) -> int:
        with (partial / name).open("wb") as file:
            header = {"descr": "<f2", "fortran_order": False, "shape": model.files[name]}
            np.lib.format.write_array_header_1_0(file, header)
            for piece in source.pieces(name):
                file.write(piece.astype("<f2", copy=False).tobytes())
            return file.tell()

    done, said_at = 0, time.monotonic()
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    try:
        for written in as_completed([pool.submit(write, name) for name in model.files]):
            done += written.result()
            if time.monotonic() - said_at >= PROGRESS_EVERY_S:
                said_at = time.monotonic()
                say(f"{model.name}: {done / GIB:.2f} of {needed / GIB:.2f} GiB written")
    finally:
        pool.shutdown(cancel_futures=True)
    (partial / PROVENANCE).write_text(json.dumps(source.provenance, indent=1), encoding="utf-8")
    partial.rename(target)


def _bytes_of(model: OptModel) -> int:
    return sum(FP16_BYTES * int(np.prod(shape, dtype=np.int64)) + FILE_OVERHEAD_BYTES for shape in model.files.values())


def _read_provenance(target: Path) -> dict[str, Any] | None:
    try:
        provenance = json.loads((target / PROVENANCE).read_text(encoding="utf-8"))
        ids = provenance["prompt_ids"]
        if not isinstance(provenance["source"], str) or not isinstance(provenance["prompt"], str):
            return None
        return provenance if ids and all(type(i) is int for i in ids) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_space(what: str, needed: dict[Path, int]) -> None:
    """Raises Refused if these folders' disks lack room for the bytes each will receive."""
    by_disk: dict[int, list[Path]] = {}
    for folder in needed:
        by_disk.setdefault(disks.nearest_existing(folder).stat().st_dev, []).append(folder)
    for folders in by_disk.values():
        wanted, free = sum(needed[folder] for folder in folders), disks.free_bytes(folders[0])
        if wanted > free:
            unit, name = (GIB, "GiB") if wanted >= 0.1 * GIB else (MIB, "MiB")
            raise Refused(
                f"{what}: {wanted / unit:.1f} {name} are needed in {' and '.join(map(str, folders))}, "
                f"{free / unit:.1f} {name} "
                "are free there; free some, or set OFFLOAD_LAB_HOME (and HF_HOME) to a folder on a larger disk"
            )


def _in_words(error: OSError, root: Path) -> str:
    where = error.filename or root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}: the disk is full; free some space, or set OFFLOAD_LAB_HOME to a folder on a larger disk"
    return f"{where}: {error.strerror or error}; set OFFLOAD_LAB_HOME to a folder that can be written and locked"
