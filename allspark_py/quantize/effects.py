"""What quantising one weight does to a model, for every weight: to the weight, to the products with
it, and to the probabilities of the next token, while all other weights stay as they are.

All layers are gone through once, with one layer's weights in memory. Each weight adds a residual
stream that its rounding changed, and the streams go on together. A rounded embedding is such a
stream from the first layer on. A rounded head reads the unchanged one.
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
from allspark.quantize.layers import FLOAT32, LayerSource, formats_of, head_name, table_formats
from allspark.quantize.moves import expert_rows, experts_of
from allspark.quantize.norms import (
    Norms,
    error_and_cosine,
    look_up_norms,
    product_norms,
    weight_norms,
)
from allspark.quantize.statistics import LayerStatistics
from allspark.quantize.stream import Stream
from allspark.quantize.tables import head_input_products, head_runner, measure_table
from allspark.quantize.workers import workers
from numpy.typing import NDArray

# Streams whose logits are in memory together.
_AT_ONCE = 4


@dataclass(frozen=True)
class Effect:
    """Of quantising one weight alone.

    Relative errors are the norm of the difference divided by the norm. Products are those with the
    inputs that the weight has in the model; NaN where no token reached it. The products of an
    embedding are the rows of the tokens that were read; but those of one that is also the head are
    the head's.
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
    *,
    tables: bool = False,
) -> list[Effect]:
    """The effects of all weights that `plan` quantises in layers, in their order.

    Args:
        ids: tokens that are read, [sequences, length].
        threads: 0: all cores. They do not change the result.
        tables: also those of "embedding" and "lm_head", where they are quantised. Where both are
            one weight, it is "embedding".

    Raises:
        ValueError: a number of a layer, of a weight's input or of the logits is not finite.
            Tensors outside layers are not looked at (checks.py).
    """
    with workers(threads) as pool:
        return _Effects(plan, ids, threads, pool, tables).run(progress)


class _Effects:
    def __init__(
        self, plan: Plan, ids: NDArray[np.int32], threads: int, pool: Executor, tables: bool
    ) -> None:
        self._spec = message_class("DecoderSpec")()
        self._spec.CopyFrom(plan.spec)
        self._spec.compute_type = FLOAT32
        self._source = LayerSource(plan)
        self._threads = threads
        self._pool = pool
        self._stream = Stream(self._spec, self._source, ids, threads)
        self._tables = table_formats(self._spec) if tables else {}
        self._head = head_name(self._spec)
        self._rounded_head: QuantizedWeight | None = None
        self._counts = np.bincount(ids.ravel(), minlength=self._spec.vocab_size)
        self._changed: dict[str, Floats] = {}  # a stream for each effect, by the weight
        self._effects: list[Effect] = []

    def run(self, progress: Callable[[int, int], object]) -> list[Effect]:
        count = self._spec.num_layers
        for layer in range(count):
            self._go_through(layer)
            progress(layer + 1, count)
        self._effects += [self._measure_table(name, own) for name, own in self._tables.items()]
        divergences = self._divergences()
        return [
            replace(effect, kl_divergence=divergences[effect.weight]) for effect in self._effects
        ]

    def _go_through(self, layer: int) -> None:
        formats = formats_of(self._spec, layer)
        tensors = self._source.layer(layer)
        statistics = self._stream.statistics(layer, tensors, list(formats))
        quantized = {name: quantize(tensors[name], own) for name, own in formats.items()}
        runner = self._stream.runner(layer, tensors, {})
        for changed in self._changed.values():
            runner.run(stream=changed, out=changed)
        for name in formats:
            one_changed = self._stream.runner(layer, tensors, {name: quantized[name]})
            self._changed[f"layers.{layer}.{name}"] = self._stream.after(layer, one_changed)
        if layer == 0 and "embedding" in self._tables:
            one_changed = self._stream.runner(layer, tensors, {}, self._tables["embedding"])
            self._changed["embedding"] = self._stream.after(layer, one_changed)
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
        products: Norms = np.zeros(3)
        for expert in experts_of(name, self._spec):
            inputs = statistics.get((name, expert))
            if inputs is not None:
                exact = expert_rows(weight, name, expert, self._spec)
                own = expert_rows(rounded, name, expert, self._spec)
                products += product_norms(exact, own, inputs.products)
        return _effect(
            f"layers.{layer}.{name}",
            quantized.format,
            weight.size,
            weight_norms(weight, rounded),
            products,
        )

    def _measure_table(self, name: str, weight_format: WeightFormat) -> Effect:
        """After the last layer. Keeps a head."""
        is_head = name == self._head
        measured = measure_table(
            self._source.table(name),
            weight_format,
            self._head_norms() if is_head else self._look_up_norms,
            self._pool,
        )
        if is_head:
            self._rounded_head = measured.quantized
            # A head that is no embedding, too, changes no stream.
            self._changed.setdefault(name, self._stream.rows)
        return _effect(
            name, weight_format, measured.num_weights, measured.weight_norms, measured.product_norms
        )

    def _look_up_norms(self, part: slice, weight: Floats, rounded: Floats) -> Norms:
        return look_up_norms(weight, rounded, self._counts[part])

    def _head_norms(self) -> Callable[[slice, Floats, Floats], Norms]:
        products = head_input_products(self._source, self._stream.rows, self._threads)
        return lambda part, weight, rounded: product_norms(weight, rounded, products)

    def _divergences(self) -> dict[str, float]:
        """The mean KL divergence of each changed stream from the unchanged one."""
        length = self._stream.length
        runner = head_runner(self._source, length, self._threads)
        rounded = runner
        if self._rounded_head is not None:
            rounded = head_runner(self._source, length, self._threads, self._rounded_head)
        names = list(self._changed)
        sums = dict.fromkeys(names, 0.0)
        for sequence in range(self._stream.num_sequences):
            part = slice(sequence, sequence + 1)
            logits = _logits(runner, self._stream.rows[part], self._spec.vocab_size)
            exact = _log_probabilities(logits, f"sequence {sequence}")
            weights = np.exp(exact)
            for begin in range(0, len(names), _AT_ONCE):
                batch = names[begin : begin + _AT_ONCE]
                changed = [
                    _logits(
                        rounded if name == self._head else runner,
                        self._changed[name][part],
                        self._spec.vocab_size,
                    )
                    for name in batch
                ]
                places = [f"sequence {sequence}, with {name} quantised" for name in batch]
                divergence = functools.partial(_divergence, exact, weights)
                for name, own in zip(
                    batch, self._pool.map(divergence, changed, places), strict=True
                ):
                    sums[name] += own
        tokens = self._stream.num_sequences * length
        return {name: each / tokens for name, each in sums.items()}


def _effect(
    name: str, weight_format: WeightFormat, num_weights: int, weight: Norms, products: Norms
) -> Effect:
    """From the norms of the weight and of its products, without the divergence."""
    weight_error, weight_cosine = error_and_cosine(weight)
    product_error, product_cosine = error_and_cosine(products)
    return Effect(
        name, weight_format, num_weights, weight_error, weight_cosine, product_error,
        product_cosine, np.nan,
    )  # fmt: skip


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
