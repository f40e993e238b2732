"""Models: the shapes are FlexGen's own, and a name means one model or is refused with the choices."""

from __future__ import annotations

import inspect
import json
import os
import re
from types import SimpleNamespace

import pytest

from factories import mini
from helpers import models
from helpers.engine import patches
from helpers.errors import Refused

IML_NAMES = ("opt-iml-1.3b", "opt-iml-30b", "opt-iml-max-1.3b", "opt-iml-max-30b")
FLEXGENS_NAMES = tuple(name for name, model in models.KNOWN_MODELS.items() if model not in models.SYNTHETIC_MODELS)

CONFIG = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
}


@pytest.fixture(scope="module")
def flexgen():
    return patches.import_flexgen()


@pytest.fixture
def folder(tmp_path):
    """A folder with a transformers configuration; `change` writes it with other fields."""
    place = tmp_path / "My OPT (tiny)"
    place.mkdir()

    def change(**fields):
        (place / "config.json").write_text(json.dumps(CONFIG | fields))
        return str(place)

    change()
    return change


# ---- the shapes


@pytest.mark.parametrize("name", FLEXGENS_NAMES + IML_NAMES)
def test_shapes_are_flexgens(name, flexgen):
    model, config = models.resolve(name), flexgen.get_opt_config(name)
    assert (model.name, model.num_layers, model.max_positions) == (
        config.name,
        config.num_hidden_layers,
        config.max_seq_len,
    )
    assert (model.hidden_size, model.num_heads, model.vocab_size) == (
        config.input_dim,
        config.n_head,
        config.vocab_size,
    )
    assert config.hidden_size == config.input_dim and config.ffn_embed_dim == 4 * config.hidden_size
    assert (config.pad_token_id, config.dtype.__name__) == (1, "float16")


def test_what_flexgen_knows_is_known_here(flexgen):
    """Every name in FlexGen's own list, opt-350m aside, which it does not implement."""
    names = re.findall(r'arch_name == "([^"]+)"', inspect.getsource(flexgen.get_opt_config))
    assert set(names) - {"opt-350m"} == set(FLEXGENS_NAMES)


@pytest.mark.parametrize("name", ["opt-mini", "opt-1.3b"])
def test_files_and_layers_are_those_that_flexgen_asks_for(name, flexgen, monkeypatch):
    """FlexGen's own `init_weight` of each layer, with a note in place of the allocation."""
    model = models.resolve(name)
    asked = []
    monkeypatch.setattr(flexgen, "init_weight_list", lambda specs, policy, env: asked.append(specs) or [])
    config = flexgen.OptConfig(
        num_hidden_layers=model.num_layers,
        hidden_size=model.hidden_size,
        input_dim=model.hidden_size,
        n_head=model.num_heads,
        vocab_size=model.vocab_size,
        max_seq_len=model.max_positions,
    )
    env = SimpleNamespace(gpu=None, cpu=None)
    policy = SimpleNamespace(compress_weight=False, cpu_cache_compute=False)
    layers = [flexgen.InputEmbed(config, env, policy)]
    for i in range(model.num_layers):
        layers += [flexgen.SelfAttention(config, env, policy, i), flexgen.MLP(config, env, policy, i)]
    layers.append(flexgen.OutputEmbed(config, env, policy))
    for layer in layers:
        layer.init_weight(SimpleNamespace(store=lambda weights: None), "folder")
    assert [[(os.path.relpath(file, "folder"), tuple(shape)) for shape, _, file in specs] for specs in asked] == [
        [(tensor.name, tensor.shape) for tensor in layer.tensors] for layer in model.layers
    ]


@pytest.mark.parametrize("name", FLEXGENS_NAMES)
def test_bytes_are_flexgens_and_the_tensors_it_forgets(name, flexgen):
    """FlexGen's `model_bytes` leaves out the second token embedding, the positions, the last norm and two biases a
    layer, and counts a bias for each token that is not there; its `cache_bytes` counts one position too many."""
    model, config = models.resolve(name), flexgen.get_opt_config(name)
    h, v = model.hidden_size, model.vocab_size
    forgotten = 2 * (v * h + (model.max_positions + 2) * h + 2 * h + 2 * h * model.num_layers)
    assert model.weight_bytes == config.model_bytes() - 2 * v + forgotten
    assert model.kv_cache_bytes(3, 10, 5) == config.cache_bytes(3, 10 + 5 - 1)


# ---- the names


@pytest.mark.parametrize(
    "name, means",
    [
        ("opt-1.3b", "opt-1.3b"),
        ("OPT-1.3B", "opt-1.3b"),
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("facebook/OPT-1.3B", "opt-1.3b"),
        ("opt-1.3b-np", "opt-1.3b"),
        (" opt-30b\n", "opt-30b"),
        ("facebook/galactica-30b", "galactica-30b"),
        ("facebook/opt-iml-max-30b", "opt-iml-max-30b"),
    ],
)
def test_what_people_call_a_model_is_understood(name, means):
    assert models.resolve(name).name == means


@pytest.mark.parametrize("name", ["", "opt", "gpt2", "opt-1.3", "opt-iml-13b", "facebook/", "../opt-1.3b", "/nowhere"])
def test_a_name_that_means_nothing_is_refused_with_the_choices(name):
    with pytest.raises(Refused) as refused:
        models.resolve(name)
    message = str(refused.value)
    assert repr(name) in message and "opt-125m" in message and "opt-175b" in message and "\n" not in message


def test_an_unimplemented_model_is_refused_with_its_neighbours():
    with pytest.raises(Refused, match="FlexGen does not implement it.*opt-125m, opt-1.3b"):
        models.resolve("facebook/opt-350m")


# ---- a folder of one's own


def test_a_local_folder_is_a_model(folder):
    model = models.resolve(folder())
    assert (model.num_layers, model.hidden_size, model.num_heads) == (2, 64, 4)
    assert (model.vocab_size, model.max_positions, model.name) == (512, 128, "my-opt-tiny")


def test_a_local_folder_is_one_model_whatever_the_path_to_it(folder, monkeypatch):
    path = folder()
    monkeypatch.chdir(os.path.dirname(path))
    relative = mini(model=os.path.basename(path))
    assert relative.model == path and relative.key == mini(model=path).key


def test_a_folders_positions_are_its_own(folder):
    with pytest.raises(Refused, match="128 positions"):
        mini(model=folder(), workload=mini().workload.model_copy(update={"prompt_len": 126}))


@pytest.mark.parametrize(
    "field, value",
    [
        ("model_type", "gpt2"),
        ("do_layer_norm_before", False),
        ("ffn_dim", 128),
        ("word_embed_proj_dim", 32),
        ("activation_function", "gelu"),
        ("enable_bias", False),
        ("layer_norm_elementwise_affine", False),
        ("pad_token_id", 0),
    ],
)
def test_a_folder_of_another_architecture_is_refused_with_the_field(folder, field, value):
    with pytest.raises(Refused) as refused:
        models.resolve(folder(**{field: value}))
    assert f"{field} is {value!r}" in str(refused.value) and "config.json" in str(refused.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"hidden_size": "many"}', "\udcff"])
def test_a_broken_config_is_refused_with_its_path(folder, content):
    path = folder()
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(content)
    with pytest.raises(Refused, match="config.json"):
        models.resolve(path)
