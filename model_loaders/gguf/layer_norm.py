"""GGUF architectures with LayerNorm, and MLPs without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import Family, biased, qkv_limit, sliding_window
from .source import Source

# A tensor of the Falcon models that have separate norms for attention and MLP.
SECOND_NORM = "blk.0.attn_norm_2.weight"


def _rotated(config: dict[str, Any], hidden_act: str) -> dict[str, Any]:
    """For declarations whose default is not to rotate all of a head."""
    factor = config.get("partial_rotary_factor", 1.0)
    return {"hidden_act": hidden_act, "partial_rotary_factor": factor}


def _phi2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return _rotated(config, "gelu_new")


def _starcoder2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": biased(source, "attn_q"),
        "sliding_window": sliding_window(source),
    }


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


FALCON = Family("FalconForCausalLM", fields=_falcon, by_groups=True, layer_norm=True)
# Falcon with separate norms for attention and MLP. The MLP's norm is GGUF's "attn_norm".
FALCON_TWO_NORMS = replace(FALCON, names={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
LAYER_NORM = {
    "phi2": Family("PhiForCausalLM", fields=_phi2, layer_norm=True),
    "starcoder2": Family("Starcoder2ForCausalLM", fields=_starcoder2, layer_norm=True),
    "gpt2": Family(
        "GPT2LMHeadModel",
        fields=_gpt2,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        layer_norm=True,
    ),
    "gptneox": Family("GPTNeoXForCausalLM", fields=_neox, by_groups=True, layer_norm=True),
    "falcon": FALCON,
    "bloom": Family("BloomForCausalLM", fields=_bloom, by_groups=True, layer_norm=True),
    "mpt": Family("MptForCausalLM", fields=_mpt, layer_norm=True),
}
