"""GGUF architectures with RMSNorm and one MLP per layer."""

from __future__ import annotations

import math
from typing import Any

from ..errors import UnsupportedModelError
from ..rope import DEFAULT_THETA
from .family import Family, biased, sliding_window
from .source import Source


def _llama(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    for key in ("expert_count", "expert_used_count"):
        source.require(key, 0)
    qkv, o, mlp = (biased(source, name) for name in ("attn_q", "attn_output", "ffn_up"))
    fields = {"attention_bias": o, "mlp_bias": mlp}
    if source.has("attention.sliding_window"):
        window = source.integer("attention.sliding_window")
        return {**fields, "architectures": ["MistralForCausalLM"], "sliding_window": window}
    if qkv != o:
        bias = {"qkv_bias": qkv, "bias": o}
        return {**fields, **bias, "architectures": ["InternLM3ForCausalLM"]}
    return fields


def _baichuan(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    if config["num_hidden_layers"] == 40:
        raise UnsupportedModelError(
            f"{source.path}: {source.kind}.block_count is 40: Baichuan 13B, whose ALiBi is not "
            "supported"
        )
    return {}


def _attention_bias(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": biased(source, "attn_q")}


def _gemma(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


# The only models whose scores are not scaled by the head size, by their number of layers.
_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}


def _gemma2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _SCALED_BY_HIDDEN_SIZE[source.kind]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    fields = {"query_pre_attn_scalar": scalar}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if source.has(key):
            fields[key] = source.number(key)
    if source.has("attention.sliding_window"):
        fields["sliding_window"] = source.integer("attention.sliding_window")
    return {**_gemma(source, config), **fields}


def _gemma3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": None,  # unless the file has one
        **_gemma2(source, config),
        "sliding_window_pattern": source.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": source.number("rope.freq_base_swa", DEFAULT_THETA),
    }


def _phi3(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": sliding_window(source)}


def _chatglm(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "multi_query_attention": True,
        "add_qkv_bias": biased(source, "attn_qkv"),
        "rope_ratio": config["rope_theta"] / DEFAULT_THETA,
    }


def _granite(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_attention_bias(source, config),
        "attention_multiplier": source.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": source.number("embedding_scale", 1.0),
        "residual_multiplier": source.number("residual_scale", 1.0),
        "logits_scaling": source.number("logit_scale", 1.0),
    }


def _minicpm(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    """Older files leave out fields that are the same for all these models."""
    if source.has("embedding_scale"):
        return _granite(source, config)
    return {
        **_granite(source, config),
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / math.sqrt(config["num_hidden_layers"]),
        "logits_scaling": config["hidden_size"] / 256,
    }


# GLM-4 as in transformers: queries, keys and values are separate matrices.
GLM = Family("GlmForCausalLM", fields=_attention_bias)
DENSE = {
    "llama": Family("LlamaForCausalLM", fields=_llama, pairs=True),
    "internlm2": Family("LlamaForCausalLM", fields=_llama, pairs=True),
    "baichuan": Family("LlamaForCausalLM", fields=_baichuan, pairs=True),
    "qwen": Family("QWenLMHeadModel"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", fields=_attention_bias),
    "gemma": Family("GemmaForCausalLM", fields=_gemma, norms_with_one=True),
    "gemma2": Family("Gemma2ForCausalLM", fields=_gemma2, norms_with_one=True),
    "gemma3": Family("Gemma3ForCausalLM", fields=_gemma3, norms_with_one=True),
    "phi3": Family("Phi3ForCausalLM", fields=_phi3),
    "chatglm": Family("ChatGLMModel", fields=_chatglm),
    "glm4": Family("Glm4ForCausalLM", fields=_attention_bias),
    "granite": Family("GraniteForCausalLM", fields=_granite, pairs=True),
    "minicpm": Family("GraniteForCausalLM", fields=_minicpm, pairs=True),
    "olmo2": Family("Olmo2ForCausalLM"),
}
