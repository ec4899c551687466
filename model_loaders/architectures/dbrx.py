"""DBRX: experts in every layer, LayerNorm without biases, and clipped queries, keys and values."""

from __future__ import annotations

import re
from typing import Any

from ..config import ModelConfig
from ..derived import row_range
from ..spec import Architecture, Weight, register
from ..storage import Tensors
from .common import (
    activation,
    optional_number,
    renamed,
    require,
    sizes,
    weights,
    with_defaults,
)
from .experts import with_experts

NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
LAYER = "transformer.blocks.{i}."
EXPERT = LAYER + "ffn.experts.mlp.{e}."
WEIGHTS = weights(
    layer=LAYER,
    embedding="transformer.wte",
    attention_norm="norm_attn_norm.norm_1",
    qkv="norm_attn_norm.attn.Wqkv",
    o="norm_attn_norm.attn.out_proj",
    mlp_norm="norm_attn_norm.norm_2",
    router="ffn.router.layer",
    final_norm="transformer.norm_f",
    lm_head="lm_head",
) + (
    Weight("layers.{i}.experts_gate_up", (f"{EXPERT}w1.weight", f"{EXPERT}v1.weight")),
    Weight("layers.{i}.experts_down", (f"{EXPERT}w2.weight",), transposed=True),
)


def standard(config: ModelConfig) -> ModelConfig:
    attention, experts = config.part("attn_config"), config.part("ffn_config")
    return renamed(config, **NAMES).with_fields(
        hidden_act=experts.part("ffn_act_fn").text("name", "silu"),
        intermediate_size=experts.integer("ffn_hidden_size", 3584),
        num_key_value_heads=attention.integer("kv_n_heads", 1),
        rope_theta=attention.number("rope_theta", config.number("rope_theta", 10000.0)),
    )


def dbrx(config: ModelConfig) -> dict[str, Any]:
    attention, experts = config.part("attn_config"), config.part("ffn_config")
    experts = with_defaults(experts, moe_normalize_expert_weights=1)
    require(experts, moe_normalize_expert_weights=1)
    fields = {
        **sizes(config),
        "activation": activation(config),
        "norm_kind": "LAYER_NORM",
        "norm_eps": 1e-5,
        "qkv_limit": optional_number(attention, "clip_qkv"),
    }
    return with_experts(
        fields,
        num_experts=experts.integer("moe_num_experts", 4),
        experts_per_token=experts.integer("moe_top_k", 1),
        expert_intermediate_size=config.integer("intermediate_size"),
        normalize_expert_weights=experts["moe_normalize_expert_weights"] is not None,
    )


def split_experts(tensors: Tensors, spec: Any) -> Tensors:
    """``tensors`` where each expert has its own matrices, ``mlp.N.w1.weight``, instead of rows in
    one matrix of all experts, ``mlp.w1``.
    """
    view = dict(tensors)
    for name, entry in tensors.items():
        match = re.fullmatch(r"(.*\.ffn\.experts\.mlp)\.(w1|v1|w2)", name)
        if match is None or not entry.shape:
            continue
        rows, rest = divmod(entry.shape[0], spec.num_experts)
        if rows == 0 or rest:
            continue
        del view[name]
        for e in range(spec.num_experts):
            view[f"{match[1]}.{e}.{match[2]}.weight"] = row_range(entry, e * rows, rows)
    return view


register(Architecture("DbrxForCausalLM", dbrx, WEIGHTS, (), standard, view=split_experts), "dbrx")
