"""Bloom: ALiBi, and a norm between the embedding and the first layer."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from . import falcon
from .alibi import alibi_slopes
from .common import by_groups, changed, layer_norm_decoder, older_names, require, weights

WEIGHTS = changed(
    weights(**falcon.NAMES, embedding_norm="transformer.word_embeddings_layernorm"),
    "qkv",
    order=by_groups,
)


def standard(config: ModelConfig) -> ModelConfig:
    names = {"hidden_size": "n_embed", "max_position_embeddings": "seq_length"}
    absent = {"hidden_act": None, "intermediate_size": None}  # Their values are always the same.
    return older_names(config.with_fields(**absent), "gelu_new", **names)


def bloom(config: ModelConfig) -> dict[str, Any]:
    require(config, apply_residual_connection_post_layernorm=False)
    fields = layer_norm_decoder(config)
    return {
        **fields,
        "embedding_norm": True,
        "rotary_dim": 0,
        "alibi_slopes": alibi_slopes(fields["num_heads"]),
    }


register(
    Architecture("BloomForCausalLM", bloom, WEIGHTS, (), standard, prefix="transformer."), "bloom"
)
