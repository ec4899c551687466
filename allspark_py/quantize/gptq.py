"""GPTQ: rounds a weight column by column, and lets the columns that are left take up the error.

After "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (Frantar
et al., 2022). Groups keep their place and their scales, and columns are taken in the order of
descending X^T X ("static groups" with "act order"), so that the format needs no order of columns.
"""

from __future__ import annotations

import numpy as np
from allspark.quantize.arrays import Floats
from allspark.quantize.grid import QuantizedWeight, divisors
from numpy.typing import NDArray

_DAMPING = 0.01  # of the mean diagonal of X^T X
_RAISES = 3  # of the damping, each by 10, where X^T X cannot be factored
_SERIAL_COLUMNS = 8
_WHOLE = 64  # rows of a matrix that is inverted at once


class NotFactorable(Exception):
    """X^T X has no factors, however damped."""


def gptq(weight: Floats, grid: QuantizedWeight, products: Floats) -> QuantizedWeight:
    """`weight` [n, k] with the scales and zero points of `grid`; `products`: X^T X [k, k].

    Input features that are always zero do not count; their weights are rounded to the nearest.

    Raises:
        NotFactorable: as it says.
    """
    order = np.argsort(-np.diagonal(products), kind="stable")
    factor = _upper_factor(products, order)
    left = np.ascontiguousarray(weight.T[order], np.float32)  # [k, n]; rows are columns of W
    groups = order // (weight.shape[1] // grid.scales.shape[1])
    solver = _Solver(left, factor, grid, groups)
    solver.solve(0, len(left))
    values = np.empty(weight.shape, np.uint8)
    values[:, order] = solver.values.T
    return QuantizedWeight(grid.format, values, grid.scales, grid.zeros)


class _Solver:
    def __init__(
        self, left: Floats, factor: Floats, grid: QuantizedWeight, groups: NDArray[np.intp]
    ) -> None:
        self.left = left
        self.factor = factor
        self.groups = groups
        self.scales = np.ascontiguousarray(grid.scales.T)  # [groups, n]
        self.divisors = divisors(self.scales)
        self.zeros = None if grid.zeros is None else grid.zeros.T.astype(np.float32)
        self.middle, self.top = np.float32(grid.format.middle), np.float32(grid.format.top)
        self.values = np.empty(left.shape, np.uint8)
        self.errors = np.empty_like(left)

    def solve(self, begin: int, end: int) -> None:
        """Rounds columns [begin, end); the columns after them are not changed."""
        if end - begin <= _SERIAL_COLUMNS:
            return self._solve_serially(begin, end)
        middle = (begin + end) // 2
        self.solve(begin, middle)
        self._pass_on(begin, middle, end)
        self.solve(middle, end)

    def _pass_on(self, begin: int, middle: int, end: int) -> None:
        """The errors of columns [begin, middle) to those of [middle, end)."""
        factor = self.factor[begin:middle, middle:end]
        self.left[middle:end] -= factor.T @ self.errors[begin:middle]

    def _solve_serially(self, begin: int, end: int) -> None:
        for column in range(begin, end):
            weights, group = self.left[column], self.groups[column]
            scale = self.scales[group]
            zero = self.middle if self.zeros is None else self.zeros[group]
            stored = np.rint(weights / self.divisors[group])
            stored += zero
            np.clip(stored, 0, self.top, out=stored)
            self.values[column] = stored
            stored -= zero
            stored *= scale
            error = np.subtract(weights, stored, out=self.errors[column])
            error /= self.factor[column, column]
            if column + 1 < end:
                row = self.factor[column, column + 1 : end]
                self.left[column + 1 : end] -= np.multiply.outer(row, error)


def _upper_factor(products: Floats, order: NDArray[np.intp]) -> Floats:
    """The upper triangular U of (X^T X + damping)^-1 = U^T U, for features in another order.

    With all rows and columns turned around, X^T X = L L^T. Turned back, L is an upper triangular R,
    and X^T X = R R^T. So U is the inverse of R: one factorisation, and no general inverse.
    """
    turned = order[::-1]
    matrix = products[np.ix_(turned, turned)]
    diagonal = np.einsum("ii->i", matrix)
    mean = float(diagonal.mean(dtype=np.float64))
    if not mean > 0:
        raise NotFactorable
    diagonal[diagonal == 0] = mean  # of a feature that is always zero
    damping, added = _DAMPING * mean, 0.0
    for _ in range(_RAISES + 1):
        diagonal += np.float32(damping - added)
        added = damping
        try:
            factor = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        _invert_lower(factor)
        if np.isfinite(factor).all():
            del matrix, diagonal
            return np.ascontiguousarray(factor[::-1, ::-1])
        damping *= 10
    raise NotFactorable


def _invert_lower(matrix: Floats) -> None:
    """Makes a lower triangular matrix its inverse, by halves."""
    size = len(matrix)
    if size <= _WHOLE:
        matrix[:] = np.tril(np.linalg.inv(matrix))
        return
    half = size // 2
    first, last, between = matrix[:half, :half], matrix[half:, half:], matrix[half:, :half]
    _invert_lower(first)
    _invert_lower(last)
    between[:] = -(last @ between) @ first
