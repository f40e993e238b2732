"""What FlexGen 0.1.8 needs mended to run here: each mend with its reason, all in one place.

None of them changes what a run computes, or the schedule it computes it in.
"""

from __future__ import annotations

import importlib
import os
import queue as queues
import shutil
import sys
import types
from collections.abc import Callable
from typing import Any


def import_flexgen() -> types.ModuleType:
    """Import FlexGen's `flex_opt` without transformers, of which it wants one tokenizer call.

    transformers takes 9 to 12 s to import, and the laboratory hands FlexGen the prompt's token ids.
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
    """Mend FlexGen in this process, once."""
    from flexgen import compression, pytorch_backend

    index_with_tuples(compression)
    link_weights_on_disk(pytorch_backend)


def index_with_tuples(compression: Any) -> None:
    """`get_compressed_indices` gives lists of slices; torch is about to give indexing with a list another meaning."""
    original = compression.get_compressed_indices

    def get_compressed_indices(tensor: Any, indices: Any, shape: Any) -> tuple[tuple, tuple]:
        data_indices, scale_indices = original(tensor, indices, shape)
        return tuple(data_indices), tuple(scale_indices)

    compression.get_compressed_indices = get_compressed_indices


def link_weights_on_disk(pytorch_backend: Any) -> None:
    """FlexGen copies each weight of the disk tier into the offload folder, every run; a link is the same file.

    FlexGen only reads weights, and its clean-up removes the link, not the original. Where the file system cannot
    link (other file system, no hard links), it is copied as before.
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


class CopyQueue:
    """FlexGen's copy queue as one copy thread sees it, with a call after each copy is done."""

    def __init__(self, queue: queues.Queue, after_copy: Callable[[], None]) -> None:
        self.get = queue.get
        self._queue = queue
        self._after_copy = after_copy

    def task_done(self) -> None:
        self._after_copy()
        self._queue.task_done()
