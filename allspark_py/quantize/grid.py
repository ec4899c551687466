"""Quantised weights as arrays: integers, scales and zero points, rounded as the engine stores them.

The integers of a weight [out_features, in_features] are 0 to 2^bits - 1. Each group of consecutive
input features of a row has a scale, a value of bfloat16, and a zero point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from allspark._allspark import quantize_rows
from allspark.model_loader.storage import round_float32
from allspark.quantize.arrays import Bytes, Floats
from numpy.typing import NDArray


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is stored. `group_size` is in input features; 0: all share a scale."""

    bits: int
    asymmetric: bool
    group_size: int

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """The largest integer."""
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class QuantizedWeight:
    """(values - zeros) * scales."""

    format: WeightFormat
    values: Bytes  # [out_features, in_features]
    scales: Floats  # [out_features, groups]
    zeros: Bytes | None  # [out_features, groups]; None: `format.middle`

    def to_float(self) -> Floats:
        """The weight that the integers stand for."""
        rows, groups = self.scales.shape
        shape = (rows, groups, -1)
        zeros = self.format.middle if self.zeros is None else _column(self.zeros).astype(np.float32)
        floats = self.values.reshape(shape).astype(np.float32)
        floats -= zeros
        floats *= _column(self.scales)
        return floats.reshape(self.values.shape)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the rows of several, which have one format."""
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantizedWeight(
        parts[0].format,
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(zeros) if zeros else None,
    )


def quantize(
    weight: Floats, weight_format: WeightFormat, search: bool = False
) -> QuantizedWeight:
    """Rounds to the nearest, as the engine's own writer does (method `rtn`); with `search`, as it
    does where it searches the scales of 4 bits.

    Raises:
        ValueError: a weight is not finite; the message names its row and column.
    """
    values, scales, zeros = quantize_rows(
        np.ascontiguousarray(weight, np.float32),
        weight_format.bits,
        weight_format.asymmetric,
        weight_format.group_size,
        search,
    )
    return QuantizedWeight(weight_format, values, scales, zeros)


def on_grid(weight: Floats, grid: QuantizedWeight) -> QuantizedWeight:
    """Rounds to the nearest value with the scales and zero points of `grid`."""
    rows, groups = grid.scales.shape
    ratio = weight.reshape(rows, groups, -1) / _column(divisors(grid.scales))
    zeros: Any = grid.format.middle if grid.zeros is None else _column(grid.zeros)
    values = np.clip(np.rint(ratio) + zeros, 0, grid.format.top).astype(np.uint8)
    return QuantizedWeight(grid.format, values.reshape(weight.shape), grid.scales, grid.zeros)


def round_scales(scales: NDArray[Any]) -> Floats:
    """To the nearest bfloat16, and none to zero."""
    rounded = round_float32(np.ascontiguousarray(scales, np.float32), "bfloat16")
    return np.where(rounded == 0, scales, rounded)


def divisors(scales: Floats) -> Floats:
    """`scales`, with infinity where a group of zeros has none."""
    return np.where(scales == 0, np.float32(np.inf), scales)


def _column(array: NDArray[Any]) -> NDArray[Any]:
    return array[:, :, np.newaxis]
