"""Quantises models with methods that look at more than one weight at a time: scale search, AWQ,
GPTQ, SmoothQuant (docs/quantization.md). Each name is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allspark.lazy_names import lazy_names

if TYPE_CHECKING:
    from allspark.quantize.config import QuantizeConfig
    from allspark.quantize.effects import Effect
    from allspark.quantize.layer_effects import layer_effects
    from allspark.quantize.quantizer import QuantizedModel, quantize_model

# Public name -> the module it lives in.
_HOMES = {
    "Effect": "allspark.quantize.effects",
    "QuantizeConfig": "allspark.quantize.config",
    "QuantizedModel": "allspark.quantize.quantizer",
    "layer_effects": "allspark.quantize.layer_effects",
    "quantize_model": "allspark.quantize.quantizer",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
