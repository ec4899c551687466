"""Tensors that are not in a checkpoint as they are needed, but are computed from those that are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .storage import TensorEntry


@dataclass(frozen=True, eq=False, kw_only=True)
class DerivedTensor(TensorEntry):
    """A tensor that is computed from others when it is read. Its name and place are the first's."""

    inputs: tuple[TensorEntry, ...]
    compute: Callable[..., NDArray[Any]]

    @contextlib.contextmanager
    def open(self) -> Iterator[NDArray[Any]]:
        with contextlib.ExitStack() as stack:
            arrays = [stack.enter_context(entry.open()) for entry in self.inputs]
            yield np.ascontiguousarray(self.compute(*arrays))


def derive(
    compute: Callable[..., NDArray[Any]], dtype: str, shape: tuple[int, ...], *inputs: TensorEntry
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
    )
