"""Quantised weights of a checkpoint, as the other loaders see them.

For them the weight is a float32 tensor that is computed when it is read. If the engine has its
format, the integers, scales and zero points are copied instead (plan.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..derived import DerivedTensor, derive
from ..errors import CheckpointError
from ..storage import TensorEntry, as_float32

FLOATS = ("float32", "float16", "bfloat16")
KEPT_GROUP_SIZES = (0, 32, 64, 128)

# Elements dequantised at a time; this bounds the temporary memory.
_STRIP_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedTensor(TensorEntry):
    """The weight (values - zeros) * scales; reading it gives float32."""

    bits: int
    group_size: int  # input features per scale; 0: all
    values: TensorEntry  # uint8 [out_features, in_features]
    scales: TensorEntry  # a float dtype, [out_features, groups]
    zeros: TensorEntry | None  # uint8, as scales; None: 2^(bits - 1) everywhere
    order: NDArray[np.intp] | None  # the group of each input feature, if not consecutive
    quantize_activations: bool  # as the checkpoint was made for
    has_outputs_first: ClassVar[bool] = True
    # The type's name, in a format that mixes types. There, weights that cannot be kept become
    # floats.
    stored_as: str | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[NDArray[Any]]:
        with self.values.open() as values, self.scales.open() as scales:
            factors = as_float32(scales, self.scales.dtype)
            with contextlib.nullcontext() if self.zeros is None else self.zeros.open() as zeros:
                yield self._dequantise(values, factors, zeros)

    def _dequantise(
        self, values: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any] | None
    ) -> NDArray[Any]:
        rows, cols = self.shape
        group_of = self.order
        if group_of is None:
            group_of = np.arange(cols) // (self.group_size or cols)
        weights = np.empty(self.shape, np.float32)
        for strip in strips(rows, cols):
            zero: Any = 1 << (self.bits - 1)
            if zeros is not None:
                zero = zeros[strip][:, group_of].astype(np.float32)
            np.subtract(values[strip], zero, out=weights[strip], dtype=np.float32)
            weights[strip] *= scales[strip][:, group_of]
        return weights

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
        in_features, lane = self.shape[1], 32 // self.bits
        for unit in (lane, self.group_size or lane):
            if in_features % unit:
                return f"its {in_features} input features are no multiple of {unit}"
        return None


def quantize_view(
    bits: int,
    group_size: int,
    values: TensorEntry,
    scales: TensorEntry,
    zeros: TensorEntry | None = None,
    order: NDArray[np.intp] | None = None,
    quantize_activations: bool = False,
    stored_as: str | None = None,
) -> QuantizedTensor:
    size = 0 if group_size == values.shape[1] else group_size
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
        zeros=zeros,
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


def replace_modules(
    tensors: Mapping[str, TensorEntry],
    marker: str,
    beside: Sequence[str],
    optional: Sequence[str],
    make: Callable[[Mapping[str, TensorEntry]], TensorEntry],
) -> dict[str, TensorEntry]:
    """``tensors``, where each module with a tensor ``marker`` has a single ``weight`` that ``make``
    makes from it and from the module's tensors ``beside`` and ``optional``.
    """
    view = dict(tensors)
    for name, entry in tensors.items():
        module, _, last = name.rpartition(".")
        if last != marker:
            continue
        weight = f"{module}.weight"
        if "weight" not in beside and weight in tensors:
            raise CheckpointError(f"{entry.where}: {weight!r} is also there; a weight is either")
        found = {}
        for part in (marker, *beside, *optional):
            if f"{module}.{part}" in tensors:
                found[part] = view.pop(f"{module}.{part}")
            elif part in beside:
                raise CheckpointError(f"{entry.where}: the tensor '{module}.{part}' is missing")
        view[weight] = make(found)
    if len(view) == len(tensors):
        raise CheckpointError(
            f"no tensor '*.{marker}' is there, which quantization_config announces"
        )
    return view


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
