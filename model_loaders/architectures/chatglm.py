"""ChatGLM2, ChatGLM3 and GLM-4 as their authors publish them; ``glm.py`` has transformers' form."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..rope import DEFAULT_THETA, partial_rotary_dim
from ..spec import Architecture, register
from .common import require, sizes, weights

WEIGHTS = weights(
    layer="transformer.encoder.layers.{i}.",
    embedding="transformer.embedding.word_embeddings",
    attention_norm="input_layernorm",
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    mlp_norm="post_attention_layernorm",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    final_norm="transformer.encoder.final_layernorm",
    lm_head="transformer.output_layer",
)


def standard(config: ModelConfig) -> ModelConfig:
    config = config.with_names(
        vocab_size="padded_vocab_size",
        num_hidden_layers="num_layers",
        num_key_value_heads="multi_query_group_num",
        head_dim="kv_channels",
        intermediate_size="ffn_hidden_size",
        rms_norm_eps="layernorm_epsilon",
        max_position_embeddings="seq_length",
    )
    if not config.flag("multi_query_attention", False):
        config = config.with_fields(num_key_value_heads=None)
    ratio = config.number("rope_ratio", 1.0)
    if "chatglm2" in config.text("_name_or_path", "").lower():
        # Its own code divides positions by the ratio; that of the later models multiplies the base.
        scaling = config.get("rope_scaling") or {"rope_type": "linear", "factor": ratio}
        return config.with_fields(rope_scaling=scaling)
    return config.with_fields(rope_theta=DEFAULT_THETA * ratio)


def chatglm(config: ModelConfig) -> dict[str, Any]:
    require(
        config,
        rmsnorm=True,
        original_rope=True,
        post_layer_norm=True,
        apply_residual_connection_post_layernorm=False,
        position_encoding_2d=False,
        pre_seq_len=0,
    )
    bias = config.flag("add_bias_linear", False)
    return {
        **sizes(config),
        "qkv_bias": bias or config.flag("add_qkv_bias", False),
        "o_bias": bias,
        "mlp_bias": bias,
        "rotary_dim": partial_rotary_dim(config, sizes(config)["head_dim"], 0.5),
        "rope_interleaved": True,
    }


IGNORED = (r"transformer\.rotary_pos_emb\.inv_freq",)

register(Architecture("ChatGLMModel", chatglm, WEIGHTS, IGNORED, standard), "chatglm")
register(Architecture("ChatGLMForConditionalGeneration", chatglm, WEIGHTS, IGNORED, standard))
