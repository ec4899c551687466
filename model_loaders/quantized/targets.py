"""Which of compressed-tensors' targets a module is: its name, an expression, or its class.

Names come before expressions ("re:..." matches the beginning of a name), and these before classes.
Among expressions the first in the order of the alphabet counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from ..config import ModelConfig
from ..re2_patterns import ModulePattern, check_pattern_count

_EXPRESSION = "re:"
_ADVICE = "names of modules are"
_Found = TypeVar("_Found")


class Targets(Generic[_Found]):
    """What belongs to each target. Classes are known by the modules' names: embeddings, and all
    others are linear.
    """

    def __init__(self, config: ModelConfig, field: str, targets: Mapping[str, _Found]) -> None:
        self._exact = targets
        expressions = sorted(name for name in targets if name.startswith(_EXPRESSION))
        check_pattern_count(config, field, len(expressions))
        self._expressions: list[tuple[ModulePattern, _Found]] = [
            (
                ModulePattern(config, field, name.removeprefix(_EXPRESSION), _ADVICE),
                targets[name],
            )
            for name in expressions
        ]

    def find(self, module: str) -> _Found | None:
        if module in self._exact:
            return self._exact[module]
        for expression, found in self._expressions:
            if expression.begins(module):
                return found
        last = module.rpartition(".")[2]
        return self._exact.get("Embedding" if "embed" in last or last == "wte" else "Linear")


def names_of(config: ModelConfig, field: str) -> list[str]:
    """A list of strings; null counts as empty."""
    value = config.get(field)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise config.error(field, f"is {value!r}, expected a list of names")
    return value
