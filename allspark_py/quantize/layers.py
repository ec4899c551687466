"""One layer of a model at a time: its tensors, and a model that has this layer alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from allspark._allspark import ModelWriter
from allspark.model_loader.convert import Plan, read_rows
from allspark.model_loader.native import required_of
from allspark.model_loader.spec import Part, message_class
from allspark.quantize.arrays import Floats, Tensors, check_finite
from allspark.quantize.grid import QuantizedWeight, WeightFormat
from numpy.typing import NDArray

FLOAT32 = 1  # proto ComputeType

# Fields of DecoderSpec that a layer without experts must not have.
_EXPERT_FIELDS = (
    "num_experts", "experts_per_token", "expert_intermediate_size", "shared_intermediate_size",
    "shared_gate", "dense_layers", "router_score", "router_bias", "normalize_expert_weights",
    "expert_weight_scale", "expert_groups", "used_expert_groups",
)  # fmt: skip


class LayerSource:
    """The tensors of a planned conversion, layer by layer, in float32."""

    def __init__(self, plan: Plan) -> None:
        self.spec = plan.spec
        self.computed = plan.computed
        self._parts: dict[str, list[Part]] = {}
        for part in plan.parts:
            layer, _ = split_name(part.rule.target)
            self._parts.setdefault(layer, []).append(part)

    def others(self) -> list[Part]:
        """The parts that belong to no layer."""
        return self._parts.get("", [])

    def layer(self, index: int) -> Tensors:
        """The tensors of a layer, by their names in it.

        Raises:
            ValueError: a number is not finite; the message names the weight and its place.
        """
        tensors = self._read(f"layers.{index}.")
        for name, rows in tensors.items():
            check_finite(name, rows)
        return {split_name(name)[1]: rows for name, rows in tensors.items()}

    def before(self, ids: NDArray[np.int64]) -> Tensors:
        """What comes before the first layer: the rows of the embedding that these ids have, and
        all else."""
        found: Tensors = {}
        parts = [part for part in self.others() if part.rule.target == "embedding"]
        for part, rows in read_rows(parts, self.spec):
            embedding = found.setdefault(
                "embedding", np.zeros((len(ids), rows.shape[1]), np.float32)
            )
            here = (ids >= part.row_begin) & (ids < part.row_begin + len(rows))
            embedding[here] = rows[ids[here] - part.row_begin]
        names = ["position_embedding", "embedding_norm", "embedding_norm_bias"]
        return found | self._read("", names)

    def after(self) -> Tensors:
        """What comes after the last layer, without the head's matrix."""
        return self._read("", ["lm_head_bias", "final_norm", "final_norm_bias"])

    def table(self, name: str) -> Floats:
        """The whole matrix "embedding" or "lm_head"."""
        return self._read("", [name])[name]

    def _read(self, layer: str, names: Collection[str] | None = None) -> Tensors:
        """The tensors of a layer, or those of them that have one of `names`."""
        parts = self._parts.get(layer, [])
        if names is not None:
            parts = [part for part in parts if part.rule.target in names]
        pieces: dict[str, list[tuple[int, NDArray[Any]]]] = {}
        for part, rows in read_rows(parts, self.spec):
            pieces.setdefault(part.rule.target, []).append((part.row_begin, rows))
        tensors = {}
        for name in list(pieces):
            of_name = sorted(pieces.pop(name), key=lambda piece: piece[0])
            tensors[name] = (
                of_name[0][1]
                if len(of_name) == 1
                else np.concatenate([rows for _, rows in of_name])
            )
        return tensors


def split_name(name: str) -> tuple[str, str]:
    """("layers.3.", "qkv") of "layers.3.qkv"; ("", name) of a tensor outside layers."""
    if not name.startswith("layers."):
        return "", name
    _, index, own = name.split(".", 2)
    return f"layers.{index}.", own


def quantizable(spec: Any, layer: int) -> list[str]:
    """Those of a layer's tensors that the engine can quantise, by their names in it."""
    weights = [tensor.name for tensor in required_of(spec) if tensor.quantizable]
    prefix = f"layers.{layer}."
    return [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]


def head_name(spec: Any) -> str:
    """The tensor that is the head's matrix."""
    return "embedding" if spec.tie_embeddings else "lm_head"


def formats_of(spec: Any, layer: int) -> dict[str, WeightFormat]:
    """The formats of a layer's quantised weights, by their names in it."""
    return _formats(spec, f"layers.{layer}.")


def table_formats(spec: Any) -> dict[str, WeightFormat]:
    """The formats of "embedding" and "lm_head", where they are quantised; tied ones are the
    former."""
    return _formats(spec, "")


def _formats(spec: Any, layer: str) -> dict[str, WeightFormat]:
    formats = {}
    for quant in spec.weight_quant:
        prefix, name = split_name(quant.tensor)
        if prefix == layer:
            formats[name] = WeightFormat(quant.bits, quant.asymmetric, quant.group_size)
    return formats


def one_layer_spec(spec: Any, layer: int, vocab_size: int, quantized: Collection[str]) -> Any:
    """The DecoderSpec of a model that has this layer alone, of which the weights `quantized` are in
    the formats of `spec`."""
    own = message_class("DecoderSpec")()
    own.CopyFrom(spec)
    own.ClearField("weight_quant")
    for quant in spec.weight_quant:
        prefix, name = split_name(quant.tensor)
        if prefix == f"layers.{layer}." and name in quantized:
            own.weight_quant.add().CopyFrom(quant)
            own.weight_quant[-1].tensor = f"layers.0.{name}"
    own.num_layers, own.vocab_size, own.tie_embeddings = 1, vocab_size, True
    own.ClearField("lm_head_bias")
    if spec.layer_window:
        own.layer_window[:] = [spec.layer_window[layer]]
    if layer in spec.dense_layers:
        for name in _EXPERT_FIELDS:
            own.ClearField(name)
    elif spec.num_experts:
        own.ClearField("dense_layers")
        own.ClearField("intermediate_size")
    if layer > 0:
        own.ClearField("learned_positions")
        own.ClearField("embedding_norm")
    return own


def one_layer_image(
    spec: Any,
    computed: Mapping[str, NDArray[Any]],
    tensors: Tensors,
    quantized: Mapping[str, QuantizedWeight],
    others: Tensors,
    fill: float = 1,
) -> Any:
    """A model in memory of `spec`, which is of one_layer_spec.

    `tensors` of the layer, those of them that are `quantized`, and `others` by their whole names.
    What the spec requires and nothing gives, has the value `fill`.
    """
    given = {**others, **computed}
    for name, rows in tensors.items():
        if name not in quantized:
            given[f"layers.0.{name}"] = rows
    for name, weight in quantized.items():
        given |= {f"layers.0.{part}": rows for part, rows in parts_of(name, weight).items()}
    writer = ModelWriter(
        spec.SerializeToString(), message_class("BuildRecord")().SerializeToString()
    )
    for tensor in required_of(spec):
        name = tensor.name
        # A head or an embedding that is not used has no rows.
        rows = given[name] if name in given else np.full(tensor.shape, fill, np.float32)
        writer.add_tensor(name, 0, np.ascontiguousarray(rows), str(rows.dtype))
    return writer.finish()


def parts_of(name: str, weight: QuantizedWeight) -> Tensors:
    """The tensors that a quantised weight is stored as."""
    parts: Tensors = {name: weight.values, f"{name}_scale": weight.scales}
    if weight.zeros is not None:
        parts[f"{name}_zero"] = weight.zeros
    return parts
