"""Converts token ids from any form that a caller has them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from allspark.error_text import shown, wrong_type

BYTES = (bytes, bytearray, memoryview)
_MAX_INT64 = (1 << 63) - 1


def to_id_array(input_ids: Any) -> np.ndarray:
    """A list, NumPy array or torch tensor of integers, 1-D or [1, n], as contiguous int64 [n].

    Raises:
        TypeError: it is something else. ValueError: an id is no int64.
    """
    if hasattr(input_ids, "detach"):  # a torch tensor, on any device
        input_ids = input_ids.detach().cpu().numpy()
    try:
        array = np.asarray(input_ids)
    except ValueError:  # a list of lists of different lengths
        raise TypeError("input_ids has rows of several lengths; it must be [n] or [1, n]") from None
    # NumPy makes numbers of bytes, and a single object of types that it does not know.
    if isinstance(input_ids, BYTES) or (array.ndim == 0 and array is not input_ids):
        raise wrong_type("input_ids", input_ids, "a list, NumPy array or torch tensor of integers")
    if array.size == 0:
        array = array.reshape(-1).astype(np.int64)  # an empty list has no integer type
    if array.dtype.kind not in "iu":
        # NumPy makes something else of a list with an integer beyond its types.
        if isinstance(input_ids, (list, tuple)):
            _check_size(np.asarray(input_ids, dtype=object))
        raise TypeError(f"input_ids has elements of type {array.dtype}; they must be integers")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise TypeError(f"input_ids has shape {list(array.shape)}; it must be [n] or [1, n]")
    if array.dtype == np.uint64 and array.size and array.max() > _MAX_INT64:
        _check_size(array)
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_size(ids: np.ndarray) -> None:
    for index, token in enumerate(ids.ravel().tolist()):
        if isinstance(token, int) and not -_MAX_INT64 <= token <= _MAX_INT64:
            raise ValueError(f"input_ids[{index}] is {shown(token)}; token ids are below 2^31")


def input_ids_of(inputs: Any) -> Any:
    """The "input_ids" of a request's inputs, in a form that to_id_array takes."""
    if not isinstance(inputs, Mapping):
        raise wrong_type("inputs", inputs, "a dict with the key 'input_ids'")
    if "input_ids" not in inputs:
        raise ValueError(f"inputs has the keys {sorted(inputs)}; it must have 'input_ids'")
    input_ids = inputs["input_ids"]
    if is_capsule(input_ids):
        return np.from_dlpack(DLPackCapsule(input_ids))
    return input_ids


def is_capsule(value: Any) -> bool:
    """Whether a value is a DLPack capsule."""
    return type(value).__name__ == "PyCapsule"


class DLPackCapsule:
    """Adds the protocol that NumPy needs to a bare DLPack capsule."""

    def __init__(self, capsule: Any):
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU
