"""Decides which weights of a quantised checkpoint are copied into the engine's format unchanged."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..derived import derive
from ..errors import UnsupportedModelError
from ..notices import notice
from ..spec import Part, message_class
from ..storage import TensorEntry
from .tensor import DequantizedTensor, QuantizedTensor
from .unify import unify

# Weights whose columns cannot be reordered, and weights whose rows can follow "down".
_IN_PLACE = re.compile(r"^embedding$|\.(experts|shared)_")
_MAKES_INPUT = re.compile(r"(layers\.\d+\.)(?:gate_up|up)(?:_bias|_high|_scale|_zero|_offset)?")
_ANEW = (
    "customized_quant_config={'quant_method': 'instant_quant', ...} with enable_quant=True "
    "dequantises the checkpoint and quantises it anew"
)


def is_quantized(tensors: Mapping[str, TensorEntry]) -> bool:
    return any(isinstance(entry, QuantizedTensor) for entry in tensors.values())


def stores_integers(tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether any weight was quantised, also in a format that the engine does not have."""
    kinds = (QuantizedTensor, DequantizedTensor)
    return any(isinstance(entry, kinds) for entry in tensors.values())


Orders = dict[str, NDArray[np.int32]]


def keep_quantized(
    parts: list[Part], quantize_activations: bool | None, tied: bool = False
) -> tuple[list[Part], list[Any], Orders]:
    """Plans which weights keep their integers.

    Returns the parts, where a kept weight has integers, scales, and zero points or offsets; the
    WeightQuant messages that describe them; and the column orders of reordered weights, by their
    tensors' names. ``quantize_activations`` None: as the checkpoint was made for. ``tied``: the
    embedding is the head, too, and so multiplied and not only looked up. A weight that
    cannot be kept is dequantised if its format mixes types; otherwise an error names it.
    """
    parts = _unified(parts)
    mixed = _mixed_targets(parts)
    orders = _orders([part for part in parts if part.rule.target not in mixed])
    halves = _half_scaled(parts)
    kept: list[Part] = []
    formats: dict[str, dict[str, Any] | None] = {}  # fields of WeightQuant; None: floats
    for part in parts:
        target, source, found = part.rule.target, part.source, None
        if isinstance(source, QuantizedTensor) and target not in mixed:
            problem = _problem(part)
            if problem is not None:
                raise _refused(part, problem)
            activations = source.quantize_activations
            if quantize_activations is not None:
                activations = quantize_activations
            may_have = (target != "embedding" or tied) and not source.is_float8
            found = {
                **_format(source),
                "half_scales": source.codes is None and target in halves,
                "quantize_activations": activations and may_have,
            }
            kept += [_beside(part, end, entry) for end, entry in _stored(source).items()]
        else:
            kept.append(part)
        if formats.setdefault(target, found) != found:
            raise _refused(part, f"other parts of {target!r} are quantised in another way")
    quants = [
        message_class("WeightQuant")(
            **{name: value for name, value in found.items() if value},
            tensor=target,
            reordered=target in orders,
        )
        for target, found in formats.items()
        if found is not None
    ]
    kept = [_following(part, orders) for part in kept]
    return kept, quants, {f"{target}_order": order for target, order in orders.items()}


def _format(source: QuantizedTensor) -> dict[str, Any]:
    """The fields of WeightQuant that all parts of a weight must share."""
    return {
        "bits": source.bits,
        "group_size": source.group_size,
        "asymmetric": source.zeros is not None,
        "offset": source.offsets is not None,
        "table": b"" if source.table is None else np.array(source.table, np.int8).tobytes(),
        "float8": source.is_float8,
        "power_scales": source.power_scales,
        "scale_codes": source.codes is not None,
    }


def _stored(source: QuantizedTensor) -> dict[str, TensorEntry]:
    """What the engine stores of a weight, by the ends of the tensors' names."""
    values = _in_order(source.values, source.columns())
    stored = {"": values, "_scale": source.scales}
    if source.bits == 6:
        stored[""] = derive(lambda u: u & 15, "uint8", values.shape, values, by_rows=True)
        stored["_high"] = derive(lambda u: u >> 4, "uint8", values.shape, values, by_rows=True)
    if source.zeros is not None:
        stored["_zero"] = source.zeros
    if source.offsets is not None:
        stored["_offset"] = source.offsets
    if source.power_scales:
        scales = source.scales
        stored["_scale"] = derive(_exponents, "uint8", scales.shape, scales, by_rows=True)
    if (codes := source.codes) is not None:
        stored |= {"_scale": codes.scales, "_block_scale": codes.scale_blocks}
        if codes.offsets is not None and codes.offset_blocks is not None:
            stored |= {"_offset": codes.offsets, "_block_offset": codes.offset_blocks}
    return stored


def _exponents(scales: NDArray[Any]) -> NDArray[np.uint8]:
    """Of powers of two in float32; zero for what is below its normal numbers."""
    return (np.ascontiguousarray(scales).view(np.uint32) >> 23).astype(np.uint8)


def _half_scaled(parts: Iterable[Part]) -> set[str]:
    """Targets whose scales are float16 in the engine's file: those of all their parts."""
    halves: dict[str, bool] = {}
    for part in parts:
        is_half = isinstance(part.source, QuantizedTensor) and part.source.half_scales
        halves[part.rule.target] = is_half and halves.get(part.rule.target, True)
    return {target for target, is_half in halves.items() if is_half}


