"""FlexGen's own command, nothing mended, with its tokenizer stood in for: `python benchmarks/stock.py FLAGS...`

The tokenizer would come over the network; what it gives for FlexGen's one sentence is the same list every time.
Two flags beside FlexGen's own, neither of which touches what is measured: `--quick-start` leaves out the import of
transformers, of which nothing but the tokenizer is used; `--cold` drops each file of the disk tier from the page
cache once FlexGen has read it, as the laboratory's `--page-cache cold` does.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPT_IDS = [2, 826, 16, 5, 812, 343, 9]
PADDING_ID = 1


class Tokenizer:
    """As much of AutoTokenizer as FlexGen's `run_flexgen` calls."""

    @classmethod
    def from_pretrained(cls, name: str, padding_side: str) -> Tokenizer:
        return cls()

    def __call__(self, prompts: list[str], padding: str, max_length: int) -> SimpleNamespace:
        padded = [PADDING_ID] * (max_length - len(PROMPT_IDS)) + PROMPT_IDS
        return SimpleNamespace(input_ids=[padded] * len(prompts))

    def batch_decode(self, ids: list, skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in ids]


def read_cold() -> None:
    """Keep the disk tier out of the page cache: each file as it is read, and all as soon as they are written."""
    from flexgen import pytorch_backend

    from helpers.engine.page_cache import ColdReads, drop, write_back
    from helpers.engine.patches import CopyQueue

    cold = ColdReads()
    cold.watch_memory_maps()
    copy_worker = pytorch_backend.copy_worker_func
    synchronize = pytorch_backend.TorchDisk.synchronize

    def first_synchronize(disk: Any) -> None:
        synchronize(disk)
        for name in os.listdir(disk.path):
            write_back(os.path.join(disk.path, name))
            drop(os.path.join(disk.path, name))
        pytorch_backend.TorchDisk.synchronize = synchronize

    pytorch_backend.TorchDisk.synchronize = first_synchronize
    pytorch_backend.copy_worker_func = lambda queue, cuda_id: copy_worker(
        CopyQueue(queue, after_copy=cold.drop_opened), cuda_id
    )


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quick-start", action="store_true")
    parser.add_argument("--cold", action="store_true")
    options, flexgens = parser.parse_known_args()
    if options.quick_start:
        sys.modules["transformers"] = types.ModuleType("transformers")
    import transformers

    transformers.AutoTokenizer = Tokenizer  # type: ignore[misc]
    if options.cold:
        read_cold()
    sys.argv = ["flexgen.flex_opt", *flexgens]
    runpy.run_module("flexgen.flex_opt", run_name="__main__")


if __name__ == "__main__":
    main()
