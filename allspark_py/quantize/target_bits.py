"""Chooses which weights get 8 bits, so that a model has so many bits per weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allspark.model_loader.native import required_of
from allspark.quantize.grid import WeightFormat
from allspark.quantize.layers import formats_of

HIGH_FORMAT = "int8"
_SCALE_BITS = 16


@dataclass(frozen=True)
class WeightBits:
    """What a quantised weight takes."""

    weight: str
    num_weights: int
    own: int  # bits in its format
    extra: int  # bits that it needs more as int8; 0: none


def stored_bits(weight_format: WeightFormat, num_weights: int, in_features: int) -> int:
    """Of a weight's integers, scales and zero points."""
    groups = num_weights // (weight_format.group_size or in_features)
    zero_bits = 8 if weight_format.asymmetric else 0
    return num_weights * weight_format.bits + groups * (_SCALE_BITS + zero_bits)


def weight_bits(spec: Any) -> list[WeightBits]:
    """Of all weights that a DecoderSpec quantises in layers, in their order."""
    shapes = {tensor.name: tensor.shape for tensor in required_of(spec) if tensor.quantizable}
    found = []
    for layer in range(spec.num_layers):
        for name, own in formats_of(spec, layer).items():
            weight = f"layers.{layer}.{name}"
            rows, features = shapes[weight]
            high = replace(own, bits=8, asymmetric=False)
            bits, most = (stored_bits(each, rows * features, features) for each in (own, high))
            found.append(WeightBits(weight, rows * features, bits, max(most - bits, 0)))
    return found


def room_for(weights: Sequence[WeightBits], target_bits: float) -> float:
    """The bits that weights may get more, until their mean is `target_bits`.

    Raises:
        ValueError: the mean is larger where all weights stay as they are, or smaller where all have
            8 bits.
    """
    total = sum(each.num_weights for each in weights)
    own = sum(each.own for each in weights)
    most = own + sum(each.extra for each in weights)
    if not own <= target_bits * total <= most:
        # Rounded into the range.
        low, high = math.ceil(1000 * own / total) / 1000, math.floor(1000 * most / total) / 1000
        raise ValueError(
            f"target_bits is {target_bits}; it must be in [{low:.3f}, {high:.3f}], from what the "
            f"weights have in their format to what they have in {HIGH_FORMAT}"
        )
    return target_bits * total - own


def choose_upgrades(
    weights: Sequence[WeightBits], divergences: Mapping[str, float], target_bits: float
) -> list[str]:
    """The weights that become int8, in their order: those whose rounding costs most (`divergences`,
    by weight) for each bit that they need more, as long as the mean stays at most `target_bits`.

    Raises:
        ValueError: as room_for.
    """
    room = room_for(weights, target_bits)
    chosen = set()
    upgrades = [each for each in weights if each.extra > 0]
    for each in sorted(upgrades, key=lambda each: -divergences[each.weight] / each.extra):
        if each.extra <= room:
            room -= each.extra
            chosen.add(each.weight)
    return [each.weight for each in weights if each.weight in chosen]
