"""Checkpoints that are quantised already, one module per format (docs/quantization.md).

A format is recognised by ``quantization_config`` in ``config.json``. It converts the tensors of a
checkpoint into those that the architectures' rules name, so that only this package knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..config import ModelConfig
from ..errors import UnsupportedModelError
from ..storage import TensorEntry
from .auto_round import AutoRound
from .awq import Awq
from .compressed import CompressedTensors
from .fp8 import Fp8
from .gptq import Gptq
from .plan import (
    dequantized_targets,
    is_quantized,
    keep_quantized,
    stores_integers,
    warn_of_dequantized,
    without_idle_biases,
)

__all__ = [
    "FORMATS",
    "CheckpointFormat",
    "checkpoint_format",
    "checkpoint_method",
    "dequantized_targets",
    "is_quantized",
    "keep_quantized",
    "stores_integers",
    "warn_of_dequantized",
    "without_idle_biases",
]


class CheckpointFormat(Protocol):
    def view(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """The tensors, with one float32 ``weight`` instead of the tensors of each quantised
        module."""


FORMATS: dict[str, Callable[[ModelConfig], CheckpointFormat]] = {
    "gptq": Gptq.parse,
    "awq": Awq.parse,
    "compressed-tensors": CompressedTensors.parse,
    "fp8": Fp8.parse,
    "auto-round": AutoRound.parse,
}
# Why other formats cannot be read.
_REASONS = {
    "bitsandbytes": "; its 4-bit values are no integers but numbers of a table, and its scales are "
    "quantised, too; save the model dequantised, and quantise it here",
}


# The key that MLX writes into config.json; newer versions also write the usual one.
_MLX = "quantization"
_MLX_REASON = (
    "which MLX writes: packed integers with floats 'scales' and 'biases' are not read; take the "
    "model that it was made from, or save it dequantised"
)


def _check_no_mlx(config: ModelConfig) -> None:
    section = config.section(_MLX)
    if section is None or "quant_method" in config.part("quantization_config"):
        return
    if {"bits", "group_size"} <= section.keys():
        value = {key: section[key] for key in ("bits", "group_size", "mode") if key in section}
        raise UnsupportedModelError(f"{config.source}: {_MLX} is {value}, {_MLX_REASON}")


def checkpoint_method(config: ModelConfig) -> str | None:
    """``quant_method`` of a quantised checkpoint."""
    section = config.section("quantization_config")
    return None if section is None else _method(section)


def _method(section: ModelConfig) -> str:
    if "quant_method" not in section and ("load_in_4bit" in section or "load_in_8bit" in section):
        return "bitsandbytes"  # Older bitsandbytes files have no quant_method.
    return section.text("quant_method")


def checkpoint_format(config: ModelConfig) -> CheckpointFormat | None:
    """The format that ``config`` names; None: not quantised. Errors name the field."""
    _check_no_mlx(config)
    section = config.section("quantization_config")
    if section is None:
        return None
    method = _method(section)
    if method not in FORMATS:
        raise UnsupportedModelError(
            f"{section.source}: quant_method is {method!r}, supported are {', '.join(FORMATS)}"
            f"{_REASONS.get(method, '')}"
        )
    return FORMATS[method](section)
