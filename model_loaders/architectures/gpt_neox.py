"""GPT-NeoX, Pythia and Dolly 2: parallel attention and MLP with a norm each, or one after the
other; a part of each head is rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..rope import partial_rotary_dim
from ..spec import Architecture, register
from .common import by_groups, changed, layer_norm_decoder, renamed, weights

WEIGHTS = weights(
    layer="gpt_neox.layers.{i}.",
    embedding="gpt_neox.embed_in",
    attention_norm="input_layernorm",
    qkv="attention.query_key_value",
    o="attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
)
# For each head, the rows of its query, key and value.
WEIGHTS = changed(WEIGHTS, "qkv", order=by_groups)
# The name of the head in transformers 5.
WEIGHTS += tuple(
    replace(rule, sources=("lm_head.weight",)) for rule in WEIGHTS if rule.target == "lm_head"
)


def standard(config: ModelConfig) -> ModelConfig:
    config = renamed(config, partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    return config.with_fields(hidden_act=config.text("hidden_act", "gelu"))


def gpt_neox(config: ModelConfig) -> dict[str, Any]:
    fields = layer_norm_decoder(config)
    bias = config.flag("attention_bias", True)
    return {
        **fields,
        "qkv_bias": bias,
        "o_bias": bias,
        "parallel_residual": config.flag("use_parallel_residual", True),
        "rotary_dim": partial_rotary_dim(config, fields["head_dim"], 0.25),
    }


IGNORED = (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)
register(Architecture("GPTNeoXForCausalLM", gpt_neox, WEIGHTS, IGNORED, standard), "gpt_neox")
