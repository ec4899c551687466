"""Token ids in whatever form a caller has them."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_id_array(input_ids: Any) -> np.ndarray:
    """A list, NumPy array or torch tensor of integers, 1-D or [1, n], as contiguous int64 [n]."""
    if hasattr(input_ids, "detach"):  # a torch tensor, wherever it lives
        input_ids = input_ids.detach().cpu().numpy()
    array = np.asarray(input_ids)
    if array.size == 0:
        array = array.reshape(-1).astype(np.int64)  # an empty list has no integer type of its own
    if array.dtype.kind not in "iu":
        raise TypeError(f"input_ids has elements of type {array.dtype}; they must be integers")
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise TypeError(f"input_ids has shape {list(array.shape)}; it must be [n] or [1, n]")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"input_ids holds {array.max()}; token ids are below 2^31")
    return np.ascontiguousarray(array, dtype=np.int64)


class DLPackCapsule:
    """Gives a bare DLPack capsule the protocol that NumPy asks for."""

    def __init__(self, capsule: Any):
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU
