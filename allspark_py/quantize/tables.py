"""The embedding and the head, as far as effects.py looks at them: their errors, and runners of the
head alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from allspark._allspark import LayerRunner
from allspark.errors import AllSparkError
from allspark.model_loader.spec import message_class
from allspark.quantize.arrays import Floats
from allspark.quantize.grid import QuantizedWeight, WeightFormat, quantize, stacked
from allspark.quantize.layers import FLOAT32, LayerSource, head_name, one_layer_image, parts_of
from allspark.quantize.norms import Norms, weight_norms

# Of the head's model: one layer that adds nothing.
_WIDTH = 8
# Of a table that a thread has in memory, rounded, beside the table.
_ROWS = 1024


@dataclass(frozen=True)
class MeasuredTable:
    """A table that was rounded."""

    quantized: QuantizedWeight
    num_weights: int
    weight_norms: Norms
    product_norms: Norms


def measure_table(
    weight: Floats,
    weight_format: WeightFormat,
    norms_of: Callable[[slice, Floats, Floats], Norms],
    pool: Executor,
) -> MeasuredTable:
    """Rounds a table in blocks of rows, since a table may be larger than all layers together.

    Args:
        weight: [vocab_size, hidden_size].
        norms_of: the product_norms of some rows of the weight and of the rounded one.
    """

    def measure(begin: int) -> tuple[QuantizedWeight, Norms, Norms]:
        part = slice(begin, begin + _ROWS)
        quantized = quantize(weight[part], weight_format)
        rounded = quantized.to_float()
        return quantized, weight_norms(weight[part], rounded), norms_of(part, weight[part], rounded)

    blocks = list(pool.map(measure, range(0, len(weight), _ROWS)))
    return MeasuredTable(
        quantized=stacked([quantized for quantized, _, _ in blocks]),
        num_weights=weight.size,
        weight_norms=np.sum([norms for _, norms, _ in blocks], axis=0),
        product_norms=np.sum([norms for _, _, norms in blocks], axis=0),
    )


def head_runner(
    source: LayerSource, length: int, threads: int, quantized: QuantizedWeight | None = None
) -> LayerRunner:
    """Runs the last norm and the head alone: of a model whose one layer adds nothing. With
    `quantized` as the head, in the format that the plan has for it."""
    spec = _head_spec(source.spec, length)
    others = source.after()
    # Its embedding is then the head, too.
    if quantized is None:
        others["embedding"] = source.table(head_name(source.spec))
    else:
        quant = next(
            quant for quant in source.spec.weight_quant if quant.tensor == head_name(source.spec)
        )
        spec.weight_quant.add().CopyFrom(quant)
        spec.weight_quant[0].tensor = "embedding"
        others |= parts_of("embedding", quantized)
    return LayerRunner(one_layer_image(spec, {}, {}, {}, others, fill=0), length, threads)


def head_input_products(source: LayerSource, rows: Floats, threads: int) -> Floats:
    """X^T X of the head's inputs, which the last norm makes of `rows` [sequences, length,
    hidden_size].

    Raises:
        ValueError: an input is not finite; the message names the weight and the token.
    """
    sequences, length, _ = rows.shape
    spec = _head_spec(source.spec, length)
    # The input does not depend on the head, so a head of one row of zeros costs nothing.
    spec.vocab_size, spec.lm_head_bias = 1, False
    others = source.after()
    others.pop("lm_head_bias", None)
    runner = LayerRunner(one_layer_image(spec, {}, {}, {}, others, fill=0), length, threads)
    runner.observe(["embedding"])
    try:
        runner.run(stream=rows, logits=np.empty((sequences, length, 1), np.float32))
    except AllSparkError as error:
        message = str(error).replace("'embedding'", f"'{head_name(source.spec)}'")
        raise ValueError(message) from None
    products: Floats = runner.take_statistics("embedding")[3]
    return products


def _head_spec(spec: Any, length: int) -> Any:
    """The DecoderSpec of a model whose one layer adds nothing before the head."""
    fields = ("hidden_size", "vocab_size", "norm_eps", "norm_kind", "norm_bias", "logits_scale",
              "logits_soft_cap", "lm_head_bias", "architecture")  # fmt: skip
    return message_class("DecoderSpec")(
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=_WIDTH, intermediate_size=_WIDTH,
        max_position=length, tie_embeddings=True, compute_type=FLOAT32,
        **{name: getattr(spec, name) for name in fields},
    )  # fmt: skip
