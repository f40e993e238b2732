"""Patches for FlexGen 0.1.8, each with its reason.

None of them changes a run's results or its schedule where FlexGen itself gets them right.
"""

from __future__ import annotations

import importlib
import mmap
import os
import queue as queues
import shutil
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

LOADING_THREADS = 4


def import_flexgen() -> types.ModuleType:
    """Import FlexGen's `flex_opt` without transformers, which it needs for one tokenizer call.

    transformers takes 9 to 12 s to import, and the lab gives FlexGen the prompt's token ids.
    """
    loaded = sys.modules.get("transformers")
    stand_in = types.ModuleType("transformers")
    stand_in.AutoTokenizer = None  # type: ignore[attr-defined]
    sys.modules["transformers"] = stand_in
    try:
        return importlib.import_module("flexgen.flex_opt")
    finally:
        del sys.modules["transformers"]
        if loaded is not None:
            sys.modules["transformers"] = loaded


def mend() -> None:
    """Apply the patches that every run needs; once per process."""
    from flexgen import compression, flex_opt, pytorch_backend

    index_with_tuples(compression)
    link_weights_on_disk(pytorch_backend)
    finish_moves_to_and_from_disk(pytorch_backend)
    gather_in_memory(pytorch_backend)
    wait_where_nothing_overlaps(flex_opt)


def index_with_tuples(compression: Any) -> None:
    """`get_compressed_indices` returns lists of slices; torch warns that indexing with a list will change meaning."""
    original = compression.get_compressed_indices

    def get_compressed_indices(tensor: Any, indices: Any, shape: Any) -> tuple[tuple, tuple]:
        data_indices, scale_indices = original(tensor, indices, shape)
        return tuple(data_indices), tuple(scale_indices)

    compression.get_compressed_indices = get_compressed_indices


def link_weights_on_disk(pytorch_backend: Any) -> None:
    """Link weights of the disk tier into the offload folder; FlexGen copies them in every run.

    FlexGen only reads weights, and its clean-up removes the link, not the original. Across file systems, or without
    hard links, the weight is copied as before.
    """
    original = pytorch_backend.TorchTensor.load_from_np_file

    def load_from_np_file(tensor: Any, filename: str) -> None:
        if tensor.device.device_type != pytorch_backend.DeviceType.DISK:
            original(tensor, filename)
            return
        os.remove(tensor.data)  # the empty file that allocate() made
        try:
            os.link(filename, tensor.data)
        except OSError:
            shutil.copy(filename, tensor.data)

    pytorch_backend.TorchTensor.load_from_np_file = load_from_np_file


def finish_moves_to_and_from_disk(pytorch_backend: Any) -> None:
    """`move` leaves the copy to a copy thread and deletes its source at once: activations on disk are gone before
    they are copied (and their file's header holds `torch.Size(...)`, which NumPy cannot read). This makes the copy
    at once; the next computation needs it, so nothing could overlap.
    """
    original = pytorch_backend.TorchTensor.move

    def move(tensor: Any, dst: Any) -> Any:
        disk = pytorch_backend.DeviceType.DISK
        if tensor.device == dst or disk not in (tensor.device.device_type, dst.device_type):
            return original(tensor, dst)
        moved = dst.allocate(tuple(tensor.shape), pytorch_backend.torch_dtype_to_np_dtype[tensor.dtype])
        pytorch_backend.map_to_torch_tensor(moved, None).copy_(pytorch_backend.map_to_torch_tensor(tensor, None))
        tensor.delete()
        return moved

    pytorch_backend.TorchTensor.move = move


