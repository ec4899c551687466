"""Phi-1, Phi-1.5 and Phi-2: parallel attention and MLP after one norm. Phi-3, Phi-3.5 and Phi-4
(dense): Llama with fused projections, a window for every layer, and partly rotated heads. For
LongRoPE's two lists of factors see ``rope.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..rope import partial_rotary_dim
from ..spec import Architecture, register
from . import llama
from .common import layer_norm_decoder, layer_windows, require, weights, with_defaults

WEIGHTS2 = weights(
    layer="model.layers.{i}.",
    embedding="model.embed_tokens",
    attention_norm="input_layernorm",
    qkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    o="self_attn.dense",
    up="mlp.fc1",
    down="mlp.fc2",
    final_norm="model.final_layernorm",
    lm_head="lm_head",
)
WEIGHTS = weights(**{**llama.NAMES, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"})


def phi2(config: ModelConfig) -> dict[str, Any]:
    require(config, qk_layernorm=False)
    fields = layer_norm_decoder(config)
    return {
        **fields,
        "parallel_residual": True,
        "shared_norm": True,
        "lm_head_bias": True,
        "rotary_dim": partial_rotary_dim(config, fields["head_dim"], 0.5),
    }


def phi3(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    return {
        **fields,
        "rotary_dim": partial_rotary_dim(config, fields["head_dim"]),
        "layer_window": layer_windows(config, always=True),
    }


STANDARD2 = partial(with_defaults, hidden_act="gelu_new")
STANDARD = partial(with_defaults, rms_norm_eps=1e-5)
register(Architecture("PhiForCausalLM", phi2, WEIGHTS2, llama.IGNORED, STANDARD2), "phi")
register(Architecture("Phi3ForCausalLM", phi3, WEIGHTS, llama.IGNORED, STANDARD), "phi3")
