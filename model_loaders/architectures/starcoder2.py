"""StarCoder2: Llama with LayerNorm, biases and an MLP without a gate; a sliding window."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from . import llama
from .common import layer_norm_decoder, layer_windows, renamed, weights

NAMES = {name: module for name, module in llama.NAMES.items() if name != "gate_up"}
WEIGHTS = weights(**{**NAMES, "up": "mlp.c_fc", "down": "mlp.c_proj"})


def standard(config: ModelConfig) -> ModelConfig:
    return renamed(config, layer_norm_eps="norm_epsilon").with_fields(
        hidden_act=config.text("hidden_act", "gelu_pytorch_tanh"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def starcoder2(config: ModelConfig) -> dict[str, Any]:
    return {
        **layer_norm_decoder(config, config.flag("use_bias", True)),
        "layer_window": layer_windows(config, always=True),
    }


register(
    Architecture("Starcoder2ForCausalLM", starcoder2, WEIGHTS, llama.IGNORED, standard),
    "starcoder2",
)
