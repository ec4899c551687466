"""The residual stream of all calibration tokens, from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from allspark._allspark import LayerRunner
from allspark.errors import AllSparkError
from allspark.quantize.arrays import Floats, Tensors
from allspark.quantize.grid import QuantizedWeight, WeightFormat, quantize
from allspark.quantize.layers import LayerSource, one_layer_image, one_layer_spec
from allspark.quantize.moves import experts_of
from allspark.quantize.statistics import LayerStatistics, read
from numpy.typing import NDArray


class Stream:
    """The rows [sequences, length, hidden_size] before a layer; the first one begins with `ids`
    [sequences, length].

    Raises ValueError where a number is not finite; it names the weight and the token.
    """

    def __init__(
        self, spec: Any, source: LayerSource, ids: NDArray[np.int32], threads: int
    ) -> None:
        self._spec = spec
        self._source = source
        self._threads = threads
        self.num_sequences, self.length = ids.shape
        own, compact = np.unique(ids, return_inverse=True)
        # Only these rows of the embedding are needed.
        self._own_ids = own.astype(np.int64)
        self._ids = np.ascontiguousarray(compact.reshape(ids.shape), np.int32)
        self._rows: Floats | None = None  # None: before the first layer
        self._before: Tensors | None = None

    @property
    def rows(self) -> Floats:
        """What the layers so far have made."""
        assert self._rows is not None
        return self._rows

    def runner(
        self,
        layer: int,
        tensors: Tensors,
        quantized: Mapping[str, QuantizedWeight],
        embedding: WeightFormat | None = None,
    ) -> LayerRunner:
        """A model of one layer, of which some weights are quantised. The first layer has
        the embedding before it, rounded to a format if `embedding` is one."""
        before: Tensors = {}
        vocab_size = 1
        if layer == 0:
            if self._before is None:
                self._before = self._source.before(self._own_ids)
            before, vocab_size = self._before, len(self._own_ids)
            if embedding is not None:
                # A row has its own scales, so these rows are those of the whole one, rounded.
                rounded = quantize(before["embedding"], embedding).to_float()
                before = {**before, "embedding": rounded}
        spec = one_layer_spec(self._spec, layer, vocab_size, quantized)
        image = one_layer_image(spec, self._source.computed, tensors, quantized, before)
        return LayerRunner(image, self.length, self._threads)

    def statistics(
        self, layer: int, tensors: Tensors, names: list[str], products: bool = True
    ) -> LayerStatistics:
        """Of the inputs of these weights of the next layer; with X^T X, or without."""
        runner = self.runner(layer, tensors, {})
        runner.observe([f"layers.0.{name}" for name in names], products)
        self._run(layer, runner, None)
        keys = [(name, expert) for name in names for expert in experts_of(name, self._spec)]
        return read(runner, keys)

    def after(self, layer: int, runner: LayerRunner) -> Floats:
        """What a layer makes of the rows, which stay."""
        made = np.empty((*self._ids.shape, self._spec.hidden_size), np.float32)
        self._run(layer, runner, made)
        return made

    def advance(
        self, layer: int, tensors: Tensors, quantized: Mapping[str, QuantizedWeight]
    ) -> None:
        """Goes through a layer."""
        runner = self.runner(layer, tensors, quantized)
        if self._rows is None:
            self._rows = self.after(layer, runner)
        else:
            self._run(layer, runner, self._rows)
        self._before = None

    def _run(self, layer: int, runner: LayerRunner, out: Floats | None) -> None:
        try:
            if self._rows is None:
                runner.run(ids=self._ids, out=out)
            else:
                runner.run(stream=self._rows, out=out)
        except AllSparkError as error:
            message = str(error).replace("layers.0.", f"layers.{layer}.")
            raise ValueError(f"layer {layer}: {message}") from None
