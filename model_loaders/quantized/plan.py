"""What of a quantised checkpoint goes into the engine's format as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..derived import DerivedTensor
from ..errors import UnsupportedModelError
from ..spec import Part, message_class
from ..storage import TensorEntry
from .tensor import QuantizedTensor

_ANEW = (
    "customized_quant_config={'quant_method': 'instant_quant', ...} with enable_quant=True "
    "dequantises the checkpoint and quantises it anew"
)


def is_quantized(tensors: Mapping[str, TensorEntry]) -> bool:
    return any(isinstance(entry, QuantizedTensor) for entry in tensors.values())


def keep_quantized(
    parts: Iterable[Part], quantize_activations: bool | None
) -> tuple[list[Part], list[Any]]:
    """The parts, where those of quantised weights are integers, scales and zero points; and the
    WeightQuant messages that say so. ``quantize_activations`` None: as the checkpoint was made for.
    A weight that cannot be kept is an error that names it.
    """
    kept: list[Part] = []
    formats: dict[str, tuple[int, int, bool, bool] | None] = {}  # None: in floats
    for part in parts:
        target, source, found = part.rule.target, part.source, None
        if isinstance(source, QuantizedTensor):
            problem = source.problem()
            if part.rule.transform is not None:
                problem = f"{target!r} is computed from it"
            if problem is not None:
                raise _refused(part, problem)
            activations = source.quantize_activations
            if quantize_activations is not None:
                activations = quantize_activations
            found = (source.bits, source.group_size, source.zeros is not None, activations)
            kept.append(replace(part, source=source.values))
            kept.append(_beside(part, "_scale", source.scales))
            if source.zeros is not None:
                kept.append(_beside(part, "_zero", source.zeros))
        else:
            kept.append(part)
        if formats.setdefault(target, found) != found:
            raise _refused(part, f"other parts of {target!r} are quantised in another way")
    quants = [
        message_class("WeightQuant")(
            tensor=target,
            bits=found[0],
            group_size=found[1],
            asymmetric=found[2],
            quantize_activations=found[3] and target != "embedding",
        )
        for target, found in formats.items()
        if found is not None
    ]
    return kept, quants


def _beside(part: Part, suffix: str, source: TensorEntry) -> Part:
    rule = replace(part.rule, target=part.rule.target + suffix)
    return replace(part, rule=rule, source=source)


def _refused(part: Part, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{part.source.where} cannot stay as it is: {problem}; {_ANEW}")


def without_idle_biases(
    tensors: Mapping[str, TensorEntry], needed: Iterable[str]
) -> dict[str, TensorEntry]:
    """``tensors`` without the biases of zeros that quantisers give to modules that have none."""
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


def warn_of_dequantized(parts: Sequence[Part], data_type: str) -> None:
    """Says which weights take more memory than they did in the checkpoint."""
    found = [
        part.source
        for part in parts
        if isinstance(part.source, DerivedTensor) and "float8" in part.source.inputs[0].dtype
    ]
    if found:
        times = 4 if data_type == "float32" else 2
        warnings.warn(
            f"{found[0].file.path}: {len(found)} weights are float8, for which the engine has no "
            f"kernels; they become {data_type} and take {times} times the memory. "
            "enable_quant=True makes them int8",
            stacklevel=2,
        )
