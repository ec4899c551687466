"""Falcon: parallel attention and MLP, with one norm (7B, 11B) or two (40B, 180B). In the first
models (rw-1b) the MLP follows attention, and there is ALiBi.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import ModelConfig
from ..spec import Architecture, register
from ..storage import round_float32
from .alibi import alibi_slopes
from .common import by_groups, changed, layer_norm_decoder, older_names, require, weights

NAMES = {
    "layer": "transformer.h.{i}.",
    "embedding": "transformer.word_embeddings",
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
TWO_NORMS = weights(layer=NAMES["layer"], attention_norm="ln_attn", mlp_norm="ln_mlp")
WEIGHTS = changed(weights(**NAMES), "qkv", order=by_groups) + TWO_NORMS


def standard(config: ModelConfig) -> ModelConfig:
    names = {"hidden_size": "n_embed", "intermediate_size": "ffn_hidden_size"}
    config = older_names(config, "gelu", hidden_act="activation", **names)
    kv_heads = config.integer("num_attention_heads")
    if config.flag("new_decoder_architecture", False):
        kv_heads = config.integer("num_kv_heads", kv_heads)
    elif config.flag("multi_query", True):
        kv_heads = 1
    return config.with_fields(num_key_value_heads=kv_heads)


def falcon(config: ModelConfig) -> dict[str, Any]:
    new = config.flag("new_decoder_architecture", False)
    if new:
        require(config, parallel_attn=True)
    parallel = config.flag("parallel_attn", True)
    fields = {
        **layer_norm_decoder(config, config.flag("bias", False)),
        "parallel_residual": parallel,
        "shared_norm": parallel and not (new and config.integer("num_ln_in_parallel_attn", 2) == 2),
    }
    if not config.flag("alibi", False):
        return fields
    # Falcon rounds its slopes to bfloat16 and scales them like the scores.
    slopes = round_float32(alibi_slopes(fields["num_heads"]), "bfloat16")
    scale = np.float32(fields["head_dim"] ** -0.5)
    return {**fields, "rotary_dim": 0, "alibi_slopes": slopes * scale}


register(
    Architecture("FalconForCausalLM", falcon, WEIGHTS, (), standard, prefix="transformer."),
    "falcon",
)
