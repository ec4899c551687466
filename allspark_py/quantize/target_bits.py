"""Chooses which weights get 8 bits, so that a model has so many bits per weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from allspark.quantize.effects import Effect
from allspark.quantize.grid import WeightFormat

HIGH_FORMAT = "int8"
_SCALE_BITS = 16


@dataclass(frozen=True)
class _Upgrade:
    weight: str
    extra_bits: int
    benefit: float  # KL divergence for each extra bit


def stored_bits(weight_format: WeightFormat, num_weights: int, in_features: int) -> int:
    """Of a weight's integers, scales and zero points."""
    groups = num_weights // (weight_format.group_size or in_features)
    zero_bits = 8 if weight_format.asymmetric else 0
    return num_weights * weight_format.bits + groups * (_SCALE_BITS + zero_bits)


def choose_upgrades(
    effects: Sequence[Effect], in_features: dict[str, int], target_bits: float
) -> list[str]:
    """The weights that become int8, in their order: those whose rounding costs most for each bit
    that they need more, as long as the mean stays at most `target_bits`.

    Raises:
        ValueError: the mean is larger where all weights stay as they are.
    """
    total = sum(effect.num_weights for effect in effects)
    used, upgrades = 0, []
    for effect in effects:
        high = replace(effect.format, bits=8, asymmetric=False)
        features = in_features[effect.weight]
        own = stored_bits(effect.format, effect.num_weights, features)
        extra = stored_bits(high, effect.num_weights, features) - own
        used += own
        if extra > 0:
            upgrades.append(_Upgrade(effect.weight, extra, effect.kl_divergence / extra))
    if used > target_bits * total:
        raise ValueError(
            f"target_bits is {target_bits}; it must be at least {used / total:.3f}, what the "
            "weights have in their format"
        )
    chosen = set(_fitting(upgrades, target_bits * total - used))
    return [effect.weight for effect in effects if effect.weight in chosen]


def _fitting(upgrades: Iterable[_Upgrade], room: float) -> Iterable[str]:
    for upgrade in sorted(upgrades, key=lambda each: -each.benefit):
        if upgrade.extra_bits <= room:
            room -= upgrade.extra_bits
            yield upgrade.weight
