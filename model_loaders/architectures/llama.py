"""Llama and its close relatives: Mistral (a sliding window), Qwen2 (biases of q, k and v), Qwen3
(normalised q and k).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from .common import activation, layer_windows, sizes, weights, with_defaults

# The names of modules; related architectures change some of them.
NAMES = {
    "layer": "model.layers.{i}.",
    "embedding": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_up": "mlp.gate_proj mlp.up_proj",
    "down": "mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
WEIGHTS = weights(**NAMES)
QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
# Frequencies stored in old checkpoints; here they are computed from the configuration.
IGNORED = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


def decoder(config: ModelConfig) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **sizes(config),
        "activation": activation(config),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
    }


def mistral(config: ModelConfig) -> dict[str, Any]:
    return {**decoder(config), "layer_window": layer_windows(config, always=True)}


def qwen2(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder(config),
        "qkv_bias": True,
        "o_bias": False,
        "layer_window": layer_windows(config),
    }


def qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**decoder(config), "qk_norm": True, "layer_window": layer_windows(config)}


register(Architecture("LlamaForCausalLM", decoder, WEIGHTS, IGNORED), "llama")
register(
    Architecture(
        "MistralForCausalLM", mistral, WEIGHTS, IGNORED, partial(with_defaults, sliding_window=4096)
    ),
    "mistral",
)
register(Architecture("Qwen2ForCausalLM", qwen2, WEIGHTS, IGNORED), "qwen2")
register(Architecture("Qwen3ForCausalLM", qwen3, weights(**NAMES, **QK_NORM), IGNORED), "qwen3")
