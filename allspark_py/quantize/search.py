"""Chooses the scale of each group by the error that it leaves.

A group's range is made smaller step by step: the largest weights are cut off, and the others lie
closer to a value of the grid. The best of all ranges stays.
"""

from __future__ import annotations

import numpy as np
from allspark.quantize.arrays import Floats
from allspark.quantize.grid import (
    QuantizedWeight,
    WeightFormat,
    divisors,
    on_grid,
    quantize,
    round_scales,
    stacked,
)
from numpy.typing import NDArray

# Parts of the range that are tried, as the engine's own writer tries them.
PARTS = tuple(np.float32(1 - step / 20) for step in range(13))
_ROWS = 256  # at a time, which bounds the temporary memory


def search(
    weight: Floats, weight_format: WeightFormat, importance: Floats | None = None
) -> QuantizedWeight:
    """`importance` [in_features]: what the squared error of each feature counts, such as the mean
    square of the input. None: all count the same, as in the engine's own writer.
    """
    if importance is None:
        return quantize(weight, weight_format, search=True)
    return stacked(
        [
            _search(weight[begin : begin + _ROWS], weight_format, importance)
            for begin in range(0, len(weight), _ROWS)
        ]
    )


def _search(weight: Floats, weight_format: WeightFormat, importance: Floats) -> QuantizedWeight:
    best = quantize(weight, weight_format)
    best_error = _errors(weight, best, importance)
    groups = weight.reshape(*best.scales.shape, -1)
    high = np.maximum(groups.max(axis=2), 0)
    low = np.minimum(groups.min(axis=2), 0)
    full = best
    for part in PARTS[1:]:
        candidate = on_grid(weight, _narrowed(full, part, low, high))
        error = _errors(weight, candidate, importance)
        best = _chosen(error < best_error, candidate, best)
        best_error = np.minimum(error, best_error)
    return best


def _narrowed(
    full: QuantizedWeight, part: np.float32, low: Floats, high: Floats
) -> QuantizedWeight:
    """The grid of a part of the range."""
    scales = round_scales(full.scales * part)
    zeros = full.zeros
    if zeros is not None:
        zeros = np.clip(np.rint(-low * part / divisors(scales)), 0, full.format.top).astype(
            np.uint8
        )
    return QuantizedWeight(full.format, full.values, scales, zeros)


def _errors(weight: Floats, quantized: QuantizedWeight, importance: Floats) -> Floats:
    """[rows, groups]"""
    error = weight - quantized.to_float()
    error *= error
    error *= importance
    return error.reshape(*quantized.scales.shape, -1).sum(axis=2, dtype=np.float32)


def _chosen(
    takes_first: NDArray[np.bool_], first: QuantizedWeight, second: QuantizedWeight
) -> QuantizedWeight:
    shape = (*first.scales.shape, -1)
    values = np.where(
        takes_first[:, :, np.newaxis], first.values.reshape(shape), second.values.reshape(shape)
    )
    zeros = None
    if first.zeros is not None and second.zeros is not None:
        zeros = np.where(takes_first, first.zeros, second.zeros)
    return QuantizedWeight(
        first.format,
        values.reshape(first.values.shape),
        np.where(takes_first, first.scales, second.scales),
        zeros,
    )
