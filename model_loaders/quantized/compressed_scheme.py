"""How compressed-tensors stores the modules of one group: integers, FP8 or FP4.

``pack-quantized``: ``weight_packed`` int32 [out, in / pack] of unsigned integers, pack = 32 / bits;
zero points [out / pack, groups] likewise, packed along the output features. ``int-quantized``:
``weight`` int8 [out, in] of signed integers, also those of 4 bits; zero points are signed too,
[out, groups]. FP8 is in fp8.py, FP4 in float4.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..derived import derive
from ..errors import CheckpointError, UnsupportedModelError
from ..storage import FLOATS, TensorEntry, Tensors
from .float4 import GROUP_SIZES, float4_rule
from .fp8 import checked_block, float8_rule
from .gptq import group_order
from .modules import ModuleRule
from .tensor import QuantizedTensor, check, quantize_view, unpack

MARKER = "weight_scale"
# Formats, and the types of numbers in them.
FORMATS: dict[str, tuple[tuple[str, int], ...]] = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "int-quantized": (("int", 4), ("int", 8)),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("float", 8), ("int", 4), ("int", 8)),
    "mxfp4-pack-quantized": (("float", 4),),
    "nvfp4-pack-quantized": (("float", 4),),
}
_STRATEGIES = ("tensor", "channel", "group", "block")
# The group of each input feature, if actorder is "group"; -1 if it was not set.
_GROUPS = "weight_g_idx"
# Left over from calibration, or implied by the other tensors; not needed.
_UNUSED = ("weight_shape", "input_scale", "input_zero_point", "input_global_scale", "output_scale")


def parse_scheme(group: ModelConfig, layout: str) -> ModuleRule:
    """The rule of a group of ``config_groups`` in one of FORMATS."""
    weights = group.section("weights")
    if weights is None:
        raise CheckpointError(f"{group.source}: the field 'weights' is missing")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits")
    if (kind, bits) not in FORMATS[layout]:
        supported = " and ".join(f"{kind} of {bits}" for kind, bits in FORMATS[layout])
        raise UnsupportedModelError(
            f"{weights.source}: type is {kind!r} and num_bits is {bits}, supported in format "
            f"{layout!r} are {supported}"
        )
    if bits == 4 and kind == "float":
        return _float4(weights, layout)
    strategy = weights.text("strategy", "tensor")
    if strategy not in _STRATEGIES or (strategy == "block" and kind == "int"):
        raise UnsupportedModelError(
            f"{weights.source}: strategy is {strategy!r}, supported are "
            f"{', '.join(_STRATEGIES)} (block: for float)"
        )
    if kind == "float":
        return float8_rule(MARKER, _block(weights, strategy), _UNUSED, refused=(_GROUPS,))
    size = weights.integer("group_size") if strategy == "group" else -1
    scheme = IntegerScheme(
        bits,
        layout == "pack-quantized",
        weights.flag("symmetric", True),
        None if strategy == "tensor" else size,
        _quantizes_activations(group),
    )
    return scheme.rule


def _block(weights: ModelConfig, strategy: str) -> tuple[int, int] | None:
    if strategy == "block":
        return checked_block(weights, "block_structure")
    return (1, weights.integer("group_size")) if strategy == "group" else None


def _float4(weights: ModelConfig, layout: str) -> ModuleRule:
    kind = layout.partition("-")[0]
    size = weights.integer("group_size", GROUP_SIZES[kind])
    if size != GROUP_SIZES[kind]:
        raise UnsupportedModelError(
            f"{weights.source}: group_size is {size}, supported in format {layout!r} is "
            f"{GROUP_SIZES[kind]}"
        )
    if not weights.flag("symmetric", True):
        raise UnsupportedModelError(f"{weights.source}: symmetric is False, supported is True")
    return float4_rule(kind, _UNUSED)


def _quantizes_activations(group: ModelConfig) -> bool:
    """Whether activations are quantised: to int8, per token."""
    inputs = group.section("input_activations")
    if inputs is None:
        return False
    found = inputs.text("type", "int"), inputs.integer("num_bits"), inputs.get("dynamic")
    if found != ("int", 8, True):
        raise UnsupportedModelError(
            f"{inputs.source}: type is {found[0]!r}, num_bits is {found[1]} and dynamic is "
            f"{found[2]!r}, supported is int of 8 bits, dynamic"
        )
    return True


@dataclass(frozen=True)
class IntegerScheme:
    bits: int
    packed: bool
    symmetric: bool
    group_size: int | None  # None: one scale for the whole weight; -1: all input features
    quantize_activations: bool

    @property
    def rule(self) -> ModuleRule:
        beside = ["weight_packed" if self.packed else "weight"]
        optional = [_GROUPS, *_UNUSED]
        if not self.symmetric:
            beside.append("weight_zero_point")
        elif not self.packed:
            optional.append("weight_zero_point")  # Some versions write zeros.
        return ModuleRule(self._weight, tuple(beside), tuple(optional))

    def _weight(self, module: Tensors) -> QuantizedTensor:
        scale = module[MARKER]
        pack = 32 // self.bits
        if self.packed:
            source = module["weight_packed"]
            rows, words = check(source, ("int32",), (None, None))
            cols = words * pack
        else:
            source = module["weight"]
            rows, cols = check(source, ("int8",), (None, None))
        size = cols if self.group_size is None or self.group_size == -1 else self.group_size
        groups = -(-cols // size)
        if scale.shape in ((), (1,)) and self.group_size is None:
            check(scale, FLOATS, scale.shape)
        else:
            check(scale, FLOATS, (rows, groups))

        def scales(array: NDArray[Any]) -> NDArray[Any]:
            return np.broadcast_to(array.reshape(-1, groups), (rows, groups))

        order = None
        if _GROUPS in module:
            order = group_order(module[_GROUPS], cols, groups, size, unset=-1)
        stored = module.get("weight_zero_point")

        def values(array: NDArray[Any], *idle_zeros: NDArray[Any]) -> NDArray[Any]:
            if stored is not None and any(zeros.any() for zeros in idle_zeros):
                raise CheckpointError(
                    f"{stored.where} holds a zero point other than 0, which symmetric rules out"
                )
            return unpack(array, self.bits) if self.packed else self._unsigned(array, source)

        zeros: TensorEntry | None = None
        sources = [source]
        if self.symmetric and stored is not None:
            sources.append(stored)
        elif stored is not None:
            zeros = self._zeros(stored, rows, groups)
        return quantize_view(
            self.bits,
            size,
            derive(values, "uint8", (rows, cols), *sources),
            derive(scales, scale.dtype, (rows, groups), scale),
            zeros,
            order,
            quantize_activations=self.quantize_activations,
        )

    def _zeros(self, stored: TensorEntry, rows: int, groups: int) -> TensorEntry:
        if self.packed:
            check(stored, ("int32",), (-(-rows * self.bits // 32), groups))
        else:
            check(stored, ("int8",), (rows, groups))

        def zero_points(array: NDArray[Any]) -> NDArray[Any]:
            if self.packed:
                return unpack(array.T, self.bits).T[:rows]
            return self._unsigned(array, stored)

        return derive(zero_points, "uint8", (rows, groups), stored)

    def _unsigned(self, array: NDArray[Any], source: TensorEntry) -> NDArray[np.uint8]:
        """Signed integers of ``bits`` bits as the engine has them."""
        half = 1 << (self.bits - 1)
        least, most = int(array.min()), int(array.max())
        if least < -half or most >= half:
            value = least if least < -half else most
            raise CheckpointError(
                f"{source.where} holds {value}, expected {-half} to {half - 1} ({self.bits} bits)"
            )
        return array.view(np.uint8) + np.uint8(half)
