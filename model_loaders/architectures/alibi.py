"""ALiBi (Press et al. 2021): the slopes by which a head's scores fall with the distance in
tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """For n heads 2^(-8/n), 2^(-16/n) and so on. Where n is not a power of two: those of the power
    of two below n, then every other one of the power above.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    below = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    above = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)]
    return np.array((below + above)[:num_heads], np.float32)
