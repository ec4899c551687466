"""Finds the modules of a quantised checkpoint, and makes a weight of the tensors of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import CheckpointError
from ..storage import TensorEntry, Tensors


@dataclass(frozen=True)
class ModuleRule:
    """How the tensors of a module become its weight; ``weight`` gets them by the last part of their
    names."""

    weight: Callable[[Tensors], TensorEntry]
    beside: tuple[str, ...]  # tensors that must be there
    optional: tuple[str, ...] = ()


def modules_with(tensors: Tensors, marker: str) -> Iterator[str]:
    """The names of the modules that have a tensor ``marker``."""
    for name in tensors:
        module, dot, last = name.rpartition(".")
        if dot and last == marker:
            yield module


def replace_modules(
    tensors: Tensors, marker: str, rule_of: Callable[[str], ModuleRule | None]
) -> dict[str, TensorEntry]:
    """``tensors``, where each module with a tensor ``marker`` has a single ``weight``, made by its
    rule. The tensors of a module without a rule stay as they are.
    """
    view = dict(tensors)
    modules = list(modules_with(tensors, marker))
    for module in modules:
        rule = rule_of(module)
        if rule is None:
            continue
        where, weight = tensors[f"{module}.{marker}"].where, f"{module}.weight"
        if "weight" not in rule.beside and weight in tensors:
            raise CheckpointError(f"{where}: {weight!r} is also there; a weight is either")
        found = {}
        for part in (marker, *rule.beside, *rule.optional):
            if f"{module}.{part}" in tensors:
                found[part] = view.pop(f"{module}.{part}")
            elif part in rule.beside:
                raise CheckpointError(f"{where}: the tensor '{module}.{part}' is missing")
        view[weight] = rule.weight(found)
    if not modules:
        raise CheckpointError(
            f"no tensor '*.{marker}' is there, which quantization_config announces"
        )
    return view
