"""Tensors that a checkpoint does not have in the form needed; they are computed from others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .storage import TensorEntry

# Elements computed at a time, where that can be chosen, in whole panels of rows, since the writer
# takes a panel at a time.
_PIECE_ELEMENTS = 1 << 22
_PANEL_ROWS = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class DerivedTensor(TensorEntry):
    """A tensor that is computed from others when it is read. It has the first input's name and
    place in the file. ``by_rows``: each row depends only on the same row of the only input.
    """

    inputs: tuple[TensorEntry, ...]
    compute: Callable[..., NDArray[Any]]
    by_rows: bool = False

    def pieces(self) -> Iterator[tuple[int, TensorEntry]]:
        source = self.inputs[0]
        if not self.by_rows or source.strides is not None:
            yield 0, self
            return
        if isinstance(source, DerivedTensor):
            for begin, part in source.pieces():
                yield begin, self._of(part)
            return
        rows = self.shape[0]
        panels = _PIECE_ELEMENTS // math.prod(self.shape[1:]) // _PANEL_ROWS
        step = _PANEL_ROWS * max(panels, 1)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            yield begin, self._of(row_range(source, begin, count))

    def _of(self, rows: TensorEntry) -> DerivedTensor:
        """The same of a range of the input's rows."""
        shape = (rows.shape[0], *self.shape[1:])
        return replace(self, shape=shape, offset=rows.offset, nbytes=rows.nbytes, inputs=(rows,))

    @contextlib.contextmanager
    def open(self) -> Iterator[NDArray[Any]]:
        with contextlib.ExitStack() as stack:
            arrays = [stack.enter_context(entry.open()) for entry in self.inputs]
            yield np.ascontiguousarray(self.compute(*arrays))


def row_range(source: TensorEntry, begin: int, count: int) -> TensorEntry:
    """Rows [begin, begin + count) of ``source``."""
    shape = (count, *source.shape[1:])
    if isinstance(source, DerivedTensor) or source.strides is not None:
        return derive(lambda rows: rows[begin : begin + count], source.dtype, shape, source)
    row_bytes = source.nbytes // source.shape[0]
    offset = source.offset + begin * row_bytes
    return replace(source, shape=shape, offset=offset, nbytes=count * row_bytes)


def derive(
    compute: Callable[..., NDArray[Any]],
    dtype: str,
    shape: tuple[int, ...],
    *inputs: TensorEntry,
    by_rows: bool = False,
) -> DerivedTensor:
    first = inputs[0]
    return DerivedTensor(
        first.name,
        dtype,
        shape,
        first.file,
        first.offset,
        first.nbytes,
        inputs=inputs,
        compute=compute,
        by_rows=by_rows,
    )
