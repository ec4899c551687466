"""AWQ, "gemm" layout: integers and zero points are packed along the output features, in an order
of AWQ's own.

A module has ``qweight`` int32 [in, out / 8], ``qzeros`` int32 [groups, out / 8] and ``scales``
[groups, out].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig
from ..derived import derive
from ..errors import UnsupportedModelError
from ..storage import FLOATS, TensorEntry, Tensors
from .gptq import checked_group_size
from .modules import ModuleRule, replace_modules
from .tensor import QuantizedTensor, check, quantize_view, unpack

_BITS = 4
_PACK = 32 // _BITS
# Which field of a word has each of its eight output features.
_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class AwqModule:
    """How the modules of one kind are quantised."""

    group_size: int  # -1: all input features

    @classmethod
    def parse(cls, config: ModelConfig) -> AwqModule:
        bits = config.integer("bits")
        if bits != _BITS:
            raise UnsupportedModelError(f"{config.source}: bits is {bits}, supported is {_BITS}")
        return cls(checked_group_size(config))

    @property
    def rule(self) -> ModuleRule:
        return ModuleRule(self._weight, ("qzeros", "scales"))

    def _weight(self, module: Tensors) -> QuantizedTensor:
        qweight, qzeros, scales = module["qweight"], module["qzeros"], module["scales"]
        cols, words = check(qweight, ("int32",), (None, None))
        size = cols if self.group_size == -1 else self.group_size
        groups, rows = -(-cols // size), words * _PACK
        check(qzeros, ("int32",), (groups, words))
        check(scales, FLOATS, (groups, rows))
        return quantize_view(
            _BITS,
            size,
            derive(_unpack, "uint8", (rows, cols), qweight),
            derive(np.transpose, scales.dtype, (rows, groups), scales),
            derive(_unpack, "uint8", (rows, groups), qzeros),
        )


@dataclass(frozen=True)
class Awq:
    module: AwqModule

    @classmethod
    def parse(cls, config: ModelConfig) -> Awq:
        version = config.text("version", "gemm")
        if version.lower() != "gemm":
            raise UnsupportedModelError(
                f"{config.source}: version is {version!r}, supported is 'gemm'"
            )
        if not config.flag("zero_point", True):
            raise UnsupportedModelError(f"{config.source}: zero_point is False, supported is True")
        return cls(AwqModule.parse(config))

    def view(self, tensors: Tensors) -> dict[str, TensorEntry]:
        return replace_modules(tensors, "qweight", lambda name: self.module.rule)


def _unpack(packed: NDArray[Any]) -> NDArray[Any]:
    """From [n, out / 8] words to [out, n] values."""
    fields = unpack(packed, _BITS).reshape(len(packed), -1, _PACK)
    return fields[:, :, _FIELDS].reshape(len(packed), -1).T
