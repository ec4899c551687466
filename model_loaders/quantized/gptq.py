"""GPTQ: integers packed along the input features, zero points along the output features.

A module has ``qweight`` int32 [in / pack, out], ``qzeros`` int32 [groups, out / pack], ``scales``
[groups, out] and, often, ``g_idx`` int32 [in], the group of each input feature. pack = 32 / bits.
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
from ..re2_patterns import ModulePattern, check_pattern_count
from ..storage import FLOATS, TensorEntry, Tensors
from .modules import ModuleRule, replace_modules
from .tensor import QuantizedTensor, check, quantize_view, unpack

_BITS = (4, 8)
# The number to add to a stored zero point, by the name of the format.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_ADVICE = "a pattern for each module is"


@dataclass(frozen=True)
class GptqModule:
    """How the modules of one kind are quantised."""

    bits: int
    group_size: int  # -1: all input features
    symmetric: bool
    zero_offset: int

    @classmethod
    def parse(cls, config: ModelConfig, zero_offset: int) -> GptqModule:
        bits = config.integer("bits")
        if bits not in _BITS:
            raise UnsupportedModelError(f"{config.source}: bits is {bits}, supported are 4 and 8")
        return cls(bits, checked_group_size(config), config.flag("sym", True), zero_offset)

    @property
    def rule(self) -> ModuleRule:
        return ModuleRule(self._weight, ("qzeros", "scales"), ("g_idx",))

    def _weight(self, module: Tensors) -> QuantizedTensor:
        pack = 32 // self.bits
        qweight, qzeros, scales = module["qweight"], module["qzeros"], module["scales"]
        words, rows = check(qweight, ("int32",), (None, None))
        cols = words * pack
        size = cols if self.group_size == -1 else self.group_size
        groups = -(-cols // size)
        if rows % pack:
            raise CheckpointError(
                f"{qweight.where} has {rows} output features, expected a multiple of {pack}"
            )
        check(qzeros, ("int32",), (groups, rows // pack))
        check(scales, FLOATS, (groups, rows))
        order = None
        if "g_idx" in module:
            order = group_order(module["g_idx"], cols, groups, size)

        def zeros(packed: NDArray[Any]) -> NDArray[Any]:
            stored = unpack(packed, self.bits).T
            most = (1 << self.bits) - 1 - self.zero_offset
            if stored.max() > most:
                raise CheckpointError(
                    f"{qzeros.where} holds {stored.max()}, which readers of checkpoint_format "
                    f"'gptq' take for 0 or for {most + 2}; expected at most {most}"
                )
            return stored + np.uint8(self.zero_offset)

        def values(packed: NDArray[Any], packed_zeros: NDArray[Any]) -> NDArray[Any]:
            if self.symmetric and (zeros(packed_zeros) != 1 << (self.bits - 1)).any():
                raise CheckpointError(
                    f"{qzeros.where} holds a zero point other than {1 << (self.bits - 1)}, which "
                    "sym of quantization_config rules out"
                )
            return unpack(packed.T, self.bits)

        shape = (rows, groups)
        return quantize_view(
            self.bits,
            size,
            derive(values, "uint8", (rows, cols), qweight, qzeros),
            derive(np.transpose, scales.dtype, shape, scales),
            None if self.symmetric else derive(zeros, "uint8", shape, qzeros),
            order,
        )


@dataclass(frozen=True)
class Gptq:
    module: GptqModule
    config: ModelConfig
    # "dynamic": settings by an expression that begins a module's name, after "+:" or nothing, or
    # None after "-:", for modules that are not quantised. The first that matches counts.
    dynamic: Mapping[str, GptqModule | None]

    @classmethod
    def parse(cls, config: ModelConfig) -> Gptq:
        layout = config.text("checkpoint_format", "gptq")
        if layout not in _ZERO_OFFSETS or config.flag("is_marlin_format", False):
            raise UnsupportedModelError(
                f"{config.source}: checkpoint_format is {layout!r}, supported are "
                f"{', '.join(_ZERO_OFFSETS)}"
            )
        config.flag("desc_act", False)  # g_idx decides.
        offset = _ZERO_OFFSETS[layout]
        dynamic = config.part("dynamic")
        check_pattern_count(config, "dynamic", len(dynamic))
        settings = {
            pattern: None
            if pattern.startswith("-:")
            else GptqModule.parse(overridden(config, dynamic.part(pattern)), offset)
            for pattern in dynamic
        }
        return cls(GptqModule.parse(config, offset), config, settings)

    def view(self, tensors: Tensors) -> dict[str, TensorEntry]:
        # Without settings of their own, tensors show which modules are quantised.
        ordered = self.dynamic.items() if any(self.dynamic.values()) else ()
        patterns = [
            (ModulePattern(self.config, "dynamic", _without_sign(pattern), _ADVICE), module)
            for pattern, module in ordered
        ]

        def rule_of(name: str) -> ModuleRule | None:
            for pattern, module in patterns:
                if pattern.begins(name):
                    return None if module is None else module.rule
            return self.module.rule

        return replace_modules(tensors, "qweight", rule_of)


def _without_sign(pattern: str) -> str:
    return pattern[2:] if pattern.startswith(("-:", "+:")) else pattern


def overridden(config: ModelConfig, settings: ModelConfig) -> ModelConfig:
    """``config`` with other ``settings``, of which null counts as absent."""
    own = {name: value for name, value in settings.items() if value is not None}
    return ModelConfig({**config, **own}, settings.source)


def checked_group_size(config: ModelConfig) -> int:
    size = config.integer("group_size", -1, minimum=-1)
    if size == 0:
        raise config.error("group_size", "is 0, expected -1 or a size")
    return size


def group_order(
    entry: TensorEntry, cols: int, groups: int, size: int, unset: int | None = None
) -> NDArray[np.intp] | None:
    """The group of each input feature; None if each group is ``size`` consecutive features, or if
    all are ``unset``.
    """
    check(entry, ("int32", "int64"), (cols,))
    with entry.open() as array:
        order = array.astype(np.intp)
    if unset is not None and (order == unset).all():
        return None
    if order.min() < 0 or order.max() >= groups:
        raise CheckpointError(
            f"{entry.where} holds {order.min()} to {order.max()}, expected 0 to {groups - 1}"
        )
    return None if np.array_equal(order, np.arange(cols) // size) else order
