"""Quantised weights of a checkpoint, as the other loaders see them.

For them the weight is a float32 tensor that is computed when it is read. If the engine has its
format, the integers, scales and zero points are copied instead (plan.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..derived import DerivedTensor, derive
from ..errors import CheckpointError
from ..storage import TensorEntry, as_float32
from .e4m3 import E4M3_VALUES

KEPT_GROUP_SIZES = (0, 16, 32, 64, 128)

# Elements dequantised at a time; this bounds the temporary memory.
_STRIP_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaleCodes:
    """Scales, and offsets if there are any, as products: (code - 128) * block. A block has 256
    input features."""

    scales: TensorEntry  # uint8 [out_features, groups]
    scale_blocks: TensorEntry  # numbers of float16 [out_features, in_features / 256]
    offsets: TensorEntry | None = None
    offset_blocks: TensorEntry | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedTensor(TensorEntry):
    """The weight (values - zeros) * scales, or one of the other forms below; reading it gives
    float32."""

    bits: int  # 8, 6 or 4
    group_size: int  # input features per scale; 0: all
    values: TensorEntry  # uint8 [out_features, in_features]
    scales: TensorEntry  # a float dtype, [out_features, groups]
    # How the engine keeps scales and offsets: as codes if there are any, as exponents of powers of
    # two, as float16, and otherwise as bfloat16.
    half_scales: bool
    power_scales: bool = False
    codes: ScaleCodes | None = None
    zeros: TensorEntry | None  # uint8, as scales; None: 2^(bits - 1) everywhere
    # Other forms. Each excludes zeros and the others.
    offsets: TensorEntry | None = None  # as scales: the weight is values * scales + offsets
    table: tuple[int, ...] | None = None  # 16 numbers of int8: it is table[values] * scales
    is_float8: bool = False  # values are codes of E4M3: it is E4M3_VALUES[values] * scales
    order: NDArray[np.intp] | None  # the group of each input feature, if not consecutive
    quantize_activations: bool  # as the checkpoint was made for
    has_outputs_first: ClassVar[bool] = True
    # The type's name, in a format that mixes types. There, weights that cannot be kept become
    # floats.
    stored_as: str | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[NDArray[Any]]:
        with contextlib.ExitStack() as stack:
            values = stack.enter_context(self.values.open())
            scales, zeros, offsets = (
                None if entry is None else _as_float32(stack.enter_context(entry.open()), entry)
                for entry in (self.scales, self.zeros, self.offsets)
            )
            assert scales is not None
            yield self._dequantise(values, scales, zeros, offsets)

    def _dequantise(
        self,
        values: NDArray[Any],
        scales: NDArray[Any],
        zeros: NDArray[Any] | None,
        offsets: NDArray[Any] | None,
    ) -> NDArray[Any]:
        rows, cols = self.shape
        group_of = self.order
        if group_of is None:
            group_of = np.arange(cols) // (self.group_size or cols)
        numbers = self.numbers()
        weights = np.empty(self.shape, np.float32)
        for strip in strips(rows, cols):
            np.take(numbers, values[strip], out=weights[strip])
            if zeros is not None:
                weights[strip] -= zeros[strip][:, group_of]
            weights[strip] *= scales[strip][:, group_of]
            if offsets is not None:
                weights[strip] += offsets[strip][:, group_of]
        return weights

    def numbers(self) -> NDArray[np.float32]:
        """The number that each of the 256 values stands for, before zeros, scales and offsets."""
        if self.is_float8:
            return E4M3_VALUES
        if self.table is not None:
            return np.array(self.table * 16, np.float32)
        integers = np.arange(256, dtype=np.float32)
        is_symmetric = self.zeros is None and self.offsets is None
        return integers - (1 << (self.bits - 1)) if is_symmetric else integers

    def columns(self) -> NDArray[np.int32] | None:
        """The input feature of each column, if columns are reordered to make groups contiguous;
        within a group they keep their order.
        """
        return None if self.order is None else np.argsort(self.order, kind="stable").astype("<i4")

    def problem(self) -> str | None:
        """Why the engine's format cannot hold the integers unchanged; None: it can."""
        if self.order is not None and (np.bincount(self.order) != self.group_size).any():
            return f"its groups have not all {self.group_size} input features (desc_act)"
        if self.group_size not in KEPT_GROUP_SIZES:
            sizes = ", ".join(map(str, KEPT_GROUP_SIZES))
            return f"its group size is {self.group_size}, the engine has {sizes}"
        if self.bits == 6 and self.zeros is not None:
            return "it has 6 bits and zero points"
        if not self.group_size and (self.bits == 6 or self.offsets or self.table):
            return "it has one scale for all input features, where the engine has groups"
        in_features, lane = self.shape[1], {8: 4, 6: 16, 4: 8}[self.bits]
        for unit in (lane, self.group_size or lane):
            if in_features % unit:
                return f"its {in_features} input features are no multiple of {unit}"
        return None


