"""Granite and MiniCPM: Llama with multipliers for embedding, residual branches, scores, logits."""

from __future__ import annotations

import math
from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from . import llama


def granite(config: ModelConfig) -> dict[str, Any]:
    return {
        **llama.decoder(config),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "attention_scale": config.number("attention_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logits_scale": 1 / config.number("logits_scaling", 1.0),
    }


def minicpm(config: ModelConfig) -> dict[str, Any]:
    fields = llama.decoder(config)
    base = config.number("dim_model_base", 1.0)
    return {
        **fields,
        "tie_embeddings": config.flag("tie_word_embeddings", True),
        "embedding_scale": config.number("scale_emb", 1.0),
        "residual_scale": config.number("scale_depth", 1.0) / math.sqrt(fields["num_layers"]),
        "logits_scale": base / fields["hidden_size"],
    }


register(Architecture("GraniteForCausalLM", granite, llama.WEIGHTS, llama.IGNORED), "granite")
register(Architecture("MiniCPMForCausalLM", minicpm, llama.WEIGHTS, llama.IGNORED), "minicpm")
