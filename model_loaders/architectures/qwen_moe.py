"""Qwen with experts: Qwen1.5 and Qwen2 with a gated shared expert, Qwen3 without one."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import Architecture, register
from . import llama
from .common import layer_windows, weights
from .experts import expert_weights, with_experts

MLP = llama.NAMES["layer"] + "mlp."


def _experts(fields: dict[str, Any], config: ModelConfig, **more: Any) -> dict[str, Any]:
    layers = range(fields["num_layers"])
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(layer in layers for layer in dense):
        raise config.error("mlp_only_layers", f"is {dense!r}, expected a list of layers")
    return with_experts(
        fields,
        [layer for layer in layers if layer in dense or (layer + 1) % step],
        num_experts=config.integer("num_experts", minimum=0),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_intermediate_size=config.integer("moe_intermediate_size"),
        normalize_expert_weights=config.flag("norm_topk_prob", False),
        **more,
    )


def _windows(config: ModelConfig, num_layers: int) -> list[int]:
    """Without ``layer_types``, every other layer up to ``max_window_layers`` has the window."""
    if config.get("layer_types") is None:
        end = config.integer("max_window_layers", 28, minimum=0)
        types = [
            "full_attention" if layer % 2 or layer >= end else "sliding_attention"
            for layer in range(num_layers)
        ]
        config = config.with_fields(layer_types=types)
    return layer_windows(config)


def qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    fields = {**llama.qwen2(config), "qkv_bias": config.flag("qkv_bias", True)}
    fields["layer_window"] = _windows(config, fields["num_layers"])
    shared = config.integer("shared_expert_intermediate_size")
    return _experts(fields, config, shared_intermediate_size=shared, shared_gate=True)


def qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """A window holds for all layers or for none, whatever ``max_window_layers`` says."""
    windowed = config.flag("use_sliding_window", False)
    windows = layer_windows(config.with_fields(layer_types=None), always=True) if windowed else []
    return _experts({**llama.qwen3(config), "layer_window": windows}, config)


def _standard(config: ModelConfig) -> ModelConfig:
    """The name that checkpoints use; newer transformers write another one."""
    return config if "num_experts" in config else config.with_names(num_experts="num_local_experts")


register(
    Architecture(
        "Qwen2MoeForCausalLM",
        qwen2_moe,
        llama.WEIGHTS + expert_weights(MLP, "gate shared_expert_gate", shared="shared_expert"),
        llama.IGNORED,
        _standard,
    ),
    "qwen2_moe",
)
register(
    Architecture(
        "Qwen3MoeForCausalLM",
        qwen3_moe,
        weights(**llama.NAMES, **llama.QK_NORM) + expert_weights(MLP, "gate"),
        llama.IGNORED,
        _standard,
    ),
    "qwen3_moe",
)
