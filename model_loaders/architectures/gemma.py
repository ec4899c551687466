"""Gemma (scaled embedding, norms stored as their difference from one), Gemma 2 (norms before and
after attention and MLP, soft caps), text models of Gemma 3 (normalised q and k, separate
frequencies for layers with a window).
"""

from __future__ import annotations

import math
from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, Weight, register
from . import llama
from .common import (
    NORMS,
    changed,
    layer_windows,
    optional_number,
    require,
    weights,
    with_defaults,
)

AROUND = {
    **llama.NAMES,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def standard(config: ModelConfig) -> ModelConfig:
    """Adds what Gemma's configurations leave out; their "gelu" always meant its approximation."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu"
    return config.with_fields(
        hidden_act="gelu_pytorch_tanh" if activation == "gelu" else activation,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def standard2(config: ModelConfig) -> ModelConfig:
    return with_defaults(
        standard(config),
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
    )


def standard3(config: ModelConfig) -> ModelConfig:
    """Splits off the frequencies of layers with a window, wherever the configuration has them."""
    config = with_defaults(standard(config), sliding_window=4096)
    both = config.part("rope_parameters")
    whole, window = both.section("full_attention"), both.section("sliding_attention")
    local = config.number("rope_local_base_freq", 10000.0)
    return config.with_fields(
        rope_theta=config.number("rope_theta", 1e6),
        rope_parameters=dict(both if whole is None else whole),
        window_rope_parameters={"rope_theta": local, **(window or {})},
    )


def gemma(config: ModelConfig) -> dict[str, Any]:
    require(config, use_bidirectional_attention=False)
    fields = llama.decoder(config)
    return {**fields, "embedding_scale": math.sqrt(fields["hidden_size"])}


def gemma2(config: ModelConfig, pattern: int = 2) -> dict[str, Any]:
    """One layer of every ``pattern`` has no window."""
    return {
        **gemma(config),
        "norm_placement": "NORM_AROUND",
        "attention_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": optional_number(config, "attn_logit_softcapping"),
        "logits_soft_cap": optional_number(config, "final_logit_softcapping"),
        "layer_window": layer_windows(config, always=True, pattern=pattern),
    }


def gemma3(config: ModelConfig) -> dict[str, Any]:
    pattern = config.integer("sliding_window_pattern", 6)
    return {**gemma2(config, pattern), "qk_norm": True, "window_rope": True}


def rules(names: dict[str, str]) -> tuple[Weight, ...]:
    """Norms are stored as their difference from one."""
    return changed(weights(**names), *NORMS, transform=lambda norm: norm + 1)


QK_NORM = {**AROUND, **llama.QK_NORM}
register(
    Architecture("GemmaForCausalLM", gemma, rules(llama.NAMES), llama.IGNORED, standard), "gemma"
)
register(
    Architecture("Gemma2ForCausalLM", gemma2, rules(AROUND), llama.IGNORED, standard2), "gemma2"
)
register(
    Architecture("Gemma3ForCausalLM", gemma3, rules(QK_NORM), llama.IGNORED, standard3),
    "gemma3_text",
)
