"""FlexGen's own command, nothing mended, with its tokenizer stood in for: `python benchmarks/stock.py FLAGS...`

The tokenizer would come over the network; what it gives for FlexGen's one sentence is the same list every time.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import transformers

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


if __name__ == "__main__":
    transformers.AutoTokenizer = Tokenizer
    sys.argv[0] = "flexgen.flex_opt"
    runpy.run_module("flexgen.flex_opt", run_name="__main__")
