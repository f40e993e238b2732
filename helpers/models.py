"""The models FlexGen can run: their shapes, their layers, and the names people give them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from helpers.errors import Refused

FP16_BYTES = 2


@dataclass(frozen=True)
class TensorSpec:
    """One weight as FlexGen stores it: the file's name, and its shape (rows first)."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Layer:
    """One step of FlexGen's schedule; `kind` is input_embed, attention, mlp or output_embed."""

    kind: str
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class OptModel:
    """An OPT architecture in FlexGen's terms (pre-norm, feed-forward width 4 x hidden, fp16)."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int = 50272
    max_positions: int = 2048

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """FlexGen's layers in the order it runs them, attention and MLP apart (`--sep-layer`)."""
        h, v = self.hidden_size, self.vocab_size
        token_embedding = TensorSpec("decoder.embed_tokens.weight", (v, h))
        layers = [
            Layer(
                "input_embed",
                (token_embedding, TensorSpec("decoder.embed_positions.weight", (self.max_positions + 2, h))),
            )
        ]
        for i in range(self.num_layers):
            prefix = f"decoder.layers.{i}."
            attention = []
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                attention.append(TensorSpec(f"{prefix}self_attn.{projection}.weight", (h, h)))
                attention.append(TensorSpec(f"{prefix}self_attn.{projection}.bias", (h,)))
            attention.append(TensorSpec(f"{prefix}self_attn_layer_norm.weight", (h,)))
            attention.append(TensorSpec(f"{prefix}self_attn_layer_norm.bias", (h,)))
            mlp = (
                TensorSpec(f"{prefix}fc1.weight", (4 * h, h)),
                TensorSpec(f"{prefix}fc1.bias", (4 * h,)),
                TensorSpec(f"{prefix}fc2.weight", (h, 4 * h)),
                TensorSpec(f"{prefix}fc2.bias", (h,)),
                TensorSpec(f"{prefix}final_layer_norm.weight", (h,)),
                TensorSpec(f"{prefix}final_layer_norm.bias", (h,)),
            )
            layers += [Layer("attention", tuple(attention)), Layer("mlp", mlp)]
        layers.append(
            Layer(
                "output_embed",
                (
                    TensorSpec("decoder.layer_norm.weight", (h,)),
                    TensorSpec("decoder.layer_norm.bias", (h,)),
                    token_embedding,
                ),
            )
        )
        return tuple(layers)

    @cached_property
    def files(self) -> dict[str, tuple[int, ...]]:
        """Every weight file of the model, name to shape; the shared embedding appears once."""
        return {tensor.name: tensor.shape for layer in self.layers for tensor in layer.tensors}

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the fp16 weights as FlexGen allocates them: the token embedding counts twice."""
        return FP16_BYTES * sum(t.elements for layer in self.layers for t in layer.tensors)

    def kv_cache_bytes(self, batch: int, prompt_len: int, gen_len: int) -> int:
        """Bytes of the fp16 KV cache of `batch` sequences (FlexGen keeps prompt + gen - 1 positions)."""
        return 2 * FP16_BYTES * self.num_layers * (prompt_len + gen_len - 1) * batch * self.hidden_size


# Small enough for a CPU to emulate a GPU pass in a few milliseconds.
EMULATED_MODEL = OptModel("opt-mini", num_layers=2, hidden_size=256, num_heads=4, vocab_size=1024, max_positions=512)
# A few layers as wide as OPT-1.3B's, for short runs that measure a machine's rates.
PROBE_MODEL = OptModel("opt-probe", num_layers=3, hidden_size=2048, num_heads=32, vocab_size=1024)
# This lab's own models; no hub has them.
SYNTHETIC_MODELS = (EMULATED_MODEL, PROBE_MODEL)

# The shapes of flexgen.opt_config.get_opt_config, copied so that reading them doesn't import torch;
# tests/test_models.py compares them with FlexGen's own.
KNOWN_MODELS = {
    model.name: model
    for model in (
        *SYNTHETIC_MODELS,
        OptModel("opt-125m", 12, 768, 12),
        OptModel("opt-1.3b", 24, 2048, 32),
        OptModel("opt-2.7b", 32, 2560, 32),
        OptModel("opt-6.7b", 32, 4096, 32),
        OptModel("opt-13b", 40, 5120, 40),
        OptModel("opt-30b", 48, 7168, 56),
        OptModel("opt-66b", 64, 9216, 72),
        OptModel("opt-175b", 96, 12288, 96),
        OptModel("opt-175b-stage", 24, 12288, 96),
        OptModel("galactica-30b", 48, 7168, 56, vocab_size=50000),
    )
}

# Bounds on a config's sizes, about ten times the largest OPT's, so that a slip is refused at once.
SANE = {
    "num_hidden_layers": (1, 1_000),
    "hidden_size": (1, 131_072),
    "num_attention_heads": (1, 1_024),
    "vocab_size": (5, 1_000_000),  # over OPT's four special tokens
    "max_position_embeddings": (8, 1_000_000),  # over FlexGen's sentence
}


def resolve(name: str) -> OptModel:
    """The model that `name` means: `opt-1.3b`, `OPT-1.3B`, `facebook/opt-1.3b`, `opt-1.3b-np`, or a folder in which
    transformers saved an OPT model.

    Raises Refused, listing the choices, for a name that FlexGen has no model for.
    """
    folder = local_folder(name)
    return by_name(name) if folder is None else _from_transformers_config(folder)


def by_name(name: str) -> OptModel:
    """Look a model up by name, ignoring folders. Raises Refused as `resolve` does."""
    short = name.strip().lower().removeprefix("facebook/").removesuffix("-np")
    if short in KNOWN_MODELS:
        return KNOWN_MODELS[short]
    iml = re.fullmatch(r"opt-iml(?:-max)?-(1\.3b|30b)", short)
    if iml:
        base = KNOWN_MODELS[f"opt-{iml[1]}"]
        return OptModel(short, base.num_layers, base.hidden_size, base.num_heads)
    if short == "opt-350m":
        raise Refused(
            "model 'opt-350m': FlexGen does not implement it (it normalises after each block and "
            "projects its embeddings); nearest: opt-125m, opt-1.3b"
        )
    raise Refused(
        f"model {name!r}: neither a model FlexGen knows ({', '.join(KNOWN_MODELS)}) "
        "nor a folder with a transformers OPT model (config.json)"
    )


def local_folder(name: str) -> Path | None:
    """The transformers folder that `name` points to, or None if it points to none."""
    folder = os.path.expanduser(name)  # unlike Path's, this and isfile accept any text
    return Path(folder).resolve() if os.path.isfile(os.path.join(folder, "config.json")) else None


def _from_transformers_config(folder: Path) -> OptModel:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        hidden = config.get("hidden_size")
        if config.get("model_type") != "opt":
            raise Refused(f"{path}: model_type is {config.get('model_type')!r}, FlexGen's OPT needs 'opt'")
        for key, (least, most) in SANE.items():
            if type(config[key]) is not int or not least <= config[key] <= most:
                raise Refused(f"{path}: {key} is {config[key]!r}, not a whole number from {least} to {most:,}")
        heads = config["num_attention_heads"]
        if hidden % heads:
            raise Refused(f"{path}: num_attention_heads is {heads}, which doesn't divide hidden_size {hidden}")
        required = {
            "do_layer_norm_before": True,
            "ffn_dim": 4 * hidden,
            "word_embed_proj_dim": hidden,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "pad_token_id": 1,
        }
        for key, wanted in required.items():
            default = 3072 if key == "ffn_dim" else wanted  # transformers' default for OPT
            if config.get(key, default) != wanted:
                raise Refused(f"{path}: {key} is {config.get(key, default)!r}, FlexGen's OPT needs {wanted!r}")
        name = re.sub(r"[^a-z0-9._-]+", "-", folder.name.lower()).strip(".-") or "local-opt"
        return OptModel(
            name,
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            num_heads=heads,
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
        )
    except Refused:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{path}: not a readable transformers OPT config ({error!r})") from error
