"""FP4 (E2M1) of compressed-tensors: two codes in a byte, the lower four bits first.

A module has ``weight_packed`` uint8 [out, in / 2] and ``weight_scale`` [out, groups]. In MXFP4 that
is the exponent of a power of two (E8M0); in NVFP4 it is a number of E4M3, to be divided by
``weight_global_scale``. Activations stay floats: what was stored for theirs is not used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..derived import derive
from ..errors import CheckpointError
from ..storage import TensorEntry, Tensors
from .e4m3 import E4M3_VALUES
from .modules import ModuleRule
from .tensor import QuantizedTensor, check, quantize_view, unpack

# The numbers of the codes, doubled, so that they are integers; scales are halved for it.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
GROUP_SIZES = {"mxfp4": 32, "nvfp4": 16}

_EXPONENT_BIAS = 127
_EXPONENT_NAN = 255
_GLOBAL = "weight_global_scale"
_MAX_E4M3 = 448.0
_MIN_HALF, _MAX_HALF = 2.0**-10, 65504.0


def float4_rule(kind: str, unused: tuple[str, ...]) -> ModuleRule:
    """The rule of modules whose weights are ``kind``, a key of GROUP_SIZES."""
    if kind == "mxfp4":
        return ModuleRule(_mxfp4, ("weight_packed",), unused)
    return ModuleRule(_nvfp4, ("weight_packed", _GLOBAL), unused)


def _mxfp4(module: Tensors) -> QuantizedTensor:
    stored = module["weight_scale"]

    def scales(exponents: NDArray[Any]) -> NDArray[Any]:
        if exponents.max() == _EXPONENT_NAN:
            raise CheckpointError(
                f"{stored.where} holds {_EXPONENT_NAN}, nan; expected at most 254"
            )
        return np.ldexp(np.float32(0.5), exponents.astype(np.int32) - _EXPONENT_BIAS)

    return _view(module, "mxfp4", "uint8", scales, half_scales=False, power_scales=True)


def _nvfp4(module: Tensors) -> QuantizedTensor:
    divisor = _divisor(module[_GLOBAL])
    # Quantisers choose the divisor so that a weight's largest scale is the largest number of E4M3.
    # float16 has 3 bits more than bfloat16, and below its normal numbers, an error of 2^-25 at
    # most: 2^-15 of the largest scale here.
    half_scales = _MIN_HALF <= _MAX_E4M3 / (2 * float(divisor)) <= _MAX_HALF

    def scales(codes: NDArray[Any]) -> NDArray[Any]:
        return E4M3_VALUES[codes] / divisor * np.float32(0.5)

    return _view(module, "nvfp4", "float8_e4m3", scales, half_scales)


def _view(
    module: Tensors,
    kind: str,
    dtype: str,
    scales: Any,
    half_scales: bool,
    power_scales: bool = False,
) -> QuantizedTensor:
    packed, stored, size = module["weight_packed"], module["weight_scale"], GROUP_SIZES[kind]
    rows, octets = check(packed, ("uint8",), (None, None))
    cols = 2 * octets
    groups = -(-cols // size)
    check(stored, (dtype,), (rows, groups))
    return quantize_view(
        4,
        size,
        derive(lambda array: unpack(array, 4), "uint8", (rows, cols), packed, by_rows=True),
        derive(scales, "float32", (rows, groups), stored, by_rows=True),
        stored_as=kind,
        table=E2M1_DOUBLED,
        half_scales=half_scales,
        power_scales=power_scales,
    )


def _divisor(entry: TensorEntry) -> np.float32:
    """The global scale of a weight."""
    check(entry, ("float32",), () if entry.shape == () else (1,))
    with entry.open() as array:
        value = np.float32(array.reshape(-1)[0])
    if not np.isfinite(value) or value <= 0:
        raise CheckpointError(f"{entry.where} is {value}, expected a finite number above 0")
    return value
