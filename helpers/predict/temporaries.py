"""GPU memory that one layer's computation allocates and frees, in FlexGen's order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from helpers.models import FP16_BYTES, OptModel
from helpers.placement import GROUP_SIZE
from helpers.predict.tensors import FP32_BYTES, INT32_BYTES, INT64_BYTES, LARGE_BLOCK, CacheShape, block_bytes


class _Tape:
    """Bytes alive while a method runs, by part, and at their peak."""

    def __init__(self) -> None:
        self.live = dict.fromkeys(("activations", "logits", "decompression"), 0)
        self.total = self.peak = 0
        self.large_blocks = self.large_blocks_at_peak = 0
        self.at_peak = dict(self.live)

    def take(self, requested: int, part: str = "activations") -> tuple[str, int]:
        counted = block_bytes(requested)
        self.live[part] += counted
        self.total += counted
        self.large_blocks += counted > LARGE_BLOCK
        if self.total > self.peak:
            self.peak, self.at_peak, self.large_blocks_at_peak = self.total, dict(self.live), self.large_blocks
        return part, counted

    def free(self, *taken: tuple[str, int]) -> None:
        for part, counted in taken:
            self.live[part] -= counted
            self.total -= counted
            self.large_blocks -= counted > LARGE_BLOCK

    def decompress(self, values_bytes: int, fp16_bytes: int) -> tuple[str, int]:
        """TorchCompressedDevice.decompress: the fp16 result, plus half of the nibbles at a time."""
        result = self.take(fp16_bytes, "decompression")
        self.free(self.take(values_bytes, "decompression"))
        return result

    def compress(self, elements: int, groups: int, fp16: tuple[str, int]) -> tuple[tuple[str, int], ...]:
        """TorchCompressedDevice.compress of an fp16 tensor, which it frees; returns values and scales."""
        low = self.take(FP16_BYTES * groups)
        high = self.take(FP16_BYTES * groups)
        scale = self.take(FP16_BYTES * groups)
        shifted = self.take(FP16_BYTES * elements)
        nibbles = self.take(elements)
        self.free(shifted)
        left = self.take(elements // 2)
        values = self.take(elements // 2)
        self.free(nibbles, left)
        scales = self.take(2 * FP16_BYTES * groups)
        self.free(low, high, scale, fp16)
        return values, scales


def _layer_norm(tape: _Tape, tokens: int, hidden_bytes: int) -> tuple[str, int]:
    result = tape.take(hidden_bytes)
    statistics = tape.take(FP32_BYTES * tokens), tape.take(FP32_BYTES * tokens)
    tape.free(*statistics)
    return result


@dataclass(frozen=True)
class Temporaries:
    """Bytes that a layer's computation adds at its peak, its input included, and the new keys and values it leaves."""

    at_peak: dict[str, int]
    large_blocks: int
    new_cache_bytes: int


@lru_cache(maxsize=50_000)
def temporaries(
    kind: str,
    model: OptModel,
    batch: int,
    tokens: int,
    context: int,
    prefill: bool,
    decompress: tuple[tuple[int, int], ...],
    cache_compressed: bool,
    cache_on_gpu: float,
    sparsity: float,
) -> Temporaries:
    """Temporaries of TorchDevice.opt_input_embed, mha, mha_gen, mlp and opt_output_embed, in order.

    `decompress`: bytes of values and of fp16 for each 4-bit weight; `cache_on_gpu`: the share of the sequences whose
    attention the GPU computes in decode.
    """
    tape = _Tape()
    hidden = FP16_BYTES * batch * tokens * model.hidden_size
    if kind == "input_embed":
        tape.take(INT32_BYTES * batch * tokens)
    else:
        inputs = tape.take(hidden)
    for values_bytes, fp16_bytes in decompress:
        tape.decompress(values_bytes, fp16_bytes)
    new_cache = 0

    if kind == "input_embed":
        tape.take(hidden)
        cumulated = tape.take(INT64_BYTES * batch * context)
        tape.free(cumulated)
        tape.take(INT32_BYTES * batch * context)
        tape.take(hidden)
        tape.take(hidden)
    elif kind == "output_embed":
        _layer_norm(tape, batch * tokens, hidden)
        tape.free(inputs)
        tape.take(FP16_BYTES * batch * tokens * model.vocab_size, "logits")
        tape.take(INT64_BYTES * batch)
    elif kind == "mlp":
        normed = _layer_norm(tape, batch * tokens, hidden)
        tape.take(4 * hidden)
        tape.free(normed)
        tape.take(hidden)
    elif prefill:
        new_cache = _prefill_attention(tape, inputs, model, batch, tokens, cache_compressed)
    else:
        new_cache = _decode_attention(tape, inputs, model, batch, context, cache_compressed, cache_on_gpu, sparsity)
    return Temporaries(tape.at_peak, tape.large_blocks_at_peak, new_cache)


