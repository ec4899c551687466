"""Brings the parts of a weight into one format without changing any of their numbers.

Files that mix types have queries and keys of fewer bits than values, say, which are one weight
here. Integers of few bits fit into more of them, a group's scale serves for the smaller groups in
it, and a zero point is an offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..derived import derive
from ..storage import TensorEntry, as_float32
from .tensor import QuantizedTensor, ScaleCodes


def unify(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor] | None:
    """``parts``, which have the same input features, in one format; None where there is none.

    It has the most bits and the smallest groups of them all. Parts whose scales are rounded to
    different types have no common format, nor have float8 and groups in act order. Scales are codes
    or powers of two only where they are in all parts.
    """
    if any(part.codes is None for part in parts):
        parts = [replace(part, codes=None) for part in parts]
    if not all(part.power_scales and part.table == parts[0].table for part in parts):
        parts = [replace(part, power_scales=False) for part in parts]
    if len({part.half_scales for part in parts}) > 1:
        return None
    if any(part.is_float8 or part.order is not None for part in parts):
        return None
    if len({part.table for part in parts}) > 1:
        parts = [_as_integers(part) for part in parts]
    parts = _same_groups(parts)
    if parts[0].table is not None:
        return list(parts)
    bits = max(part.bits for part in parts)
    if any(part.offsets is not None for part in parts):
        if any(part.zeros is not None for part in parts):
            return None  # A zero point times a scale may need more digits than a scale has.
        return [replace(_with_offsets(part), bits=bits) for part in parts]
    if any(part.zeros is not None for part in parts):
        return [replace(_with_zeros(part), bits=bits) for part in parts] if bits != 6 else None
    return [_widened(part, bits) for part in parts]


def _as_integers(part: QuantizedTensor) -> QuantizedTensor:
    """Numbers of a table as what they are, integers of 8 bits."""
    if part.table is None:
        return part
    numbers = (np.array(part.table) + 128).astype(np.uint8)
    return replace(part, bits=8, values=_mapped(numbers.take, part.values), table=None)


def _same_groups(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    if len({part.group_size for part in parts}) == 1:
        return list(parts)
    size = min(part.group_size or part.shape[1] for part in parts)

    def regrouped(part: QuantizedTensor) -> QuantizedTensor:
        groups = part.shape[1] // size

        def repeated(array: NDArray[Any]) -> NDArray[Any]:
            return np.repeat(array, groups // array.shape[1], axis=1)

        def of(entry: TensorEntry) -> TensorEntry:
            return _mapped(repeated, entry, shape=(part.shape[0], groups))

        return replace(
            part,
            group_size=size,
            scales=of(part.scales),
            zeros=None if part.zeros is None else of(part.zeros),
            offsets=None if part.offsets is None else of(part.offsets),
            codes=None if part.codes is None else _codes_of(part.codes, of),
        )

    return [regrouped(part) for part in parts]


def _codes_of(codes: ScaleCodes, of: Callable[[TensorEntry], TensorEntry]) -> ScaleCodes:
    offsets = None if codes.offsets is None else of(codes.offsets)
    return replace(codes, scales=of(codes.scales), offsets=offsets)


def _widened(part: QuantizedTensor, bits: int) -> QuantizedTensor:
    """A symmetric part with more bits, and so with another zero point."""
    more = np.uint8((1 << (bits - 1)) - (1 << (part.bits - 1)))
    values = _mapped(lambda array: array + more, part.values) if more else part.values
    return replace(part, bits=bits, values=values)


def _with_offsets(part: QuantizedTensor) -> QuantizedTensor:
    """A symmetric part's zero point as offsets: powers of two times the scales, so exact."""
    if part.offsets is not None:
        return part
    factor, dtype = np.float32(-(1 << (part.bits - 1))), part.scales.dtype

    def offsets(scales: NDArray[Any]) -> NDArray[Any]:
        return as_float32(scales, dtype) * factor

    codes = part.codes
    if codes is not None:
        blocks = _mapped(lambda array: array * factor, codes.scale_blocks)
        codes = replace(codes, offsets=codes.scales, offset_blocks=blocks)
    return replace(part, offsets=_mapped(offsets, part.scales, "float32"), codes=codes)


def _with_zeros(part: QuantizedTensor) -> QuantizedTensor:
    if part.zeros is not None:
        return part
    zero = 1 << (part.bits - 1)

    def zeros(scales: NDArray[Any]) -> NDArray[Any]:
        return np.full(scales.shape, zero, np.uint8)

    return replace(part, zeros=_mapped(zeros, part.scales, "uint8"))


def _mapped(
    compute: Callable[[Any], NDArray[Any]],
    entry: TensorEntry,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> TensorEntry:
    return derive(compute, dtype or entry.dtype, shape or entry.shape, entry, by_rows=True)
