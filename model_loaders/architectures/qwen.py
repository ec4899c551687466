"""Qwen, the first generation. Beyond ``seq_length`` it would use dynamic NTK scaling and log-n
attention; here that is left to the runtime config. Up to there they change nothing.
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from .common import activation, require, sizes, weights

WEIGHTS = weights(
    layer="transformer.h.{i}.",
    embedding="transformer.wte",
    attention_norm="ln_1",
    qkv="attn.c_attn",
    o="attn.c_proj",
    mlp_norm="ln_2",
    gate_up="mlp.w2 mlp.w1",
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
    lm_head="lm_head",
)


def standard(config: ModelConfig) -> ModelConfig:
    return config.with_names(
        head_dim="kv_channels",
        max_position_embeddings="seq_length",
        partial_rotary_factor="rotary_pct",
        rms_norm_eps="layer_norm_epsilon",
        rope_theta="rotary_emb_base",
    )


def decoder(config: ModelConfig) -> dict[str, Any]:
    require(config, scale_attn_weights=True)
    fields = {**sizes(config), "activation": activation(config), "qkv_bias": True}
    if fields["intermediate_size"] % 2:
        raise config.error("intermediate_size", f"is {fields['intermediate_size']}, which is odd")
    fields["intermediate_size"] //= 2  # The field is the sum of gate and up projection.
    fields["o_bias"] = fields["mlp_bias"] = not config.flag("no_bias", True)
    return fields


IGNORED = (r"transformer\.rotary_emb\.inv_freq",)
register(Architecture("QWenLMHeadModel", decoder, WEIGHTS, IGNORED, standard), "qwen")
