"""InternLM (biased attention), InternLM2 (q, k and v in one matrix, by groups), InternLM3."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from . import llama
from .common import by_groups, changed, weights


def standard(config: ModelConfig) -> ModelConfig:
    """InternLM has the base of its frequencies in an object field."""
    rotary = config.part("rotary")
    if rotary.get("type", "origin") not in ("origin", "dynamic"):
        raise rotary.refuse("type", "origin, dynamic")
    theta = rotary.number("base", config.number("rope_theta", 10000.0))
    return config.with_fields(rope_theta=theta)


def internlm(config: ModelConfig) -> dict[str, Any]:
    bias = config.flag("bias", True)
    return {**llama.decoder(config), "qkv_bias": bias, "o_bias": bias}


def internlm3(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    bias = config.flag("bias", fields["mlp_bias"])
    qkv_bias = config.flag("qkv_bias", fields["qkv_bias"])
    return {**fields, "qkv_bias": qkv_bias, "o_bias": bias, "mlp_bias": bias}


WEIGHTS2 = weights(
    layer="model.layers.{i}.",
    embedding="model.tok_embeddings",
    attention_norm="attention_norm",
    qkv="attention.wqkv",
    o="attention.wo",
    mlp_norm="ffn_norm",
    gate_up="feed_forward.w1 feed_forward.w3",
    down="feed_forward.w2",
    final_norm="model.norm",
    lm_head="output",
)
WEIGHTS2 = changed(WEIGHTS2, "qkv", order=by_groups)

register(
    Architecture("InternLMForCausalLM", internlm, llama.WEIGHTS, llama.IGNORED, standard),
    "internlm",
)
register(Architecture("InternLM2ForCausalLM", internlm, WEIGHTS2, llama.IGNORED), "internlm2")
register(Architecture("InternLM3ForCausalLM", internlm3, llama.WEIGHTS, llama.IGNORED), "internlm3")
