"""Mixtures of experts: what the families with experts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import ModelConfig
from ..spec import Weight
from .llama import NAMES

# The bias that a router with sigmoids adds to its scores.
EXPERT_BIAS = NAMES["layer"] + "mlp.gate.e_score_correction_bias"
GATED = ("gate_proj", "up_proj", "down_proj")


def expert_weights(
    layer: str, router: str, modules: Sequence[str] = GATED, shared: str = ""
) -> tuple[Weight, ...]:
    """The rules of experts whose modules are appended to ``layer``: the ``router``, ``experts.N``
    with gate, up and down projections called ``modules``, and a ``shared`` expert. ``router`` may
    be several modules, separated by spaces, whose rows are stacked.
    """
    gate, up, down = modules
    rules = [
        Weight("layers.{i}.router", tuple(f"{layer}{name}.weight" for name in router.split())),
        Weight(
            "layers.{i}.experts_gate_up",
            (f"{layer}experts.{{e}}.{gate}.weight", f"{layer}experts.{{e}}.{up}.weight"),
        ),
        Weight("layers.{i}.experts_down", (f"{layer}experts.{{e}}.{down}.weight",)),
        *stacked_weights(f"{layer}experts.gate_up_proj", f"{layer}experts.down_proj"),
    ]
    if shared:
        part = f"{layer}{shared}."
        rules += [
            Weight("layers.{i}.shared_gate_up", (f"{part}{gate}.weight", f"{part}{up}.weight")),
            Weight("layers.{i}.shared_down", (f"{part}{down}.weight",)),
        ]
    return tuple(rules)


def stacked_weights(gate_up: str, down: str) -> tuple[Weight, ...]:
    """The rules where one tensor has all experts of a layer, as in newer code."""
    return (
        Weight("layers.{i}.experts_gate_up", (gate_up,)),
        Weight("layers.{i}.experts_down", (down,)),
    )


def with_experts(
    fields: dict[str, Any], dense_layers: Sequence[int] = (), **experts: Any
) -> dict[str, Any]:
    """``fields`` of a decoder whose layers have ``experts``, except for the ``dense_layers``."""
    if len(dense_layers) == fields["num_layers"] or not experts["num_experts"]:
        return fields
    inner = fields["intermediate_size"] if dense_layers else 0
    return {**fields, "intermediate_size": inner, "dense_layers": list(dense_layers), **experts}


def routed_experts(
    fields: dict[str, Any],
    config: ModelConfig,
    scaled: bool = False,
    grouped: bool = False,
    sigmoids: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """``fields`` with experts as DeepSeek's configurations describe them; without experts,
    unchanged. ``scaled``: weights are multiplied by ``routed_scaling_factor``. ``grouped``: groups
    are chosen first. ``sigmoids``: the router has sigmoids and a bias, and normalises.
    """
    if config.get("n_routed_experts") is None:
        return fields
    if scaled:
        more["expert_weight_scale"] = config.number("routed_scaling_factor", 1.0)
    if grouped:
        more["expert_groups"] = config.integer("n_group", 1)
        more["used_expert_groups"] = config.integer("topk_group", 1)
    if sigmoids:
        more["router_score"], more["router_bias"] = "ROUTER_SIGMOID", True
        more["normalize_expert_weights"] = config.flag("norm_topk_prob", True)
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    frequency = config.integer("moe_layer_freq", 1)
    inner = config.integer("moe_intermediate_size")
    return with_experts(
        fields,
        [layer for layer in range(fields["num_layers"]) if layer < first or layer % frequency],
        num_experts=config.integer("n_routed_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        expert_intermediate_size=inner,
        shared_intermediate_size=inner * config.integer("n_shared_experts", 0, minimum=0),
        **more,
    )
