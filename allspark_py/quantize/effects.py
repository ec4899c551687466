"""What quantising one weight does to a model, for every weight: to the weight, to the products with
it, and to the probabilities of the next token, while all other weights stay as they are.

All layers are gone through once, with one layer's weights in memory. Each weight adds a residual
stream that its rounding changed, and the streams go on together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
from allspark._allspark import LayerRunner
from allspark.model_loader.convert import Plan
from allspark.model_loader.spec import message_class
from allspark.quantize.arrays import Floats
from allspark.quantize.grid import QuantizedWeight, WeightFormat, quantize
from allspark.quantize.layers import LayerSource, formats_of, one_layer_image
from allspark.quantize.moves import expert_rows, experts_of
from allspark.quantize.statistics import InputStatistics, LayerStatistics
from allspark.quantize.stream import Stream
from allspark.quantize.workers import workers
from numpy.typing import NDArray

_FLOAT32 = 1  # proto ComputeType
# Of the head's model: one layer that adds nothing.
_WIDTH = 8
# Streams whose logits are in memory together.
_AT_ONCE = 4


@dataclass(frozen=True)
class Effect:
    """Of quantising one weight alone.

    Relative errors are the norm of the difference divided by the norm. Products are those with the
    inputs that the weight has in the model; NaN where no token reached it.
    """

    weight: str
    format: WeightFormat
    num_weights: int
    weight_error: float
    weight_cosine: float
    product_error: float
    product_cosine: float
    kl_divergence: float  # mean over all tokens, nats


def weight_effects(
    plan: Plan,
    ids: NDArray[np.int32],
    threads: int = 0,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> list[Effect]:
    """The effects of all weights that `plan` quantises in layers, in their order.

    Args:
        ids: tokens that are read, [sequences, length].
        threads: 0: all cores. They do not change the result.

    Raises:
        ValueError: a number of a layer, of a weight's input or of the logits is not finite.
            Tensors outside layers are not looked at (checks.py).
    """
    with workers(threads) as pool:
        return _Effects(plan, ids, threads, pool).run(progress)


class _Effects:
    def __init__(self, plan: Plan, ids: NDArray[np.int32], threads: int, pool: Executor) -> None:
        self._spec = message_class("DecoderSpec")()
        self._spec.CopyFrom(plan.spec)
        self._spec.compute_type = _FLOAT32
        self._source = LayerSource(plan)
        self._threads = threads
        self._pool = pool
        self._stream = Stream(self._spec, self._source, ids, threads)
        self._changed: list[Floats] = []  # a stream for each effect
        self._effects: list[Effect] = []

    def run(self, progress: Callable[[int, int], object]) -> list[Effect]:
        count = self._spec.num_layers
        for layer in range(count):
            self._go_through(layer)
            progress(layer + 1, count)
        divergences = self._divergences()
        return [
            replace(effect, kl_divergence=divergence)
            for effect, divergence in zip(self._effects, divergences, strict=True)
        ]

    def _go_through(self, layer: int) -> None:
        formats = formats_of(self._spec, layer)
        tensors = self._source.layer(layer)
        statistics = self._stream.statistics(layer, tensors, list(formats))
        quantized = {name: quantize(tensors[name], own) for name, own in formats.items()}
        runner = self._stream.runner(layer, tensors, {})
        for changed in self._changed:
            runner.run(stream=changed, out=changed)
        for name in formats:
            one_changed = self._stream.runner(layer, tensors, {name: quantized[name]})
            self._changed.append(self._stream.after(layer, one_changed))
        self._effects += self._pool.map(
            lambda name: self._measure(layer, name, tensors[name], quantized[name], statistics),
            formats,
        )
        self._stream.advance(layer, tensors, {})

    def _measure(
        self,
        layer: int,
        name: str,
        weight: Floats,
        quantized: QuantizedWeight,
        statistics: LayerStatistics,
    ) -> Effect:
        rounded = quantized.to_float()
        products = np.zeros(3)
        for expert in experts_of(name, self._spec):
            inputs = statistics.get((name, expert))
            if inputs is not None:
                exact = expert_rows(weight, name, expert, self._spec)
                own = expert_rows(rounded, name, expert, self._spec)
                products += _product_sums(exact, own, inputs)
        squares = [np.vdot(each, each) for each in (weight, rounded, rounded - weight)]
        weight_error, weight_cosine = _error_and_cosine(np.array(squares, np.float64))
        product_error, product_cosine = _error_and_cosine(products)
        return Effect(
            f"layers.{layer}.{name}", quantized.format, weight.size, weight_error, weight_cosine,
            product_error, product_cosine, np.nan,
        )  # fmt: skip

    def _divergences(self) -> list[float]:
        """The mean KL divergence of each changed stream from the unchanged one."""
        runner = head_runner(self._source, self._stream.length, self._threads)
        sums = np.zeros(len(self._changed))
        for sequence in range(self._stream.num_sequences):
            part = slice(sequence, sequence + 1)
            logits = _logits(runner, self._stream.rows[part], self._spec.vocab_size)
            exact = _log_probabilities(logits, f"sequence {sequence}")
            weights = np.exp(exact)
            for begin in range(0, len(self._changed), _AT_ONCE):
                batch = slice(begin, begin + _AT_ONCE)
                changed = [
                    _logits(runner, each[part], self._spec.vocab_size)
                    for each in self._changed[batch]
                ]
                places = [
                    f"sequence {sequence}, with {effect.weight} quantised"
                    for effect in self._effects[batch]
                ]
                divergence = functools.partial(_divergence, exact, weights)
                sums[batch] += list(self._pool.map(divergence, changed, places))
        tokens = self._stream.num_sequences * self._stream.length
        return [float(each) / tokens for each in sums]


def _product_sums(weight: Floats, rounded: Floats, inputs: InputStatistics) -> NDArray[np.float64]:
    """The squared norms of the products, of the rounded weight's, and of the difference."""
    difference = rounded - weight
    return np.array(
        [float(np.vdot(each @ inputs.products, each)) for each in (weight, rounded, difference)]
    )


