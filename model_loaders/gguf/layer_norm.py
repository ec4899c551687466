"""GGUF architectures with LayerNorm, and MLPs without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import Family, biased, qkv_limit
from .source import Source

# The names in Falcon and Bloom.
_FALCON_WHOLE = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_FALCON = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_GPT2_WHOLE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NEOX_WHOLE = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}
_NEOX = {
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_MPT_WHOLE = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
}
_MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_PHI2_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.final_layernorm",
    "output": "lm_head",
}
_PHI2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}

# A tensor of the Falcon models that have separate norms for attention and MLP.
SECOND_NORM = "blk.0.attn_norm_2.weight"


def _rotated(config: dict[str, Any], hidden_act: str) -> dict[str, Any]:
    """For declarations whose default is not to rotate all of a head."""
    factor = config.get("partial_rotary_factor", 1.0)
    return {"hidden_act": hidden_act, "partial_rotary_factor": factor}


def _phi2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return _rotated(config, "gelu_new")


def _starcoder2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    window = source.integer("attention.sliding_window", 0, 0)
    bias = biased(source, "attn_q")
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": bias, "sliding_window": window or None}


def _gpt2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_new"}


def _neox(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_rotated(config, "gelu"),
        "attention_bias": biased(source, "attn_qkv"),
        "use_parallel_residual": source.flag("use_parallel_residual", True),
    }


def _falcon(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    kv_heads = config["num_key_value_heads"]
    two_norms = source.tensor(SECOND_NORM) is not None
    return {
        "hidden_act": "gelu",
        "new_decoder_architecture": two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "parallel_attn": True,
        "bias": biased(source, "attn_qkv"),
        "alibi": False,
    }


def _bloom(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    source.require("attention.max_alibi_bias", 8.0)
    return {}


def _mpt(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    source.require("attention.max_alibi_bias", 8.0)
    hidden = config["hidden_size"]
    ratio = config["intermediate_size"] // hidden
    return {"attn_config": qkv_limit(source), "d_model": hidden, "expansion_ratio": ratio}


FALCON = Family(
    "FalconForCausalLM",
    _FALCON,
    _falcon,
    by_groups=True,
    whole=_FALCON_WHOLE,
    layer="transformer.h.",
    layer_norm=True,
)
# Falcon with separate norms for attention and MLP. The MLP's norm is GGUF's "attn_norm".
FALCON_TWO_NORMS = replace(
    FALCON, names={**_FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)
LAYER_NORM = {
    "phi2": Family("PhiForCausalLM", _PHI2, _phi2, whole=_PHI2_WHOLE, layer_norm=True),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _starcoder2,
        layer_norm=True,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2,
        _gpt2,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        whole=_GPT2_WHOLE,
        layer="transformer.h.",
        layer_norm=True,
    ),
    "gptneox": Family(
        "GPTNeoXForCausalLM",
        _NEOX,
        _neox,
        by_groups=True,
        whole=_NEOX_WHOLE,
        layer="gpt_neox.layers.",
        layer_norm=True,
    ),
    "falcon": FALCON,
    "bloom": Family(
        "BloomForCausalLM",
        _FALCON,
        _bloom,
        by_groups=True,
        whole=_FALCON_WHOLE,
        layer="transformer.h.",
        layer_norm=True,
    ),
    "mpt": Family(
        "MptForCausalLM",
        _MPT,
        _mpt,
        whole=_MPT_WHOLE,
        layer="transformer.blocks.",
        layer_norm=True,
    ),
}
