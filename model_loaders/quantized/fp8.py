"""FP8 (E4M3): codes of floats with a scale for each row, or for blocks of rows and columns.

A module has ``weight`` float8 [out, in] and scales, which multiply it under both of their names:
``weight_scale_inv`` for blocks of ``weight_block_size``, or, without that, ``weight_scale_inv`` or
``weight_scale`` for the whole weight or for each output feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..derived import derive
from ..errors import CheckpointError, UnsupportedModelError
from ..storage import FLOATS, TensorEntry, Tensors, as_float32, round_float32, shorten
from .modules import ModuleRule, modules_with, replace_modules
from .tensor import KEPT_GROUP_SIZES, QuantizedTensor, check, quantize_view, strips

_DTYPE = "float8_e4m3"
_MAX_BLOCK = 2**31 - 1  # of rows or columns; the longest dimension that a weight can have
_NOT_A_NUMBER = 0x7F  # and with the bit of the sign


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

    def view(self, tensors: Tensors) -> dict[str, TensorEntry]:
        marker = "weight_scale_inv"
        if self.block is None and not any(modules_with(tensors, marker)):
            marker = "weight_scale"
        rule = float8_rule(marker, self.block, ("input_scale", "activation_scale"))
        return replace_modules(tensors, marker, lambda module: rule)


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


def float8_rule(
    marker: str,
    block: tuple[int, int] | None,
    unused: tuple[str, ...],
    refused: tuple[str, ...] = (),
) -> ModuleRule:
    """The rule of modules whose weights are float8 and whose scales are ``marker``. Tensors
    ``refused`` are an error."""

    def weight(module: Tensors) -> QuantizedTensor:
        for part in refused:
            if part in module:
                raise UnsupportedModelError(
                    f"{module[part].where}: float weights in act order (actorder 'group') are not "
                    "supported"
                )
        return _weight(module["weight"], module[marker], block)

    return ModuleRule(weight, ("weight",), (*unused, *refused))


def _weight(
    weight: TensorEntry, scale: TensorEntry, block: tuple[int, int] | None
) -> QuantizedTensor:
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
    height, width = block[0], min(block[1], cols)
    size = _group_size(width, cols)
    groups = -(-cols // size)

    def of_groups(array: NDArray[Any]) -> NDArray[Any]:
        blocks = array.reshape(-1, -(-cols // width))
        return blocks[np.arange(rows) // height][:, np.arange(groups) * size // width]

    def codes(array: NDArray[Any]) -> NDArray[Any]:
        if _finds_nan(array):
            raise _nan_error(weight)
        return array

    return quantize_view(
        8,
        size,
        derive(codes, "uint8", (rows, cols), weight, by_rows=True),
        derive(of_groups, scale.dtype, (rows, groups), scale),
        stored_as="float8",
        is_float8=True,
        half_scales=_half_is_closer(scale),
    )


def _group_size(width: int, cols: int) -> int:
    """The largest group of the engine's that blocks of ``width`` columns are made of, also the last
    one, if it is narrower; where there is none, ``width``."""
    if width == cols:
        return width
    sizes = (size for size in sorted(KEPT_GROUP_SIZES, reverse=True) if size)
    return next((size for size in sizes if width % size == cols % size == 0), width)


def _half_is_closer(scale: TensorEntry) -> bool:
    """Whether the engine should have the scales in float16. It has 3 bits more than bfloat16, but
    less range: the largest relative errors decide, since each scale is for weights of its own.
    """

    def error(values: NDArray[Any], dtype: str) -> float:
        with np.errstate(invalid="ignore"):  # What is infinite is no better.
            difference = np.abs(round_float32(values, dtype) - values)
            return float((difference / np.abs(values)).max(initial=0))

    with scale.open() as array:
        values = as_float32(array, scale.dtype)
        values = values[values != 0]
        return error(values, "float16") <= error(values, "bfloat16")


def _finds_nan(codes: NDArray[Any]) -> bool:
    return any(
        ((codes[strip] & _NOT_A_NUMBER) == _NOT_A_NUMBER).any() for strip in strips(*codes.shape)
    )


def _nan_error(weight: TensorEntry) -> CheckpointError:
    with weight.open() as codes:
        row, column = np.argwhere((codes & _NOT_A_NUMBER) == _NOT_A_NUMBER)[0]
    return CheckpointError(
        f"{weight.where}: row {row}, column {column} is {_NOT_A_NUMBER:#x} of float8, nan; weights "
        "must be finite"
    )