def _unified(parts: list[Part]) -> list[Part]:
    """``parts``, where those of a target have one format if they can."""
    by_target: dict[str, list[Part]] = {}
    for part in parts:
        by_target.setdefault(part.rule.target, []).append(part)
    found = {
        id(part): unified
        for own in by_target.values()
        for part, unified in zip(own, _in_one_format(own), strict=True)
    }
    return [found[id(part)] for part in parts]


def _in_one_format(parts: list[Part]) -> list[Part]:
    sources = [part.source for part in parts if isinstance(part.source, QuantizedTensor)]
    if len(sources) < len(parts) or any(_problem(part) for part in parts):
        return parts
    if all(_format(source) == _format(sources[0]) for source in sources):
        return parts
    unified = unify(sources)
    if unified is None:
        return parts
    return [replace(part, source=source) for part, source in zip(parts, unified, strict=True)]


def _orders(parts: Iterable[Part]) -> Orders:
    """The column order of each target that is reordered; all parts of a target must share it."""
    orders: dict[str, NDArray[np.int32] | None] = {}
    for part in parts:
        target, source = part.rule.target, part.source
        columns = source.columns() if isinstance(source, QuantizedTensor) else None
        if columns is not None and _IN_PLACE.search(target):
            raise _refused(part, f"{target!r} has no groups in act order (desc_act)")
        first = orders.setdefault(target, columns)
        if (first is None) != (columns is None) or (
            first is not None and columns is not None and not np.array_equal(first, columns)
        ):
            raise _refused(part, f"other parts of {target!r} have other groups (desc_act)")
    return {target: order for target, order in orders.items() if order is not None}


def _in_order(values: TensorEntry, columns: NDArray[np.int32] | None) -> TensorEntry:
    if columns is None:
        return values
    return derive(lambda array: array[:, columns], values.dtype, values.shape, values, by_rows=True)


def _following(part: Part, orders: Orders) -> Part:
    """The part; if it makes the input of "down", with its rows in the order of down's columns."""
    found = _MAKES_INPUT.fullmatch(part.rule.target)
    order = orders.get(f"{found[1]}down") if found else None
    if order is None:
        return part
    before = part.rule.order

    def rows(spec: Any) -> NDArray[np.intp]:
        count = part.source.shape[-1 if part.rule.transposed else 0]
        own = np.arange(count) if before is None else before(spec)
        return own.reshape(-1, len(order))[:, order].ravel()  # gate and up, if both are here

    return replace(part, rule=replace(part.rule, order=rows))


def _mixed_targets(parts: Iterable[Part]) -> set[str]:
    """Targets with parts of several formats, or with parts that cannot be kept, in a format that
    mixes types."""
    formats: dict[str, list[dict[str, Any] | None]] = {}
    mixing: set[str] = set()
    for part in parts:
        source, found = part.source, None
        if isinstance(source, QuantizedTensor) and source.stored_as:
            mixing.add(part.rule.target)
            found = None if _problem(part) else _format(source)
        formats.setdefault(part.rule.target, []).append(found)
    return {
        target
        for target in mixing
        if None in formats[target] or any(own != formats[target][0] for own in formats[target])
    }


def _problem(part: Part) -> str | None:
    if part.rule.transform is not None:
        return f"{part.rule.target!r} is computed from it"
    return part.source.problem() if isinstance(part.source, QuantizedTensor) else None


def _beside(part: Part, end: str, source: TensorEntry) -> Part:
    rule = replace(part.rule, target=part.rule.target + end)
    return replace(part, rule=rule, source=source)


def _refused(part: Part, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{part.source.where} cannot stay as it is: {problem}; {_ANEW}")


def without_idle_biases(
    tensors: Mapping[str, TensorEntry], needed: Iterable[str]
) -> dict[str, TensorEntry]:
    """``tensors`` without the zero biases that quantisers add to modules without a bias."""
    wanted = set(needed)

    def is_idle(name: str, entry: TensorEntry) -> bool:
        module, _, last = name.rpartition(".")
        if last != "bias" or name in wanted:
            return False
        if not isinstance(tensors.get(f"{module}.weight"), QuantizedTensor):
            return False
        with entry.open() as array:
            return not array.any()

    return {name: entry for name, entry in tensors.items() if not is_idle(name, entry)}


def dequantized_targets(parts: Iterable[Part]) -> set[str]:
    """Targets that become floats although the checkpoint has them quantised."""
    return {part.rule.target for part in parts if _stored_as(part)}


def _stored_as(part: Part) -> str | None:
    source = part.source
    return source.stored_as if isinstance(source, (DequantizedTensor, QuantizedTensor)) else None


def warn_of_dequantized(parts: Iterable[Part], kept: Collection[str], data_type: str) -> None:
    """Says which weights take more memory than in the checkpoint; weights in ``kept`` do not count.
    """
    found = [part for part in parts if _stored_as(part) and part.rule.target not in kept]
    if not found:
        return
    sources = [part.source for part in found]
    before = sum(source.nbytes for source in sources)
    element_bytes = 4 if data_type == "float32" else 2
    after = element_bytes * sum(math.prod(source.shape) for source in sources)
    types = ", ".join(sorted({str(_stored_as(part)) for part in found}))
    notice(
        f"{sources[0].file.path}: {len(found)} weights are {types}, and become {data_type}: "
        f"{after} bytes instead of {before} (enable_quant or precision keeps them small)"
    )
