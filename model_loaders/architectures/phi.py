"""Phi-3, Phi-3.5 and Phi-4 (dense): Llama with fused projections, a window for every layer, and
rotated parts of heads. Of LongRoPE's two sets of factors see ``rope.py``.
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..rope import partial_rotary_dim
from ..spec import Architecture, register
from . import llama
from .common import layer_windows, weights

WEIGHTS = weights(
    **{**llama.NAMES, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
)


def phi3(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    return {
        **fields,
        "rotary_dim": partial_rotary_dim(config, fields["head_dim"]),
        "layer_window": layer_windows(config, always=True),
    }


register(Architecture("Phi3ForCausalLM", phi3, WEIGHTS, llama.IGNORED))
