"""Prepares a JSON Schema for the grammar compiler without changing its meaning.

The compiler refuses keywords that it does not know. So keywords without effect are dropped here,
formats are enforced as their RFCs say (json_formats.py), and a `oneOf` becomes an `anyOf` where
both mean the same (one_of.py). Nothing is compiled here. The work is linear in the size of the
schema; the recursion depth is that of the schema, which is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from allspark.json_formats import ENFORCED
from allspark.one_of import Prover

# Nesting of lists and objects. The compiler's own reader stops at 128, and wraps the schema.
MAX_DEPTH = 100
# Of lists and objects. More of them do not fit in the longest grammar.
_MAX_VALUES = 1_000_000
# In a schema. What the compiler does with them grows with the third power of their number.
MAX_PATTERN_PROPERTIES = 100

# Numbers must be above this. The compiler makes floats of them and then integers of 64 bits, which
# it negates; with the least of these it overflows its stack, which would end the process.
NUMBER_BOUND = -(2**63) + 512

# Keywords that hold values, not schemas.
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
# Keywords that hold schemas by names.
_NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _allows_all(value: Any) -> bool:
    return value is True or _is_empty(value)


# Keywords that the compiler refuses, and the values with which they have no effect.
_SAY_NOTHING: Mapping[str, Callable[[Any], bool]] = {
    "uniqueItems": lambda value: value is False,
    "unevaluatedItems": _allows_all,
    "unevaluatedProperties": _allows_all,
    "propertyNames": _allows_all,
    "dependencies": _is_empty,
    "dependentRequired": _is_empty,
    "dependentSchemas": _is_empty,
}


def read(text: str, name: str) -> Any:
    """Parses JSON. Raises a ValueError that begins with `name` where the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    except RecursionError:
        raise _too_deep(name) from None


def check_depth(value: Any, name: str) -> None:
    """Raises a ValueError that begins with `name` where the value is deeper than MAX_DEPTH, or
    larger than any text of it may be."""
    # By identity, with how often: an object that the value holds many times is visited once, and
    # written out as often as that.
    level = {id(value): (value, 1)}
    num_values = 1
    for _ in range(MAX_DEPTH):
        below: dict[int, tuple[Any, int]] = {}
        for node, times in level.values():
            for child in _children(node):
                if isinstance(child, (Mapping, list, tuple)):
                    below[id(child)] = (child, times + below.get(id(child), (child, 0))[1])
        num_values += sum(times for _, times in below.values())
        if num_values > _MAX_VALUES:
            raise ValueError(f"{name} has more than {_MAX_VALUES} lists and objects, the bound")
        level = below
        if not level:
            return
    raise _too_deep(name)


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        yield from node.values()
    elif isinstance(node, (list, tuple)):
        yield from node


def _too_deep(name: str) -> ValueError:
    return ValueError(
        f"{name} is nested {MAX_DEPTH + 1} levels deep or more; the bound is {MAX_DEPTH}"
    )


def prepare(schema: Mapping[str, Any], one_of_is_any_of: bool = False) -> tuple[Any, list[str]]:
    """A schema for the compiler, and the first places that still have a `oneOf`, as JSON pointers.

    Args:
        schema: made of JSON values, at most MAX_DEPTH deep.
        one_of_is_any_of: turn each `oneOf` into an `anyOf`, whether its branches overlap or not.
    """
    writer = _Writer(schema, one_of_is_any_of)
    return writer.written(schema, None), writer.undecided


# A place in the schema: the parent's place, and the key or index in it. None: the root.
_Place: TypeAlias = "tuple[_Place, str | int] | None"
_MAX_NAMED = 3  # places in a message


class _Writer:
    def __init__(self, root: Mapping[str, Any], one_of_is_any_of: bool):
        self.undecided: list[str] = []
        # A reference through a renamed oneOf would no longer find its target.
        self._may_rename = not any("/oneOf/" in reference for reference in _references(root))
        self._one_of_is_any_of = one_of_is_any_of
        self._num_pattern_properties = 0
        self._prover = Prover(root)

    def written(self, node: Any, place: _Place) -> Any:
        if isinstance(node, list):
            return [self.written(child, (place, index)) for index, child in enumerate(node)]
        if not isinstance(node, Mapping):
            _check_number(node, place)
            return node
        schema: dict[str, Any] = {}
        parts: list[Mapping[str, Any]] = []  # schemas that must hold too
        for keyword, value in node.items():
            here = (place, keyword)
            if keyword in _SAY_NOTHING and _SAY_NOTHING[keyword](value):
                continue
            if keyword in _VALUES:
                if keyword in ("const", "enum"):
                    _check_numbers(value, here)
                schema[keyword] = value
            elif keyword in _NAMED and isinstance(value, Mapping):
                if keyword == "patternProperties":
                    self._count_pattern_properties(value)
                schema[keyword] = {n: self.written(s, (here, n)) for n, s in value.items()}
            elif keyword == "format" and isinstance(value, str) and not ENFORCED.get(value):
                if value in ENFORCED:
                    schema[keyword] = value
            elif keyword == "format" and isinstance(value, str):
                parts.append(ENFORCED[value])
            elif keyword == "oneOf" and self._is_any_of(node):
                parts.append({"anyOf": self.written(value, here)})
            else:
                if keyword == "oneOf" and len(self.undecided) < _MAX_NAMED:
                    self.undecided.append(_pointer(here))
                schema[keyword] = self.written(value, here)
        return _with_parts(schema, parts)

    def _count_pattern_properties(self, patterns: Mapping[str, Any]) -> None:
        self._num_pattern_properties += len(patterns)
        if self._num_pattern_properties > MAX_PATTERN_PROPERTIES:
            raise ValueError(
                f"the schema has more than {MAX_PATTERN_PROPERTIES} patternProperties, the bound"
            )

    def _is_any_of(self, schema: Mapping[str, Any]) -> bool:
        branches = schema["oneOf"]
        if not self._may_rename or not isinstance(branches, list) or not branches:
            return False
        return self._one_of_is_any_of or self._prover.is_disjoint(schema)


def _check_number(value: Any, place: _Place) -> None:
    if isinstance(value, (int, float)) and value <= NUMBER_BOUND:
        raise ValueError(
            f"the schema has {value!r:.40} at {_pointer(place)}; numbers must be above "
            f"{NUMBER_BOUND}"
        )


def _check_numbers(value: Any, place: _Place) -> None:
    """Of a value and all that is in it."""
    _check_number(value, place)
    if isinstance(value, Mapping):
        for key, child in value.items():
            _check_numbers(child, (place, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _check_numbers(child, (place, index))


def _with_parts(schema: dict[str, Any], parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema and the parts as one schema."""
    for part in parts:
        if part.keys().isdisjoint(schema):
            schema.update(part)
        else:
            all_of = schema.get("allOf", [])
            # The compiler refuses an allOf that is not a list.
            schema["allOf"] = [*all_of, part] if isinstance(all_of, list) else all_of
    return schema


def _pointer(place: _Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(str(step).replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(steps)])


def _references(root: Any) -> Iterator[str]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping) and isinstance(node.get("$ref"), str):
            yield node["$ref"]
        waiting.extend(_children(node))
