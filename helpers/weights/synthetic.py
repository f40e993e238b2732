"""Random weights at a real model's scale, for machines that can't get the real ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

SEED = 0
# Raised when the same seed no longer gives the same weights.
RECIPE = 1

VECTOR_SCALE = 0.02  # biases, layer norms and embeddings; what transformers initialises OPT with (`init_std`)
PIECE = 1 << 20  # elements drawn at a time: 4 MiB of float32


def pieces(name: str, shape: tuple[int, ...], seed: int = SEED) -> Iterator[np.ndarray]:
    """The fp16 values of the weight `name` in C order, in pieces; they depend on seed, name and shape alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    random = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "big")))
    mean, deviation = _mean_and_deviation(name, shape)
    left = math.prod(shape)
    while left:
        values = random.standard_normal(min(left, PIECE), dtype=np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        yield values.astype(np.float16)
        left -= len(values)


def _mean_and_deviation(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name.endswith("layer_norm.weight"):
        return 1.0, VECTOR_SCALE
    if len(shape) == 2 and ".embed_" not in name:
        # 1 / sqrt(hidden size) keeps what goes through a matrix at its scale, whatever the width (opt-1.3b: 0.022).
        # So a block adds about 1.5 to each activation, far from fp16's 65,504 even after 96 of them. Next to
        # that, the embeddings' 0.02 is too small for a token's own embedding to make it its own successor.
        return 0.0, min(shape) ** -0.5
    return 0.0, VECTOR_SCALE
