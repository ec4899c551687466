"""The tensors of GGUF files as the other loaders see them.

F32, F16 and BF16 are read as they are. Blocks of integers that the engine has, too, may be kept
(kept.py). All other types have no kernels: they are dequantised when they are read, and so are
tensors that are part of the same weight and whose format cannot be the same (quantized/unify.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..derived import derive
from ..errors import CheckpointError
from ..quantized.tensor import QuantizedTensor, ScaleCodes, dequantized_view, quantize_view
from ..storage import TensorEntry
from .file import GgufTensor, library
from .kept import KEPT_TYPES, Products

# Only the first three can be weights; the rules refuse the others.
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64",
          "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}  # fmt: skip


def tensor_entry(tensor: GgufTensor, order: NDArray[np.intp] | None = None) -> TensorEntry:
    """The weight in ``tensor``, with its rows in ``order``."""
    raw, shape, name = tensor.raw, tensor.shape, tensor.block.name
    if name in _PLAIN:
        entry = TensorEntry(raw.name, _PLAIN[name], shape, raw.file, raw.offset, raw.nbytes)
        return entry if order is None else derive(lambda a: a[order], entry.dtype, shape, entry)
    if order is not None:
        raw = derive(lambda rows: rows[order], raw.dtype, raw.shape, raw)
    if name not in KEPT_TYPES or len(shape) != 2:
        return dequantized_view(_dequantise(tensor), shape, name, raw, by_rows=len(shape) == 2)
    return _kept(tensor, raw)


def _kept(tensor: GgufTensor, raw: TensorEntry) -> QuantizedTensor:
    kind, block = KEPT_TYPES[tensor.block.name], tensor.block
    rows, cols = tensor.shape

    def derived(numbers: Callable[[Any], NDArray[Any]], dtype: str, per_row: int) -> TensorEntry:
        def compute(octets: NDArray[Any]) -> NDArray[Any]:
            return numbers(octets.reshape(len(octets), -1, block.nbytes)).reshape(-1, per_row)

        return derive(compute, dtype, (rows, per_row), raw, by_rows=True)

    def codes() -> ScaleCodes | None:
        scales, offsets = kind.scales, kind.offsets
        if not isinstance(scales, Products):
            return None
        blocks = cols // block.elements
        found = ScaleCodes(
            scales=derived(scales.codes, "uint8", groups),
            scale_blocks=derived(scales.block, "float32", blocks),
        )
        if not isinstance(offsets, Products):
            return found
        return replace(
            found,
            offsets=derived(offsets.codes, "uint8", groups),
            offset_blocks=derived(offsets.block, "float32", blocks),
        )

    groups = cols // kind.group_size
    return quantize_view(
        kind.bits,
        kind.group_size,
        derived(kind.values, "uint8", cols),
        derived(kind.scales, "float32", groups),
        stored_as=block.name,
        offsets=None if kind.offsets is None else derived(kind.offsets, "float32", groups),
        table=kind.table,
        half_scales=not kind.power_scales,
        power_scales=kind.power_scales,
        codes=codes(),
    )


def _dequantise(tensor: GgufTensor) -> Callable[[NDArray[Any]], NDArray[Any]]:
    block, shape = tensor.block, tensor.shape

    def compute(rows: NDArray[Any]) -> NDArray[Any]:
        gguf = library(f"{tensor.raw.where} is {block.name}")
        kind = gguf.constants.GGMLQuantizationType(block.code)
        try:
            values: NDArray[Any] = gguf.quants.dequantize(rows, kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{tensor.raw.where} is {block.name}, which the package 'gguf' does not read"
            ) from None
        return values.reshape(-1, *shape[1:])

    return compute
