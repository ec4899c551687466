"""GGUF architectures with mixtures of experts. One tensor has all experts of a layer."""

from __future__ import annotations

from typing import Any

from .family import Family, biased, qkv_limit, sliding_window
from .source import Source


def _experts(directory: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Names of the experts' matrices, and of their router, in a ``directory`` of the layer."""
    return {
        "ffn_gate_exps": f"{directory}experts.{{e}}.{gate}",
        "ffn_up_exps": f"{directory}experts.{{e}}.{up}",
        "ffn_down_exps": f"{directory}experts.{{e}}.{down}",
        "ffn_gate_inp": f"{directory}gate",
    }


def _shared(name: str) -> dict[str, str]:
    matrices = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return {f"ffn_{key}_shexp": f"mlp.{name}.{module}" for key, module in matrices.items()}


_QWEN = _experts("mlp.", "gate_proj", "up_proj", "down_proj")
_DEEPSEEK = {
    **_QWEN,
    **_shared("shared_experts"),
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj.keys",
    "attn_v_b": "self_attn.kv_b_proj.values",
}
_DBRX = {
    "ffn_gate_exps": "ffn.experts.mlp.{e}.w1",
    "ffn_up_exps": "ffn.experts.mlp.{e}.v1",
    "ffn_down_exps": "ffn.experts.mlp.{e}.w2",
    "ffn_gate_inp": "ffn.router.layer",
    "attn_output_norm": "norm_attn_norm.norm_2",
}


def _counts(source: Source, count: str = "num_experts") -> dict[str, Any]:
    return {
        count: source.integer("expert_count"),
        "num_experts_per_tok": source.integer("expert_used_count"),
    }


def _mixtral(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return {**_counts(source, "num_local_experts"), "sliding_window": sliding_window(source)}


def _qwen(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    shared = source.integer("expert_shared_feed_forward_length", 0, 0)
    return {
        **_counts(source),
        "attention_bias": biased(source, "attn_q"),
        "moe_intermediate_size": source.integer("expert_feed_forward_length"),
        "norm_topk_prob": source.kind == "qwen3moe",  # not in the file
        "shared_expert_intermediate_size": shared,
    }


def _deepseek(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    source.require("expert_weights_scale", 1.0)
    source.require("expert_gating_func", 1)
    return _shared_experts(source)


def _shared_experts(source: Source) -> dict[str, Any]:
    return {
        **_counts(source, "n_routed_experts"),
        "first_k_dense_replace": source.integer("leading_dense_block_count", 0, 0),
        "moe_intermediate_size": source.integer("expert_feed_forward_length"),
        "n_shared_experts": source.integer("expert_shared_count", 0, 0),
        "norm_topk_prob": False,
    }


# For files without the number of groups and of used groups: those of the models with this many
# experts.
_GROUPS = {160: (8, 3), 256: (8, 4)}


def _deepseek2(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    scale = source.number("expert_weights_scale", 1.0)
    fields = {**_shared_experts(source), "routed_scaling_factor": scale}
    groups, used = _GROUPS.get(fields["n_routed_experts"], (1, 1))
    fields["n_group"] = source.integer("expert_group_count", groups)
    fields["topk_group"] = source.integer("expert_group_used_count", used)
    source.require("expert_gating_func", 1, 2)
    if source.integer("expert_gating_func", 1) == 2:
        fields["architectures"] = ["DeepseekV3ForCausalLM"]
        fields["norm_topk_prob"] = source.flag("expert_weights_norm", False)
    else:
        source.require("expert_weights_norm", False)
        limited = fields["n_group"] > 1
        fields["topk_method"] = "group_limited_greedy" if limited else "greedy"
    rotary_dim = source.integer("rope.dimension_count")
    value_length = source.integer("attention.value_length", 0)
    return {
        **fields,
        "kv_lora_rank": source.integer("attention.kv_lora_rank"),
        "q_lora_rank": source.integer("attention.q_lora_rank", 0, 0),
        "qk_nope_head_dim": config["head_dim"] - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": source.integer("attention.value_length_mla", value_length),
    }


def _dbrx(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    attention = {"kv_n_heads": config["num_key_value_heads"], "rope_theta": config["rope_theta"]}
    attention |= qkv_limit(source)
    counts = _counts(source, "moe_num_experts")
    counts["moe_top_k"] = counts.pop("num_experts_per_tok")
    ffn = {**counts, "ffn_hidden_size": config["intermediate_size"]}
    return {"attn_config": attention, "ffn_config": ffn}


# The architecture "llama", if it has experts.
MIXTRAL = Family(
    "MixtralForCausalLM", _experts("block_sparse_moe.", "w1", "w3", "w2"), _mixtral, pairs=True
)
EXPERTS = {
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        {**_QWEN, **_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        _qwen,
    ),
    "qwen3moe": Family("Qwen3MoeForCausalLM", _QWEN, _qwen),
    "deepseek": Family("DeepseekForCausalLM", _DEEPSEEK, _deepseek, pairs=True),
    "deepseek2": Family("DeepseekV2ForCausalLM", _DEEPSEEK, _deepseek2, latents=True),
    "dbrx": Family(
        "DbrxForCausalLM",
        _DBRX,
        _dbrx,
        transposed=("ffn_down_exps",),
        layer_norm=True,
    ),
}