def gather_in_memory(pytorch_backend: Any) -> None:
    """Sparse attention copies rows of the value cache selected by a tensor. `general_copy` evaluates that tensor as a
    boolean, which fails; only the copy threads, for a cache on disk, can gather rows.
    """
    original = pytorch_backend.general_copy

    def general_copy(dst: Any, dst_indices: Any, src: Any, src_indices: Any) -> None:
        on_disk = src.device.device_type == pytorch_backend.DeviceType.DISK
        if on_disk or not isinstance(src_indices, pytorch_backend.torch.Tensor):
            original(dst, dst_indices, src, src_indices)
            return
        rows = src_indices.cuda() if src.data.is_cuda else src_indices
        dst.data[dst_indices].copy_(pytorch_backend.vector_gather(src.data, rows))

    pytorch_backend.general_copy = general_copy


def wait_where_nothing_overlaps(flex_opt: Any) -> None:
    """With `--overlap false` FlexGen requests a layer and computes with it at once. Data from copy threads (from
    disk, or to unpinned host memory) hasn't arrived yet: the tokens are wrong, and the times too short.
    """
    for name in ("load_weight", "load_cache", "store_cache"):
        setattr(flex_opt.OptLM, name, _then_wait(getattr(flex_opt.OptLM, name)))


def _then_wait(original: Callable[..., None]) -> Callable[..., None]:
    def and_wait(lm: Any, i: int, j: int, k: int, overlap: bool = True) -> None:
        original(lm, i, j, k, overlap)
        if not overlap:
            lm.env.disk.synchronize()

    return and_wait


def load_weights_side_by_side(
    pytorch_backend: Any, flex_opt: Any, on_thread: Callable[[], AbstractContextManager]
) -> None:
    """FlexGen reads (and with `--compress-weight` compresses, on the CPU) one weight after another. Each is a file and
    a tensor of its own: several threads do them at once. All are still allocated one by one, in FlexGen's order.
    """
    load = pytorch_backend.TorchTensor.load_from_np_file
    initialise = flex_opt.OptLM.init_all_weights

    def load_on_thread(tensor: Any, filename: str) -> None:
        with on_thread():
            load(tensor, filename)

    def init_all_weights(lm: Any) -> None:
        with ThreadPoolExecutor(LOADING_THREADS) as pool:
            loads = []
            pytorch_backend.TorchTensor.load_from_np_file = lambda *which: loads.append(
                pool.submit(load_on_thread, *which)
            )
            try:
                initialise(lm)
            finally:
                pytorch_backend.TorchTensor.load_from_np_file = load
            for one in loads:
                one.result()

    flex_opt.OptLM.init_all_weights = init_all_weights


def pinned_side_by_side() -> AbstractContextManager:
    """A copy thread asks CUDA for its 2 GiB of pinned memory; CUDA zeroes and pins one page after another, and one
    thread after another: 3.9 s in every run. Here each thread touches its own memory in parallel with the
    others, and CUDA then pins it: 0.8 s, and copies are as fast. Where CUDA refuses, it allocates as before.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class PinnedSideBySide(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function is not torch.empty or not kwargs.get("pin_memory"):
                return function(*args, **kwargs)
            try:
                buffer = function(*args, **kwargs | {"pin_memory": False})
            except RuntimeError:  # no such memory: leave the error to CUDA
                return function(*args, **kwargs)
            buffer.view(torch.uint8)[:: mmap.PAGESIZE] = 0
            if not buffer.nbytes or int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
                return buffer
            del buffer
            with suppress(RuntimeError):  # clear the error, or CUDA reports it at the next kernel
                torch.ones(1, device="cuda")
            return function(*args, **kwargs)

    return PinnedSideBySide()


class CopyQueue:
    """FlexGen's copy queue as one copy thread sees it, with a call when the thread is ready to take copies, its buffer
    pinned, and one after each copy is done."""

    def __init__(
        self,
        queue: queues.Queue,
        when_ready: Callable[[], None] = lambda: None,
        after_copy: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._when_ready: Callable[[], None] | None = when_ready
        self._after_copy = after_copy

    def get(self) -> Any:
        if self._when_ready:
            self._when_ready()
            self._when_ready = None
        return self._queue.get()

    def task_done(self) -> None:
        self._after_copy()
        self._queue.task_done()
