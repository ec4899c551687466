"""FP8 (E4M3): weights that are dequantised when they are read, since the engine has no FP8.

A module has ``weight`` float8 [out, in] and scales: ``weight_scale_inv`` for blocks of
``weight_block_size``, or ``weight_scale`` for the whole weight or for each output feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..errors import CheckpointError
from ..storage import TensorEntry, as_float32, shorten
from .tensor import (
    FLOATS,
    DequantizedTensor,
    check,
    dequantized_view,
    replace_modules,
    strips,
)

_DTYPE = "float8_e4m3"
_MAX_BLOCK = 2**31 - 1  # of rows or columns; the longest dimension that a weight can have


@dataclass(frozen=True)
class Fp8:
    block: (
        tuple[int, int] | None
    )  # rows, columns that share a scale; None: found from the scale's shape

    @classmethod
    def parse(cls, config: ModelConfig) -> Fp8:
        config.text("activation_scheme", "dynamic")  # Here activations are not in float8.
        name = "weight_block_size"
        return cls(None if config.get(name) is None else checked_block(config, name))

    def view(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        marker = "weight_scale" if self.block is None else "weight_scale_inv"

        def weight(module: Mapping[str, TensorEntry]) -> DequantizedTensor:
            return fp8_weight(module["weight"], module[marker], self.block)

        return replace_modules(tensors, marker, ("weight",), ("input_scale",), weight)


def checked_block(config: ModelConfig, name: str) -> tuple[int, int]:
    """The field of that name: how many rows and columns share a scale."""
    block = config.get(name)
    if not isinstance(block, list) or len(block) != 2:
        raise config.error(name, f"is {shorten(block)}, expected two sizes")
    for size in block:
        if type(size) is not int or not 1 <= size <= _MAX_BLOCK:
            expected = f"expected sizes from 1 to {_MAX_BLOCK}"
            raise config.error(name, f"is {shorten(block)}, {expected}")
    return block[0], block[1]


def fp8_weight(
    weight: TensorEntry, scale: TensorEntry, block: tuple[int, int] | None
) -> DequantizedTensor:
    rows, cols = check(weight, (_DTYPE,), (None, None))
    if block is not None:
        check(scale, FLOATS, (-(-rows // block[0]), -(-cols // block[1])))
    elif scale.shape in ((), (1,)):
        block = (rows, cols)
    elif scale.shape in ((rows,), (rows, 1)):
        block = (1, cols)
    else:
        raise CheckpointError(
            f"{scale.where} has shape {list(scale.shape)}, expected [1] or [{rows}, 1]"
        )
    check(scale, FLOATS, scale.shape)
    height, width = block

    def compute(values: NDArray[Any], scales: NDArray[Any]) -> NDArray[Any]:
        factors = as_float32(scales, scale.dtype).reshape(-(-rows // height), -(-cols // width))
        by_row, by_column = np.arange(rows) // height, np.arange(cols) // width
        weights = np.empty((rows, cols), np.float32)
        for strip in strips(rows, cols):
            np.take(_VALUES, values[strip], out=weights[strip])
            weights[strip] *= factors[by_row[strip]][:, by_column]
        return weights

    return dequantized_view(compute, (rows, cols), "float8", weight, scale)


def _values() -> NDArray[np.float32]:
    """The value of each of the 256 codes: 4 bits of exponent with bias 7, 3 of fraction."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    normal = np.ldexp(8.0 + fraction, exponent - 10)
    positive = np.where(exponent == 0, np.ldexp(1.0 * fraction, -9), normal)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


_VALUES = _values()
