"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, Weight, register
from . import llama
from .common import weights, with_defaults
from .experts import expert_weights, stacked_weights, with_experts

LAYER = llama.NAMES["layer"]
DENSE = {name: module for name, module in llama.NAMES.items() if name not in ("gate_up", "down")}


def mixtral(config: ModelConfig) -> dict[str, Any]:
    return with_experts(
        llama.mistral(config),
        num_experts=config.integer("num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_intermediate_size=config.integer("intermediate_size"),
        normalize_expert_weights=True,
    )


register(
    Architecture(
        "MixtralForCausalLM",
        mixtral,
        weights(**DENSE)
        + expert_weights(f"{LAYER}block_sparse_moe.", "gate", ("w1", "w3", "w2"))
        + (Weight("layers.{i}.router", (f"{LAYER}mlp.gate.weight",)),)
        + stacked_weights(f"{LAYER}mlp.experts.gate_up_proj", f"{LAYER}mlp.experts.down_proj"),
        llama.IGNORED,
        partial(with_defaults, rope_theta=1e6, rms_norm_eps=1e-5),
    ),
    "mixtral",
)