def _error_and_cosine(norms: NDArray[np.float64]) -> tuple[float, float]:
    """From the squared norms of a, b and b - a."""
    exact, rounded, difference = norms
    if not exact > 0:
        return np.nan, np.nan
    cosine = (exact + rounded - difference) / 2 / np.sqrt(exact * max(rounded, 1e-300))
    return float(np.sqrt(max(difference, 0) / exact)), float(min(cosine, 1.0))


def head_runner(source: LayerSource, length: int, threads: int) -> LayerRunner:
    """Runs the last norm and the head alone: of a model whose one layer adds nothing."""
    fields = ("hidden_size", "vocab_size", "norm_eps", "norm_kind", "norm_bias", "logits_scale",
              "logits_soft_cap", "lm_head_bias", "architecture")  # fmt: skip
    own = message_class("DecoderSpec")(
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=_WIDTH, intermediate_size=_WIDTH,
        max_position=length, tie_embeddings=True, compute_type=_FLOAT32,
        **{name: getattr(source.spec, name) for name in fields},
    )  # fmt: skip
    head = source.head()
    head["embedding"] = head.pop("lm_head")  # which is then the head, too
    return LayerRunner(one_layer_image(own, {}, {}, {}, head, fill=0), length, threads)


def _logits(runner: LayerRunner, rows: Floats, vocab_size: int) -> Floats:
    """Of one sequence, [length, vocab_size]."""
    logits = np.empty((1, rows.shape[1], vocab_size), np.float32)
    runner.run(stream=rows, logits=logits)
    return logits[0]


def _log_probabilities(logits: Floats, place: str) -> Floats:
    """In place.

    Raises:
        ValueError: one is not finite; the message begins with the `place`, and names the token.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        logits -= logits.max(axis=1, keepdims=True)
        sums = np.exp(logits).sum(axis=1, dtype=np.float64, keepdims=True)
        logits -= np.log(sums).astype(np.float32)
    finite = np.isfinite(logits).all(axis=1)
    if not finite.all():
        token = int(np.argmin(finite))
        raise ValueError(f"{place}: the logits after token {token} are not finite")
    return logits


def _divergence(exact: Floats, weights: Floats, logits: Floats, place: str) -> float:
    """The sum over tokens; `exact` are log-probabilities, and `weights` the probabilities."""
    own = _log_probabilities(logits, place)
    np.subtract(exact, own, out=own)
    own *= weights
    return float(own.sum(dtype=np.float64))
