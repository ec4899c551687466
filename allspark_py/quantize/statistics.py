"""What a weight is multiplied with, summed up over calibration tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from allspark.quantize.arrays import Floats
from numpy.typing import NDArray


@dataclass
class InputStatistics:
    """The inputs of one weight, or of one expert's."""

    num_tokens: int
    mean_abs: NDArray[np.float64]  # [in_features]
    max_abs: Floats  # [in_features]
    products: Floats  # [in_features, in_features]: X^T X; [0, 0]: not asked for

    def divide(self, scale: Floats) -> None:
        """Makes them those of inputs that are divided by `scale` [in_features]."""
        inverse = (1 / scale).astype(np.float32)
        self.mean_abs = self.mean_abs * inverse
        self.max_abs = self.max_abs * inverse
        if self.products.size:
            self.products *= inverse
            self.products *= inverse[:, np.newaxis]

    @property
    def mean_square(self) -> Floats:
        """[in_features]"""
        return np.diagonal(self.products) / np.float32(max(self.num_tokens, 1))


# By the weight's name within its layer and the expert (0 where there are none). A weight that no
# token reached is missing.
LayerStatistics = dict[tuple[str, int], InputStatistics]


def read(runner: Any, names: Sequence[tuple[str, int]]) -> LayerStatistics:
    """The statistics of a native LayerRunner, which gives them away."""
    found: LayerStatistics = {}
    for name, expert in names:
        tokens, sums, largest, products = runner.take_statistics(f"layers.0.{name}", expert)
        if tokens:
            found[name, expert] = InputStatistics(tokens, sums / tokens, largest, products)
    return found
