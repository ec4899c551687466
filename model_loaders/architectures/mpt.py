"""MPT: ALiBi, LayerNorm without biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from .alibi import alibi_slopes
from .common import layer_norm_decoder, older_names, optional_number, require, weights

WEIGHTS = weights(
    layer="transformer.blocks.{i}.",
    embedding="transformer.wte",
    attention_norm="norm_1",
    qkv="attn.Wqkv",
    o="attn.out_proj",
    mlp_norm="norm_2",
    up="ffn.up_proj",
    down="ffn.down_proj",
    final_norm="transformer.norm_f",
    lm_head="lm_head",
)


def standard(config: ModelConfig) -> ModelConfig:
    config = config.with_fields(
        hidden_act=None,
        intermediate_size=config.integer("expansion_ratio", 4) * config.integer("d_model"),
    )
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    }
    return older_names(config, "gelu", **names)


def mpt(config: ModelConfig) -> dict[str, Any]:
    require(config, no_bias=True, logit_scale=None)
    attention = config.part("attn_config")
    require(
        attention,
        alibi=True,
        alibi_bias_max=8,
        attn_type="multihead_attention",
        prefix_lm=False,
        qk_ln=False,
        softmax_scale=None,
    )
    fields = layer_norm_decoder(config, bias=False)
    slopes = alibi_slopes(fields["num_heads"])
    limit = {"qkv_limit": optional_number(attention, "clip_qkv")}
    return {**fields, "norm_bias": False, "rotary_dim": 0, "alibi_slopes": slopes, **limit}


# The names in transformers and in the published files.
register(Architecture("MptForCausalLM", mpt, WEIGHTS, (), standard), "mpt")
register(Architecture("MPTForCausalLM", mpt, WEIGHTS, (), standard))
