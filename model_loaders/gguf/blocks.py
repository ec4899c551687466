"""The tensors of GGUF files as the other loaders see them.

F32, F16 and BF16 are read as they are. Q8_0 and Q4_0 are the engine's own formats (integers in
groups of 32 with one scale each) and may be kept. All other types have no kernels: they are
dequantised when they are read, and so are other tensors that are part of the same weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..derived import derive
from ..errors import CheckpointError
from ..quantized.tensor import dequantized_view, quantize_view
from ..storage import TensorEntry
from .file import GgufTensor, library

# Only the first three can be weights; the rules refuse the others.
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64",
          "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}  # fmt: skip
_SCALE_BYTES = 2
_GROUP = 32
# Bits, and a function from a block without its scale to unsigned integers, as the engine has them.
_KEPT: dict[str, tuple[int, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "Q8_0": (8, lambda octets: octets ^ np.uint8(128)),
    "Q4_0": (4, lambda octets: np.concatenate([octets & 15, octets >> 4], axis=-1)),
}


def tensor_entry(tensor: GgufTensor, order: NDArray[np.intp] | None = None) -> TensorEntry:
    """The weight in ``tensor``, with its rows in ``order``."""
    raw, shape, name = tensor.raw, tensor.shape, tensor.block.name
    if name in _PLAIN:
        entry = TensorEntry(raw.name, _PLAIN[name], shape, raw.file, raw.offset, raw.nbytes)
        return entry if order is None else derive(lambda a: a[order], entry.dtype, shape, entry)
    if order is not None:
        raw = derive(lambda rows: rows[order], raw.dtype, raw.shape, raw)
    if name not in _KEPT or len(shape) != 2:
        return dequantized_view(_dequantise(tensor), shape, name, raw, by_rows=len(shape) == 2)
    bits, integers = _KEPT[name]

    def blocks(rows: NDArray[Any]) -> NDArray[Any]:
        return rows.reshape(len(rows), shape[1] // _GROUP, -1)

    def scales(rows: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(blocks(rows)[..., :_SCALE_BYTES]).view("<f2")[..., 0]

    def values(rows: NDArray[Any]) -> NDArray[Any]:
        return integers(blocks(rows)[..., _SCALE_BYTES:]).reshape(len(rows), -1)

    return quantize_view(
        bits,
        _GROUP,
        derive(values, "uint8", shape, raw, by_rows=True),
        derive(scales, "float16", (shape[0], shape[1] // _GROUP), raw, by_rows=True),
        stored_as=name,
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
