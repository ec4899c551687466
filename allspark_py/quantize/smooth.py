"""SmoothQuant: moves the difficulty of rounding from activations to weights.

After "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models"
(Xiao et al., 2022): s = max|x|^alpha / max|w|^(1 - alpha).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from allspark.quantize.arrays import Floats
from allspark.quantize.awq import Consumer
from allspark.quantize.moves import Move

_SMALLEST = 1e-5


def smooth_scale(move: Move, consumers: Sequence[Consumer], alpha: float) -> Floats:
    """The scale [producers] of a move."""
    inputs = np.max([each.inputs.max_abs for each in consumers], axis=0)
    weights = np.max([np.abs(each.weight).max(axis=0) for each in consumers], axis=0)
    inputs = np.maximum(move.largest_over_producers(inputs), _SMALLEST)
    weights = np.maximum(move.largest_over_producers(weights), _SMALLEST)
    return np.maximum(inputs**alpha / weights ** (1 - alpha), _SMALLEST).astype(np.float32)
