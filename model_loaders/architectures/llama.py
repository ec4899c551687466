"""Llama and its close relatives: Mistral (a sliding window), Qwen2 (biased qkv), Qwen3 (normalised
q and k).
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, Weight, register
from .common import activation, layer_windows, sizes

_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_QKV = tuple(_ATTENTION + name for name in ("q_proj", "k_proj", "v_proj"))
_GATE_UP = (_LAYER + "mlp.gate_proj", _LAYER + "mlp.up_proj")

WEIGHTS = (
    Weight("embedding", ("model.embed_tokens.weight",)),
    Weight("layers.{i}.attention_norm", (_LAYER + "input_layernorm.weight",)),
    Weight("layers.{i}.qkv", tuple(name + ".weight" for name in _QKV)),
    Weight("layers.{i}.qkv_bias", tuple(name + ".bias" for name in _QKV)),
    Weight("layers.{i}.o", (_ATTENTION + "o_proj.weight",)),
    Weight("layers.{i}.o_bias", (_ATTENTION + "o_proj.bias",)),
    Weight("layers.{i}.mlp_norm", (_LAYER + "post_attention_layernorm.weight",)),
    Weight("layers.{i}.gate_up", tuple(name + ".weight" for name in _GATE_UP)),
    Weight("layers.{i}.gate_up_bias", tuple(name + ".bias" for name in _GATE_UP)),
    Weight("layers.{i}.down", (_LAYER + "mlp.down_proj.weight",)),
    Weight("layers.{i}.down_bias", (_LAYER + "mlp.down_proj.bias",)),
    Weight("final_norm", ("model.norm.weight",)),
    Weight("lm_head", ("lm_head.weight",), optional=True),
)
QK_NORM = (
    Weight("layers.{i}.q_norm", (_ATTENTION + "q_norm.weight",)),
    Weight("layers.{i}.k_norm", (_ATTENTION + "k_norm.weight",)),
)
# Frequencies that old checkpoints carry; they are computed from the configuration.
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


register(Architecture("LlamaForCausalLM", decoder, WEIGHTS, IGNORED))
register(Architecture("MistralForCausalLM", mistral, WEIGHTS, IGNORED))
register(Architecture("Qwen2ForCausalLM", qwen2, WEIGHTS, IGNORED))
register(Architecture("Qwen3ForCausalLM", qwen3, WEIGHTS + QK_NORM, IGNORED))
