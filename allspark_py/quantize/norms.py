"""How far a rounded weight is from the exact one: squared norms, as float64 [3], of what is exact,
of what the rounded weight gives, and of the difference. Those of a weight's parts add up to its
own.
"""

from __future__ import annotations

import numpy as np
from allspark.quantize.arrays import Floats
from numpy.typing import NDArray

Norms = NDArray[np.float64]


def weight_norms(weight: Floats, rounded: Floats) -> Norms:
    """Of the weight itself."""
    return np.array(
        [np.vdot(each, each) for each in (weight, rounded, rounded - weight)], np.float64
    )


def product_norms(weight: Floats, rounded: Floats, products: Floats) -> Norms:
    """Of its products with inputs, of which `products` is X^T X."""
    return np.array(
        [float(np.vdot(each @ products, each)) for each in (weight, rounded, rounded - weight)]
    )


def look_up_norms(weight: Floats, rounded: Floats, counts: NDArray[np.int64]) -> Norms:
    """Of its rows, each of which is read `counts` times."""
    read = counts > 0
    exact, own = (each[read].astype(np.float64) for each in (weight, rounded))
    return np.array(
        [counts[read] @ np.square(each).sum(axis=1) for each in (exact, own, own - exact)]
    )


def error_and_cosine(norms: Norms) -> tuple[float, float]:
    """NaN where what is exact is 0."""
    exact, rounded, difference = norms
    if not exact > 0:
        return np.nan, np.nan
    cosine = (exact + rounded - difference) / 2 / np.sqrt(exact * max(rounded, 1e-300))
    return float(np.sqrt(max(difference, 0) / exact)), float(min(cosine, 1.0))
