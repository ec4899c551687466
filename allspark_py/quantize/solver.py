"""Quantises the weights of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from allspark.quantize.arrays import Floats, Tensors
from allspark.quantize.awq import Consumer, awq_scale
from allspark.quantize.config import QuantizeConfig
from allspark.quantize.gptq import NotFactorable, gptq
from allspark.quantize.grid import QuantizedWeight, WeightFormat, quantize, stacked
from allspark.quantize.moves import Move, expert_rows, experts_of, has_experts, moves
from allspark.quantize.search import search
from allspark.quantize.smooth import smooth_scale
from allspark.quantize.statistics import InputStatistics, LayerStatistics


@dataclass
class SolvedLayer:
    """A layer whose weights are quantised."""

    tensors: Tensors  # those that are not quantised
    quantized: dict[str, QuantizedWeight]
    # Weights that fell back to `search`, and why.
    fallbacks: dict[str, str] = field(default_factory=dict)


class LayerSolver:
    """Threads of `pool` share the work. They do not change the result: each weight, each ratio and
    each expert is computed by one thread."""

    def __init__(self, config: QuantizeConfig, spec: Any, pool: Executor) -> None:
        self.config = config
        self.spec = spec
        self.pool = pool

    def solve(
        self,
        tensors: Tensors,
        formats: Mapping[str, WeightFormat],
        statistics: LayerStatistics,
    ) -> SolvedLayer:
        """Takes the tensors and the statistics: changes the former, and empties the latter."""
        if self.config.has_awq or self.config.smooth is not None:
            for move in moves(tensors, self.spec):
                self._move(move, tensors, formats, statistics)
        solved = SolvedLayer(tensors, {})
        jobs = [(name, expert) for name in formats for expert in experts_of(name, self.spec)]
        weights = self.pool.map(lambda job: self._weight(tensors, formats, statistics, *job), jobs)
        parts: dict[str, list[QuantizedWeight]] = {}
        for (name, expert), (weight, reason) in zip(jobs, weights, strict=True):
            parts.setdefault(name, []).append(weight)
            if reason is not None:
                solved.fallbacks[_label(name, expert)] = reason
        for name, of_name in parts.items():
            solved.quantized[name] = stacked(of_name)
            del tensors[name]
        return solved

    def _move(
        self,
        move: Move,
        tensors: Tensors,
        formats: Mapping[str, WeightFormat],
        statistics: LayerStatistics,
    ) -> None:
        """Scales the columns of a move's consumers, unless the method finds no scale."""
        consumers = [
            Consumer(
                expert_rows(tensors[name], name, expert, self.spec),
                formats[name],
                statistics[name, expert],
            )
            for name, expert in move.consumers
            if name in formats and (name, expert) in statistics
        ]
        if not consumers:
            return
        if self.config.smooth is not None:
            scale: Floats | None = smooth_scale(move, consumers, self.config.smooth)
        else:
            scale = awq_scale(move, consumers, self.pool.map)
        if scale is None:
            return
        move.apply(tensors, self.spec, scale)
        factors = move.over_features(scale)
        for key in move.consumers:
            if key in statistics:
                statistics[key].divide(factors)

    def _weight(
        self,
        tensors: Tensors,
        formats: Mapping[str, WeightFormat],
        statistics: LayerStatistics,
        name: str,
        expert: int,
    ) -> tuple[QuantizedWeight, str | None]:
        """The weight, and why it is not of the method."""
        weight = expert_rows(tensors[name], name, expert, self.spec)
        inputs = statistics.pop((name, expert), None)
        if self.config.method == "rtn":
            return quantize(weight, formats[name]), None
        grid = search(weight, formats[name], None if inputs is None else inputs.mean_square)
        if self.config.has_gptq:
            reason = _unfit(inputs)
            if inputs is not None and reason is None:
                try:
                    return gptq(weight, grid, inputs.products), None
                except NotFactorable:
                    reason = "its inputs depend on each other"
            return grid, reason
        return grid, None


def _unfit(inputs: InputStatistics | None) -> str | None:
    """Why inputs are not enough for GPTQ. With fewer tokens than features it fits these tokens, and
    does others more harm than rounding."""
    if inputs is None:
        return "no token reached it"
    features = len(inputs.mean_abs)
    unseen = int(np.count_nonzero(inputs.mean_abs == 0))
    if unseen:
        return f"{unseen} of its {features} input features were always 0"
    if inputs.num_tokens < features:
        return f"it saw {inputs.num_tokens} tokens and has {features} input features"
    return None


def _label(name: str, expert: int) -> str:
    return f"{name}[{expert}]" if has_experts(name) else name
