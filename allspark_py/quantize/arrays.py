"""Types of arrays, and the check that numbers are finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Tensors = dict[str, NDArray[Any]]


def check_finite(name: str, rows: NDArray[Any], first_row: int = 0) -> None:
    """Raises ValueError for the first number of a tensor that is not finite, with its place.
    `first_row`: of the tensor, where `rows` are a part of it.
    """
    finite = np.isfinite(rows)
    if finite.all():
        return
    place = np.argwhere(~finite)[0]
    value = rows[tuple(place)]
    place[0] += first_row
    raise ValueError(f"{name}[{', '.join(map(str, place))}] is {value}; it must be finite")
