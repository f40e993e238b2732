"""FlexGen's placement for a split: the tier of each weight, and the bytes on each tier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from helpers.models import FP16_BYTES, Layer, OptModel
from helpers.settings import OffloadSplit
from helpers.units import GIB

Tier = Literal["gpu", "cpu", "disk"]
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")

GROUP_SIZE = 64  # FlexGen's weight compression: 4 bits, one fp16 scale and minimum per 64 rows


@dataclass(frozen=True)
class PlacedTensor:
    """A weight with its tier and the bytes it takes there."""

    name: str
    shape: tuple[int, ...]
    compressed: bool
    tier: Tier
    stored_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where every weight of a model is; `layers` in FlexGen's order."""

    layers: tuple[tuple[PlacedTensor, ...], ...]
    bytes_by_tier: dict[Tier, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_tier.values())

    def percent(self, tier: Tier) -> float:
        """The tier's share of the stored bytes."""
        return 100 * self.bytes_by_tier[tier] / self.total_bytes

    def gib(self, tier: Tier) -> float:
        return self.bytes_by_tier[tier] / GIB

    @property
    def host_to_device_bytes_per_pass(self) -> int:
        """Bytes copied to the GPU in one forward pass: every weight that isn't on it."""
        return self.bytes_by_tier["cpu"] + self.bytes_by_tier["disk"]

    @property
    def disk_bytes_per_pass(self) -> int:
        """Bytes that one forward pass reads from the disk tier (from the disk or the page cache)."""
        return self.bytes_by_tier["disk"]

    def __str__(self) -> str:
        shares = (f"{self.percent(tier):.1f} % {name}" for tier, name in zip(TIERS, ("GPU", "CPU", "disk")))
        return " + ".join(share for share in shares if not share.startswith("0.0 "))


@lru_cache
def stored_bytes(shape: tuple[int, ...], compressed: bool) -> int:
    """Bytes of a weight as FlexGen stores it; compressed: 4-bit values by rows in groups of 64, rounded
    up, with an fp16 scale and minimum per group and column."""
    columns = 1
    for length in shape[1:]:
        columns *= length
    if not compressed:
        return FP16_BYTES * shape[0] * columns
    groups = -(-shape[0] // GROUP_SIZE)
    return groups * (GROUP_SIZE // 2) * columns + groups * 2 * columns * FP16_BYTES


@lru_cache(maxsize=50_000)
def tiers_of_layer(elements: tuple[int, ...], weights_gpu: int, weights_cpu: int) -> tuple[Tier, ...]:
    """The tier of each tensor of a layer, from the tensors' element counts.

    FlexGen's `init_weight_list`: a whole tensor goes to disk, CPU or GPU (in this order) by where the
    midpoint of its share of the layer falls. The arithmetic is the same, to the last bit.
    """
    disk_until = 100 - weights_gpu - weights_cpu
    cpu_until = disk_until + weights_cpu
    total = sum(elements)
    tiers: list[Tier] = []
    reached = 0
    for count in elements:
        reached += count
        midpoint = (reached - count / 2) / total * 100
        tiers.append("disk" if midpoint < disk_until else "cpu" if midpoint < cpu_until else "gpu")
    return tuple(tiers)


@lru_cache(maxsize=20_000)
def place(model: OptModel, weights_gpu: int, weights_cpu: int, compress_weight: bool) -> Placement:
    """Where FlexGen puts each weight for `--percent weights_gpu weights_cpu ...`."""
    layers = []
    totals: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for layer in model.layers:
        placed = _place_layer(layer, weights_gpu, weights_cpu, compress_weight)
        layers.append(placed)
        for tensor in placed:
            totals[tensor.tier] += tensor.stored_bytes
    return Placement(tuple(layers), totals)


def _place_layer(layer: Layer, weights_gpu: int, weights_cpu: int, compress_weight: bool) -> tuple[PlacedTensor, ...]:
    tiers = tiers_of_layer(tuple(t.elements for t in layer.tensors), weights_gpu, weights_cpu)
    placed = []
    for tensor, tier in zip(layer.tensors, tiers):
        compressed = compress_weight and len(tensor.shape) > 1  # FlexGen keeps vectors in fp16
        placed.append(PlacedTensor(tensor.name, tensor.shape, compressed, tier, stored_bytes(tensor.shape, compressed)))
    return tuple(placed)


def asked_and_achieved(model: OptModel, split: OffloadSplit, compress_weight: bool) -> dict[str, Any]:
    """The split asked for next to the achieved one, as `place --json` prints them."""
    placement = place(model, split.weights_gpu, split.weights_cpu, compress_weight)
    return {
        "model": model.name,
        "percent": str(split),
        "compress_weight": compress_weight,
        "asked": {
            "gpu_percent": split.weights_gpu,
            "cpu_percent": split.weights_cpu,
            "disk_percent": split.weights_disk,
        },
        "achieved": {
            **{f"{tier}_percent": placement.percent(tier) for tier in TIERS},
            **{f"{tier}_gib": placement.gib(tier) for tier in TIERS},
        },
    }