def _as_float32(array: NDArray[Any], entry: TensorEntry) -> NDArray[np.float32]:
    if entry.dtype == "uint8":
        return array.astype(np.float32)
    return as_float32(array, entry.dtype)


def quantize_view(
    bits: int,
    group_size: int,
    values: TensorEntry,
    scales: TensorEntry,
    zeros: TensorEntry | None = None,
    order: NDArray[np.intp] | None = None,
    quantize_activations: bool = False,
    stored_as: str | None = None,
    *,
    offsets: TensorEntry | None = None,
    table: tuple[int, ...] | None = None,
    is_float8: bool = False,
    half_scales: bool | None = None,
    power_scales: bool = False,
    codes: ScaleCodes | None = None,
) -> QuantizedTensor:
    """``half_scales`` None: as the scales' dtype says."""
    size = group_size
    if size == values.shape[1] and bits != 6 and offsets is None and table is None:
        size = 0
    return QuantizedTensor(
        values.name,
        "float32",
        values.shape,
        values.file,
        values.offset,
        values.nbytes,
        bits=bits,
        group_size=size,
        values=values,
        scales=scales,
        half_scales=scales.dtype == "float16" if half_scales is None else half_scales,
        power_scales=power_scales,
        codes=codes,
        zeros=zeros,
        offsets=offsets,
        table=table,
        is_float8=is_float8,
        order=order,
        quantize_activations=quantize_activations,
        stored_as=stored_as,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class DequantizedTensor(DerivedTensor):
    """A weight in a format that the engine does not have: float32, computed when it is read."""

    stored_as: str


def dequantized_view(
    compute: Callable[..., NDArray[Any]],
    shape: tuple[int, ...],
    stored_as: str,
    *inputs: TensorEntry,
    by_rows: bool = False,
) -> DequantizedTensor:
    derived = derive(compute, "float32", shape, *inputs, by_rows=by_rows)
    return DequantizedTensor(**vars(derived), stored_as=stored_as)


def strips(rows: int, cols: int) -> Iterator[slice]:
    step = max(_STRIP_ELEMENTS // cols, 1)
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def check(
    entry: TensorEntry, dtypes: Sequence[str], shape: Sequence[int | None]
) -> tuple[int, ...]:
    """Returns the shape of ``entry``, which must have one of ``dtypes`` and match ``shape``; None:
    any size from 1.
    """
    if entry.dtype not in dtypes:
        raise CheckpointError(
            f"{entry.where} has dtype {entry.dtype}, expected {', '.join(dtypes)}"
        )
    fits = len(entry.shape) == len(shape) and all(
        size == wanted if wanted is not None else size >= 1
        for size, wanted in zip(entry.shape, shape, strict=False)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise CheckpointError(f"{entry.where} has shape {list(entry.shape)}, expected [{wanted}]")
    return entry.shape


def unpack(packed: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The fields of int32 words, lowest first: [.., n] to [.., n * 32 / bits]."""
    octets = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return octets
    fields = np.empty((*octets.shape, 2), np.uint8)
    np.bitwise_and(octets, 15, out=fields[..., 0])
    np.right_shift(octets, 4, out=fields[..., 1])
    return fields.reshape(*octets.shape[:-1], -1)
