"""The numbers of FP8 E4M3 (OCP 8-bit floating point specification; no infinities)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _values() -> NDArray[np.float32]:
    """The value of each of the 256 codes: 4 bits of exponent with bias 7, 3 of fraction."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    normal = np.ldexp(8.0 + fraction, exponent - 10)
    positive = np.where(exponent == 0, np.ldexp(1.0 * fraction, -9), normal)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


# Ascending up to code 126; 127 is NaN, and from 128 on are their negatives.
E4M3_VALUES = _values()
