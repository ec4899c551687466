"""GLM-4 in transformers' form: half of each head is rotated, adjacent elements in pairs. The models
from April 2025 on (``Glm4``) have norms before and after attention and MLP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..rope import partial_rotary_dim
from ..spec import Architecture, register
from . import llama
from .common import weights, with_defaults

WEIGHTS = weights(**{**llama.NAMES, "gate_up": "mlp.gate_up_proj"})


def glm(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    return {
        **fields,
        "qkv_bias": config.flag("attention_bias", True),
        "o_bias": False,
        "rotary_dim": partial_rotary_dim(config, fields["head_dim"], 0.5),
        "rope_interleaved": True,
    }


def glm4(config: ModelConfig) -> dict[str, Any]:
    return {**glm(config), "norm_placement": "NORM_AROUND"}


WEIGHTS4 = weights(
    **{
        **llama.NAMES,
        "gate_up": "mlp.gate_up_proj",
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    }
)

STANDARD = partial(with_defaults, rms_norm_eps=1.5625e-7)
register(Architecture("Glm4ForCausalLM", glm4, WEIGHTS4, llama.IGNORED, STANDARD), "glm4")
register(Architecture("GlmForCausalLM", glm, WEIGHTS, llama.IGNORED, STANDARD), "glm")
