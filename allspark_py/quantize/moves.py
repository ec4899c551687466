"""Where a scale of input features can come from: what a weight is multiplied with can be divided by
a scale, if the weight's columns are multiplied by it. One table for all architectures, from
DecoderSpec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from allspark.quantize.arrays import Floats, Tensors
from numpy.typing import NDArray


@dataclass(frozen=True)
class Move:
    """A scale [producers] that some tensors are divided by and others are multiplied by.

    Tensors have the names that they have within their layer (csrc/weights/README.md).
    """

    # Matrices whose columns are multiplied, by name and expert.
    consumers: tuple[tuple[str, int], ...]
    # Divided: norms and their biases, or rows of a matrix (and of its bias) from `begin` on.
    vectors: tuple[str, ...] = ()
    rows: tuple[tuple[str, int], ...] = ()
    producers: int = 0
    # The producer of each input feature; None: one for each, in the same order.
    spread: NDArray[np.intp] | None = field(default=None, compare=False)

    def over_features(self, scale: Floats) -> Floats:
        return scale if self.spread is None else scale[self.spread]

    def over_producers(self, values: NDArray[Any]) -> NDArray[Any]:
        """The mean of the features that each producer makes."""
        if self.spread is None:
            return values
        counts = np.bincount(self.spread, minlength=self.producers)
        return np.bincount(self.spread, values, self.producers) / counts

    def largest_over_producers(self, values: NDArray[Any]) -> NDArray[Any]:
        """The largest of the features that each producer makes; `values` are not negative."""
        if self.spread is None:
            return values
        found = np.zeros(self.producers, values.dtype)
        np.maximum.at(found, self.spread, values)
        return found

    def apply(self, tensors: Tensors, spec: Any, scale: Floats) -> None:
        """Changes the tensors of a layer. What the layer computes stays the same."""
        for name in self.vectors:
            tensors[name] = tensors[name] / scale
        for name, begin in self.rows:
            target = tensors[name]
            divisor = scale if target.ndim == 1 else scale[:, np.newaxis]
            target[begin : begin + self.producers] /= divisor
        factors = self.over_features(scale)
        for name, expert in self.consumers:
            rows = expert_rows(tensors[name], name, expert, spec)
            rows *= factors


def has_experts(name: str) -> bool:
    """Whether a weight of a layer has the rows of all experts, one after the other."""
    return name.startswith("experts_")


def expert_rows(weight: Floats, name: str, expert: int, spec: Any) -> Floats:
    """A view of the rows of one expert; of all rows where a weight has no experts."""
    if not has_experts(name):
        return weight
    count = weight.shape[0] // spec.num_experts
    return weight[expert * count : (expert + 1) * count]


def experts_of(name: str, spec: Any) -> range:
    """The experts that a weight of a layer has; one without experts counts as one."""
    return range(spec.num_experts if has_experts(name) else 1)


def moves(tensors: Tensors, spec: Any) -> list[Move]:
    """The moves of a layer with these tensors, in the order of its products."""
    return [*_attention_moves(tensors, spec), *_mlp_moves(tensors, spec)]


def _with_bias(name: str, begin: int, tensors: Tensors) -> tuple[tuple[str, int], ...]:
    bias = f"{name}_bias"
    return ((name, begin), (bias, begin)) if bias in tensors else ((name, begin),)


def _norm(name: str, tensors: Tensors) -> tuple[str, ...]:
    return tuple(each for each in (name, f"{name}_bias") if each in tensors)


def _attention_moves(tensors: Tensors, spec: Any) -> Iterator[Move]:
    readers = ["latents"] if spec.kv_latent else ["qkv"]
    if spec.kv_latent and not spec.q_latent:
        readers.append("q")
    if spec.shared_norm:
        readers.append("up" if spec.ungated_mlp else "gate_up")
    if "attention_norm" in tensors:
        yield Move(
            tuple((name, 0) for name in readers),
            _norm("attention_norm", tensors),
            producers=spec.hidden_size,
        )
    if spec.q_latent:
        yield Move((("q", 0),), ("q_latent_norm",), producers=spec.q_latent)
    if spec.kv_latent:
        size = spec.num_heads * spec.value_dim
        yield Move((("o", 0),), rows=(("v_up", 0),), producers=size)
    elif not spec.qkv_limit:  # a value that is cut off cannot be divided before
        keys = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        heads = np.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)
        spread = heads[:, np.newaxis] * spec.head_dim + np.arange(spec.head_dim)
        yield Move(
            (("o", 0),),
            rows=_with_bias("qkv", keys, tensors),
            producers=spec.num_kv_heads * spec.head_dim,
            spread=spread.ravel() if spec.num_heads != spec.num_kv_heads else None,
        )


def _mlp_moves(tensors: Tensors, spec: Any) -> Iterator[Move]:
    readers = [
        (name, expert)
        for name in ("router", "gate_up", "up", "experts_gate_up", "shared_gate_up")
        if name in tensors
        for expert in experts_of(name, spec)
    ]
    if "mlp_norm" in tensors:
        yield Move(
            tuple(readers), _norm("mlp_norm", tensors), producers=tensors["mlp_norm"].shape[0]
        )
    if "up" in tensors:
        if spec.activation == _RELU:  # act(x / s) = act(x) / s
            rows = _with_bias("up", 0, tensors)
            yield Move((("down", 0),), rows=rows, producers=spec.intermediate_size)
        return
    for kind in ("", "experts_", "shared_"):
        name = f"{kind}gate_up"
        if name not in tensors:
            continue
        for expert in experts_of(name, spec):
            inner = tensors[f"{kind}down"].shape[1]
            begin = (2 * expert + 1) * inner  # gate, up
            rows = _with_bias(name, begin, tensors)
            yield Move(((f"{kind}down", expert),), rows=rows, producers=inner)


_RELU = 3  # proto Activation
