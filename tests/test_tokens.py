"""The oracle: whatever the split, FlexGen's greedy tokens are those of transformers on the same weights."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from factories import SMALL, done, mini, quiet, run_one
from helpers.models import EMULATED_MODEL
from helpers.placement import place
from helpers.settings import Workload
from helpers.weights import store

LONG = Workload(gpu_batch_size=4, num_gpu_batches=1, prompt_len=40, gen_len=6)
TWO_BATCHES = Workload(gpu_batch_size=2, num_gpu_batches=2, prompt_len=16, gen_len=4)
THREE_ODD_BATCHES = Workload(gpu_batch_size=1, num_gpu_batches=3, prompt_len=9, gen_len=5)


# ---- transformers


def quantised(values):
    """What 4 bits leave of a matrix, by the rule FlexGen documents: groups of 64 rows (the last filled with zeros),
    each column of a group from its minimum to its maximum in 15 steps, minimum and steps kept in fp16.
    """
    rows = len(values)
    filled = np.zeros((-(-rows // 64) * 64, *values.shape[1:]), np.float32)
    filled[:rows] = values
    groups = filled.reshape(-1, 64, *values.shape[1:])
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    per_step = np.float32(15) * (np.float32(1) / (high - low))  # as torch divides a number by a tensor
    levels = np.rint(np.clip((groups - low) * per_step, 0, 15)).astype(np.float16)
    with np.errstate(over="ignore"):  # a group with next to no range: its steps are infinite, all of it is its minimum
        back = levels / per_step.astype(np.float16) + low.astype(np.float16)
    return back.reshape(filled.shape)[:rows]


@cache
def transformers_model(compressed):
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    model = EMULATED_MODEL
    config = OPTConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        word_embed_proj_dim=model.hidden_size,
        ffn_dim=4 * model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        max_position_embeddings=model.max_positions,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=None,
    )
    folder = store.prepare(model.name, quiet).path / f"{model.name}-np"
    state = {}
    for name, shape in model.files.items():
        values = np.load(folder / name)
        if compressed and len(shape) == 2:
            values = quantised(values)
        name = name.replace("decoder.layer_norm", "decoder.final_layer_norm")
        state[f"model.{name}"] = torch.from_numpy(values.astype(np.float32))
    state["lm_head.weight"] = state["model.decoder.embed_tokens.weight"]
    oracle = OPTForCausalLM(config).float().eval()
    oracle.load_state_dict(state)
    return oracle


@cache
def expected(prompt_len, gen_len, compressed=False):
    """The tokens after FlexGen's sentence, padded on the left and masked, and how clearly each of them won."""
    import torch

    prompt = store.prepare("opt-mini", quiet).prompt_ids
    ids = torch.tensor([[1] * (prompt_len - len(prompt)) + list(prompt)])
    mask = (ids != 1).long()
    with torch.inference_mode():
        out = transformers_model(compressed).generate(
            ids,
            attention_mask=mask,
            max_new_tokens=gen_len,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best_two = torch.stack(out.logits).squeeze(1).topk(2).values
    return tuple(out.sequences[0, prompt_len:].tolist()), (best_two[:, 0] - best_two[:, 1]).tolist()


def assert_transformers_tokens(record):
    work, compressed = record.settings.workload, record.settings.compress_weight
    tokens, _ = expected(work.prompt_len, work.gen_len, compressed)
    assert done(record).generated_tokens == (tokens,) * work.effective_batch


# ---- what the oracle is worth


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("work", [SMALL, LONG, TWO_BATCHES, THREE_ODD_BATCHES])
def test_the_expected_tokens_say_something(work, compressed):
    """Not one token over and over, and none won by what fp16 might round away: 0.001 of a logit of about 1."""
    tokens, margins = expected(work.prompt_len, work.gen_len, compressed)
    assert len(set(tokens)) >= 3
    assert min(margins) > 0.002


def test_padding_is_not_read():
    assert expected(9, 4)[0] == expected(40, 6)[0][:4]


def test_four_bits_give_other_tokens():
    assert expected(16, 4, True)[0] != expected(16, 4, False)[0]


# ---- every kind of split


@pytest.mark.parametrize(
    "percent, workload, options",
    [
        ("100 0 100 0 100 0", SMALL, {}),
        ("100 0 100 0 100 0", LONG, {}),
        ("0 100 100 0 100 0", SMALL, {}),
        ("0 0 100 0 100 0", SMALL, {}),
        ("40 40 100 0 100 0", SMALL, {}),
        ("100 0 50 50 100 0", SMALL, {}),
        ("100 0 40 30 100 0", LONG, {}),
        ("100 0 0 100 100 0", SMALL, {}),
        ("100 0 0 0 100 0", SMALL, {}),
        ("100 0 100 0 0 100", SMALL, {}),
        ("100 0 100 0 0 0", SMALL, {}),
        ("100 0 100 0 100 0", TWO_BATCHES, {}),
        ("40 40 40 30 0 0", TWO_BATCHES, {}),
        ("50 50 30 70 0 100", THREE_ODD_BATCHES, {}),
        ("100 0 100 0 100 0", SMALL, {"cpu_cache_compute": True}),
        ("100 0 0 100 100 0", LONG, {"cpu_cache_compute": True}),
        ("100 0 40 30 100 0", SMALL, {"cpu_cache_compute": True}),
        ("100 0 0 0 100 0", TWO_BATCHES, {"cpu_cache_compute": True}),
        ("100 0 100 0 100 0", SMALL, {"overlap": False}),
        ("40 40 40 30 0 0", TWO_BATCHES, {"overlap": False}),
        ("0 100 100 0 100 0", SMALL, {"pin_weight": False}),
        ("0 100 100 0 100 0", SMALL, {"attn_sparsity": 1.0, "page_cache": "cold"}),
        ("40 40 100 0 100 0", SMALL, {"page_cache": "cold"}),
        ("100 0 100 0 100 0", SMALL, {"compress_weight": True}),
        ("0 100 100 0 100 0", LONG, {"compress_weight": True}),
        ("0 0 100 0 100 0", SMALL, {"compress_weight": True}),
        ("40 40 40 30 0 0", TWO_BATCHES, {"compress_weight": True, "overlap": False, "pin_weight": False}),
    ],
    ids=str,
)
def test_tokens_are_transformers(percent, workload, options, tmp_path):
    settings = mini(percent, workload, **options)
    record = run_one(settings, tmp_path)
    assert_transformers_tokens(record)
    split = settings.split
    placed = place(EMULATED_MODEL, split.weights_gpu, split.weights_cpu, settings.compress_weight)
    assert record.bytes_by_tier == placed.bytes_by_tier
    assert len(record.repeats) == 1 and len(record.repeats[0].pass_latencies_s) == workload.gen_len


def test_sparse_attention_gives_the_same_tokens_on_every_tier(tmp_path):
    """What is left out of a cache does not depend on its tier. One row in 33 is few enough to matter."""
    runs = {
        (percent, on_cpu): run_one(mini(percent, LONG, attn_sparsity=0.03, cpu_cache_compute=on_cpu), tmp_path)
        for percent in ("100 0 100 0 100 0", "100 0 0 100 100 0", "100 0 0 0 100 0")
        for on_cpu in (False, True)
    }
    tokens = {run: done(record).generated_tokens for run, record in runs.items()}
    assert len(set(tokens.values())) == 1, tokens
    (found, *_) = tokens["100 0 100 0 100 0", False]
    assert len(found) == LONG.gen_len and found != expected(LONG.prompt_len, LONG.gen_len)[0]


def test_a_compressed_cache_gives_the_same_tokens_on_every_tier(tmp_path):
    runs = {
        (percent, on_cpu): run_one(mini(percent, LONG, compress_cache=True, cpu_cache_compute=on_cpu), tmp_path)
        for percent in ("100 0 100 0 100 0", "100 0 0 100 100 0", "100 0 0 0 100 0")
        for on_cpu in (False, True)
    }
    tokens = {run: done(record).generated_tokens for run, record in runs.items()}
    assert len(set(tokens.values())) == 1, tokens
    # The first token is computed before anything is in the cache.
    assert tokens["100 0 100 0 100 0", False][0][0] == expected(LONG.prompt_len, LONG.gen_len)[0][0]