def _prefill_attention(
    tape: _Tape, inputs: tuple[str, int], model: OptModel, batch: int, s: int, compress: bool
) -> int:
    hidden = FP16_BYTES * batch * s * model.hidden_size
    scores_bytes = FP16_BYTES * batch * model.num_heads * s * s
    _layer_norm(tape, batch * s, hidden)
    unscaled = tape.take(hidden)
    q = tape.take(hidden)
    tape.free(unscaled)
    k, v = tape.take(hidden), tape.take(hidden)
    if batch > 1:  # one sequence is reshaped without a copy
        for old in (q, k, v):
            tape.take(hidden)
            tape.free(old)
    scores = tape.take(scores_bytes)
    tape.take(INT64_BYTES * s)
    tape.take(s * s)
    tape.take(batch * s * s)
    masked = tape.take(scores_bytes)
    tape.free(scores)
    tape.take(scores_bytes)
    tape.free(masked)
    value = tape.take(hidden)
    joined = tape.take(hidden)
    tape.free(value)
    tape.take(hidden)
    tape.free(joined)
    tape.free(inputs)
    return _new_cache(tape, k, v, CacheShape(model, batch, s, compress))


def _new_cache(tape: _Tape, k: tuple[str, int], v: tuple[str, int], shape: CacheShape) -> int:
    """Bytes of the new keys and values; compresses them if the cache is compressed."""
    if not shape.compressed:
        return k[1] + v[1]
    vectors = shape.positions * shape.batch * shape.model.num_heads * shape.groups
    kept = 0
    for fp16 in (k, v):
        kept += sum(counted for _, counted in tape.compress(vectors * GROUP_SIZE, vectors, fp16))
    return kept


def _decode_attention(
    tape: _Tape,
    inputs: tuple[str, int],
    model: OptModel,
    batch: int,
    context: int,
    compress: bool,
    on_gpu: float,
    sparsity: float,
) -> int:
    hidden = FP16_BYTES * batch * model.hidden_size
    _layer_norm(tape, batch, hidden)
    unscaled = tape.take(hidden)
    tape.take(hidden)
    tape.free(unscaled)
    k, v = tape.take(hidden), tape.take(hidden)
    if on_gpu < 1:
        tape.take(2 * hidden)  # the query, as fp32, on its way to the CPU
        tape.take(2 * hidden)  # and attention's result on its way back
    if on_gpu:
        cache = CacheShape(model, batch, context, compress)
        if compress:
            for _ in range(2):
                tape.decompress(cache.buffers[0], cache.decompressed_bytes)
        scores_bytes = int(on_gpu * FP16_BYTES * batch * model.num_heads * context)
        scores = tape.take(scores_bytes)
        masked = tape.take(scores_bytes)
        tape.free(scores)
        tape.take(scores_bytes)
        tape.free(masked)
        if sparsity < 1:
            top = int(sparsity * (context - 1))
            tape.take(FP16_BYTES * batch * model.num_heads * top)
            tape.take(INT64_BYTES * batch * model.num_heads * top)
            tape.take(hidden * (top + 1))
            tape.take(hidden * (top + 1))
    tape.take(hidden)
    tape.take(hidden)
    tape.free(inputs)
    return _new_cache(tape, k, v, CacheShape(model, batch, 1, compress))
