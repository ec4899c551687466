"""AWQ: scales up the weights of input features that are large, so that rounding harms them less.

After "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (Lin et al.,
2023). A scale is s = mean|x|^ratio; the ratio is the one of 20 with the smallest error of the
products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from allspark.quantize.arrays import Floats
from allspark.quantize.grid import WeightFormat, quantize
from allspark.quantize.moves import Move
from allspark.quantize.statistics import InputStatistics
from numpy.typing import NDArray

_RATIOS = 20
_SMALLEST = 1e-4  # of a scale, before scales are normalised
# Multiply-adds of an error of products, for one ratio. It bounds how many rows of a weight are
# judged: enough of them, evenly apart, say which ratio is best.
_BUDGET = 1 << 31
_FEWEST_ROWS = 64


@dataclass(frozen=True)
class Consumer:
    """A weight [n, k] that a move scales, and what it is multiplied with."""

    weight: Floats
    format: WeightFormat
    inputs: InputStatistics


def awq_scale(
    move: Move, consumers: Sequence[Consumer], map_ratios: Callable[..., Iterable[float]]
) -> Floats | None:
    """The scale [producers] that leaves the smallest error; None: none is better than no scale.

    Ratios are judged by `map_ratios`, which may be a map with several threads.
    """
    tokens = sum(each.inputs.num_tokens for each in consumers)
    sums = np.sum([each.inputs.mean_abs * each.inputs.num_tokens for each in consumers], axis=0)
    magnitude = move.over_producers(sums / tokens)
    if not magnitude.any():
        return None
    samples = _samples(consumers)
    scales = [_normalised(magnitude, step / _RATIOS) for step in range(_RATIOS)]

    def error(scale: Floats) -> float:
        factors = move.over_features(scale)
        return sum(_error(each, factors) for each in samples)

    best = int(np.argmin(list(map_ratios(error, scales))))
    return scales[best] if best else None


def _normalised(magnitude: NDArray[np.float64], ratio: float) -> Floats:
    scale = np.maximum(magnitude**ratio, _SMALLEST)
    return (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)


def _samples(consumers: Sequence[Consumer]) -> list[Consumer]:
    features = consumers[0].weight.shape[1]
    budget = max(_BUDGET // features**2, _FEWEST_ROWS)
    total = sum(len(each.weight) for each in consumers)
    step = max(total // budget, 1)
    return [
        Consumer(np.ascontiguousarray(each.weight[::step]), each.format, each.inputs)
        for each in consumers
    ]


def _error(consumer: Consumer, factors: Floats) -> float:
    """The squared error of the products with all tokens: the trace of E X^T X E^T."""
    rounded = quantize(consumer.weight * factors, consumer.format).to_float()
    rounded /= factors
    rounded -= consumer.weight
    products = rounded @ consumer.inputs.products
    return float(np.vdot(products, rounded))
