"""Placement: for every split there is, each tensor lies where FlexGen's own code puts it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from factories import mini
from helpers import models
from helpers.engine import patches
from helpers.placement import TIERS, asked_and_achieved, place, stored_bytes, tiers_of_layer

SPLITS = [(gpu, cpu) for gpu in range(101) for cpu in range(101 - gpu)]
ALL_MODELS = tuple(models.KNOWN_MODELS.values())


@pytest.fixture(scope="module")
def flexgen():
    return patches.import_flexgen()


class StandInTier:
    """A device that holds nothing: it notes which tier was asked, and lets the tensor be filled."""

    def __init__(self, name):
        self.name = name
        self.compressed_device = self

    def allocate(self, *shape_and_type, pin_memory):
        return SimpleNamespace(tier=self.name, load_from_np=lambda values: None, load_from_np_file=lambda path: None)


ENV = SimpleNamespace(**{tier: StandInTier(tier) for tier in TIERS})


def flexgens_tiers(flexgen, shapes, gpu, cpu, compress=False):
    """Where FlexGen's `init_weight_list` allocates tensors of these shapes."""
    policy = SimpleNamespace(
        w_gpu_percent=gpu,
        w_cpu_percent=cpu,
        w_disk_percent=100 - gpu - cpu,
        pin_weight=True,
        compress_weight=compress,
        comp_weight_config=None,
    )
    weights = flexgen.init_weight_list([(shape, np.float16, "a file") for shape in shapes], policy, ENV)
    return tuple(weight.tier for weight in weights)


def shapes_of_layers(model):
    """The model's layers, each kind once: the blocks are all alike."""
    return {layer.kind: tuple(t.shape for t in layer.tensors) for layer in model.layers}


def test_there_are_5151_splits():
    assert len(SPLITS) == 5151


@pytest.mark.parametrize("model", ALL_MODELS, ids=lambda model: model.name)
def test_every_split_of_every_model_is_flexgens(model, flexgen):
    for shapes in shapes_of_layers(model).values():
        elements = tuple(int(np.prod(shape)) for shape in shapes)
        for gpu, cpu in SPLITS:
            assert tiers_of_layer(elements, gpu, cpu) == flexgens_tiers(flexgen, shapes, gpu, cpu), (shapes, gpu, cpu)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 5000)) | st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=12
    ),
    split=st.sampled_from(SPLITS),
    compress=st.booleans(),
)
def test_any_layer_is_placed_as_by_flexgen(flexgen, shapes, split, compress):
    elements = tuple(int(np.prod(shape)) for shape in shapes)
    assert tiers_of_layer(elements, *split) == flexgens_tiers(flexgen, shapes, *split, compress=compress)


def test_the_placement_of_a_model_is_that_of_its_layers(flexgen):
    model = models.resolve("opt-125m")
    for gpu, cpu in ((100, 0), (50, 50), (50, 0), (0, 50), (0, 0), (30, 40)):
        placed = place(model, gpu, cpu, False)
        assert [tuple(t.tier for t in layer) for layer in placed.layers] == [
            flexgens_tiers(flexgen, [t.shape for t in layer.tensors], gpu, cpu) for layer in model.layers
        ]
        assert placed.total_bytes == model.weight_bytes
        assert placed.host_to_device_bytes_per_pass == placed.bytes_by_tier["cpu"] + placed.disk_bytes_per_pass


def test_all_splits_of_opt_1_3b_are_91_placements():
    layers = [[int(np.prod(s)) for s in shapes] for shapes in shapes_of_layers(models.resolve("opt-1.3b")).values()]
    placements = {tuple(tiers_of_layer(tuple(layer), gpu, cpu) for layer in layers) for gpu, cpu in SPLITS}
    assert len(placements) == 91


def test_shares_are_those_read_off_flexgens_memory():
    model = models.resolve("opt-1.3b")
    achieved = {gpu: place(model, gpu, 100 - gpu, False).percent("gpu") for gpu in (20, 30, 90)}
    assert [round(achieved[gpu], 1) for gpu in (20, 30, 90)] == [7.4, 35.8, 100.0]


# ---- bytes


@pytest.mark.parametrize("model", ALL_MODELS, ids=lambda model: model.name)
def test_compressed_bytes_are_those_that_flexgen_allocates(model, flexgen):
    from flexgen import compression

    allocated = []

    def allocate(shape, dtype, pin_memory=None):
        allocated.append(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)

    device = compression.TorchCompressedDevice(SimpleNamespace(allocate=allocate))
    config = compression.CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    for shape in {shape for shape in model.files.values() if len(shape) == 2} | {(1, 1), (63, 5), (64, 5), (65, 5)}:
        allocated.clear()
        device.allocate(shape, np.float16, config)
        assert stored_bytes(shape, True) == sum(allocated), shape


def test_vectors_stay_fp16_when_weights_are_compressed():
    model = models.resolve("opt-1.3b")
    for layer in place(model, 50, 0, True).layers:
        for tensor in layer:
            assert tensor.compressed == (len(tensor.shape) == 2)
            assert tensor.stored_bytes == stored_bytes(tensor.shape, tensor.compressed)


@given(st.sampled_from(ALL_MODELS), st.sampled_from(SPLITS), st.booleans())
def test_every_byte_is_somewhere_once(model, split, compress):
    placed = place(model, *split, compress)
    assert placed.total_bytes == sum(t.stored_bytes for layer in placed.layers for t in layer)
    assert sum(placed.percent(tier) for tier in TIERS) == pytest.approx(100)
    assert sum(placed.gib(tier) for tier in TIERS) * 2**30 == pytest.approx(placed.total_bytes)


@given(st.sampled_from(ALL_MODELS), st.integers(0, 99), st.booleans())
def test_a_larger_gpu_share_never_puts_less_on_the_gpu(model, gpu, compress):
    less, more = (place(model, share, 0, compress).bytes_by_tier["gpu"] for share in (gpu, gpu + 1))
    assert more >= less


def test_asked_and_achieved_are_both_given():
    found = asked_and_achieved(models.resolve("opt-1.3b"), mini("20 80 100 0 100 0").split, False)
    assert found["asked"] == {"gpu_percent": 20, "cpu_percent": 80, "disk_percent": 0}
    assert found["achieved"]["gpu_percent"] == pytest.approx(7.4, abs=0.05)
    assert found["achieved"]["disk_gib"] == 0
