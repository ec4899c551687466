"""compressed-tensors: int4 and int8 packed into words, plain int8, and FP8.

A module has ``weight_scale`` [out, groups] and, if it is not symmetric, ``weight_zero_point``.
``pack-quantized``: ``weight_packed`` int32 [out, in / pack] of unsigned integers, pack = 32 / bits;
zero points [out / pack, groups] likewise, packed along the output features. ``int-quantized``:
``weight`` int8 [out, in] of signed integers; zero points are signed too, [out, groups].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..derived import derive
from ..errors import CheckpointError, UnsupportedModelError
from ..storage import TensorEntry
from .fp8 import checked_block, fp8_weight
from .gptq import group_order
from .tensor import FLOATS, check, quantize_view, replace_modules, unpack

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
# The group of each input feature, if actorder is "group"; -1 if it was not set.
_GROUPS = "weight_g_idx"
# Left over from calibration, or implied by the other tensors; not needed.
_UNUSED = ("weight_shape", "input_scale", "input_zero_point", "output_scale")


@dataclass(frozen=True)
class CompressedTensors:
    bits: int
    is_float: bool
    packed: bool
    symmetric: bool
    group_size: int | None  # None: one scale for the whole weight; -1: all input features
    block: tuple[int, int] | None  # FP8 only
    quantize_activations: bool

    @classmethod
    def parse(cls, config: ModelConfig) -> CompressedTensors:
        layout = config.text("format")
        if layout not in _FORMATS:
            raise UnsupportedModelError(
                f"{config.source}: format is {layout!r}, supported are {', '.join(_FORMATS)}"
            )
        weights, activations = _scheme(config)
        kind, bits = weights.text("type", "int"), weights.integer("num_bits")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise UnsupportedModelError(
                f"{weights.source}: type is {kind!r} and num_bits is {bits}, supported are int of "
                "4 or 8 and float of 8"
            )
        packed = layout == "pack-quantized"
        if not packed and bits != 8 or packed and kind == "float":
            raise UnsupportedModelError(
                f"{weights.source}: {kind} of {bits} bits in format {layout!r} is not supported"
            )
        strategy = weights.text("strategy", "tensor")
        if strategy not in _STRATEGIES or (strategy == "block" and kind == "int"):
            raise UnsupportedModelError(
                f"{weights.source}: strategy is {strategy!r}, supported are "
                f"{', '.join(_STRATEGIES)} (block: for float)"
            )
        block = checked_block(weights, "block_structure") if strategy == "block" else None
        size: int | None
        if strategy == "group":
            size = weights.integer("group_size")
            block = (1, size) if kind == "float" else None
        else:
            size = None if strategy == "tensor" else -1
        return cls(
            bits,
            kind == "float",
            packed,
            weights.flag("symmetric", True),
            size,
            block,
            activations,
        )

    def view(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        beside = ["weight_packed" if self.packed else "weight"]
        optional = [_GROUPS, *_UNUSED]
        if not self.symmetric:
            beside.append("weight_zero_point")
        elif not self.packed:
            optional.append("weight_zero_point")  # Some versions write zeros.
        return replace_modules(tensors, "weight_scale", beside, optional, self._weight)

    def _weight(self, module: Mapping[str, TensorEntry]) -> TensorEntry:
        scale = module["weight_scale"]
        if self.is_float:
            if _GROUPS in module:
                raise UnsupportedModelError(
                    f"{module[_GROUPS].where}: float weights in act order (actorder 'group') are "
                    "not supported"
                )
            return fp8_weight(module["weight"], scale, self.block)
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

        def unsigned(array: NDArray[Any]) -> NDArray[Any]:
            return array.view(np.uint8) ^ np.uint8(128)

        order = None
        if _GROUPS in module:
            order = group_order(module[_GROUPS], cols, groups, size, unset=-1)
        stored = module.get("weight_zero_point")

        def values(array: NDArray[Any], *idle_zeros: NDArray[Any]) -> NDArray[Any]:
            if stored is not None and any(zeros.any() for zeros in idle_zeros):
                raise CheckpointError(
                    f"{stored.where} holds a zero point other than 0, which symmetric rules out"
                )
            return unpack(array, self.bits) if self.packed else unsigned(array)

        zeros: TensorEntry | None = None
        sources = [source]
        if self.symmetric and stored is not None:
            sources.append(stored)
        elif stored is not None:
            if self.packed:
                check(stored, ("int32",), (-(-rows // pack), groups))
            else:
                check(stored, ("int8",), (rows, groups))

            def zero_points(array: NDArray[Any]) -> NDArray[Any]:
                return values(array.T).T[:rows] if self.packed else unsigned(array)

            zeros = derive(zero_points, "uint8", (rows, groups), stored)
        return quantize_view(
            self.bits,
            size,
            derive(values, "uint8", (rows, cols), *sources),
            derive(scales, scale.dtype, (rows, groups), scale),
            zeros,
            order,
            quantize_activations=self.quantize_activations,
        )


def _scheme(config: ModelConfig) -> tuple[ModelConfig, bool]:
    """How weights are quantised, and whether activations are quantised (int8, per token). All
    modules must have the same scheme.
    """
    groups = config.section("config_groups")
    if groups is None or len(groups) != 1:
        count = 0 if groups is None else len(groups)
        raise UnsupportedModelError(
            f"{config.source}: config_groups has {count} groups, supported is 1"
        )
    group = groups.section(next(iter(groups)))
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise CheckpointError(f"{groups.source}: the field 'weights' is missing")
    inputs = group.section("input_activations")
    if inputs is None or weights.text("type", "int") == "float":
        return weights, False
    found = inputs.text("type", "int"), inputs.integer("num_bits"), inputs.get("dynamic")
    if found != ("int", 8, True):
        raise UnsupportedModelError(
            f"{inputs.source}: type is {found[0]!r}, num_bits is {found[1]} and dynamic is "
            f"{found[2]!r}, supported is int of 8 bits, dynamic"
        )
    return weights, True
