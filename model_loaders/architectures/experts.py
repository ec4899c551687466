"""Mixtures of experts: what the families that have them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..spec import Weight

GATED = ("gate_proj", "up_proj", "down_proj")


def expert_weights(
    layer: str, router: str, modules: Sequence[str] = GATED, shared: str = ""
) -> tuple[Weight, ...]:
    """The rules of experts whose modules follow ``layer``: the ``router``, ``experts.N`` with gate,
    up and down projections called ``modules``, and a ``shared`` expert. ``router`` may be several
    modules, separated by spaces, whose rows are stacked.
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
    """The rules where all experts of a layer are one tensor, as newer code keeps them."""
    return (
        Weight("layers.{i}.experts_gate_up", (gate_up,)),
        Weight("layers.{i}.experts_down", (down,)),
    )


def with_experts(
    fields: dict[str, Any], dense_layers: Sequence[int] = (), **experts: Any
) -> dict[str, Any]:
    """``fields`` of a decoder whose layers have ``experts``, but for the ``dense_layers``."""
    if len(dense_layers) == fields["num_layers"] or not experts["num_experts"]:
        return fields
    inner = fields["intermediate_size"] if dense_layers else 0
    return {**fields, "intermediate_size": inner, "dense_layers": list(dense_layers), **experts}
