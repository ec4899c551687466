"""Prepares a JSON Schema for the grammar compiler without changing its meaning.

The compiler refuses keywords that it does not know. So keywords without effect are dropped here,
formats are enforced as their RFCs say (json_formats.py), patterns are translated from ECMA 262
(json_patterns.py), and a `oneOf` becomes an `anyOf` where both mean the same (one_of.py). What the
compiler would take and not keep is refused or narrowed. Nothing is compiled here. The work is
linear in the size of the schema; the recursion depth is that of the schema, which is bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

from allspark.json_formats import ENFORCED
from allspark.json_patterns import from_ecma
from allspark.one_of import Prover

# Nesting of lists and objects. The compiler's own reader stops at 128, and wraps the schema.
MAX_DEPTH = 100
# Most lists and objects in a value; more do not fit in the longest grammar.
_MAX_VALUES = 1_000_000
# Most patternProperties in a schema; compile time grows with the cube of their number.
MAX_PATTERN_PROPERTIES = 100

# Numbers must be above this. The compiler makes floats of them and then integers of 64 bits, which
# it negates; with the least of these it overflows its stack, which would end the process.
NUMBER_BOUND = -(2**63) + 512

# Exclusive bounds, the bounds that draft 4 makes exclusive with them, and where they lead.
_EXCLUSIVE = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}
# Decimal digits of a number that the compiler reads without rounding.
NUM_DIGITS = 15

# What names properties of an object.
_NAMING = frozenset({"properties", "patternProperties", "required"})
# Characters that JSON can only spell as \u and four digits.
_NEEDS_DIGITS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

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


class Prepared(NamedTuple):
    """A schema for the compiler."""

    schema: Any
    undecided: list[str]  # the first places that still have a `oneOf`, as JSON pointers
    # An object may have keys beside those that it names. The compiler compares such a key with the
    # names as JSON usually spells them, so it must not be spelt otherwise: "\u0061" is "a".
    is_open: bool


def prepare(schema: Mapping[str, Any], one_of_is_any_of: bool = False) -> Prepared:
    """The schema for the compiler. Raises ValueError for what the compiler would not keep.

    Args:
        schema: made of JSON values, at most MAX_DEPTH deep.
        one_of_is_any_of: turn each `oneOf` into an `anyOf`, whether its branches overlap or not.
    """
    writer = _Writer(schema, one_of_is_any_of)
    written = writer.written(schema, None)
    writer.check_spelling()
    return Prepared(written, writer.undecided, writer.is_open)


# A place in the schema: the parent's place, and the key or index in it. None: the root.
_Place: TypeAlias = "tuple[_Place, str | int] | None"
_MAX_NAMED = 3  # places in a message


class _Writer:
    def __init__(self, root: Mapping[str, Any], one_of_is_any_of: bool):
        self.undecided: list[str] = []
        self.is_open = False
        # A reference through a renamed oneOf would no longer find its target.
        self._may_rename = not any("/oneOf/" in reference for reference in _references(root))
        self._one_of_is_any_of = one_of_is_any_of
        self._num_pattern_properties = 0
        self._prover = Prover(root)
        self._in_digits: list[_Place] = []  # constants that are spelt with digits

    def check_spelling(self) -> None:
        if self.is_open and self._in_digits:
            raise ValueError(
                f"the schema has a control character at {_pointer(self._in_digits[0])}; it can be "
                "written only where each object with properties, patternProperties or required has "
                "additionalProperties: false"
            )

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
            if keyword in _NAMING and value and node.get("additionalProperties") is not False:
                self.is_open = True
            elif keyword == "minProperties":
                _check_min_properties(node, here)
            if keyword in _SAY_NOTHING and _SAY_NOTHING[keyword](value):
                continue
            if keyword in _VALUES:
                if keyword in ("const", "enum"):
                    self._check_values(value, here)
                schema[keyword] = value
            elif keyword in _NAMED and isinstance(value, Mapping):
                named = {n: self.written(s, (here, n)) for n, s in value.items()}
                schema[keyword] = named
                if keyword == "patternProperties":
                    schema[keyword] = self._with_patterns(named, here)
            elif keyword == "pattern" and isinstance(value, str):
                schema[keyword] = from_ecma(value)
            elif keyword in _EXCLUSIVE:
                _check_number(value, here)
                schema[keyword] = _exclusive(keyword, node)
            elif keyword == "format" and isinstance(value, str):
                keywords = ENFORCED.get(value)  # None: an unknown format, which is dropped
                if keywords:
                    parts.append(keywords)
                elif keywords is not None:
                    schema[keyword] = value
            elif keyword == "oneOf" and self._is_any_of(node):
                parts.append({"anyOf": self.written(value, here)})
            else:
                if keyword == "oneOf" and len(self.undecided) < _MAX_NAMED:
                    self.undecided.append(_pointer(here))
                schema[keyword] = self.written(value, here)
        return _with_parts(schema, parts)

    def _with_patterns(self, named: Mapping[str, Any], place: _Place) -> dict[str, Any]:
        self._num_pattern_properties += len(named)
        if self._num_pattern_properties > MAX_PATTERN_PROPERTIES:
            raise ValueError(
                f"the schema has more than {MAX_PATTERN_PROPERTIES} patternProperties, the bound"
            )
        patterns = {from_ecma(pattern): schema for pattern, schema in named.items()}
        if len(patterns) < len(named):
            raise ValueError(f"two patterns at {_pointer(place)} are the same")
        return patterns

    def _check_values(self, value: Any, place: _Place) -> None:
        """Checks the numbers in a const or an enum, and notes control characters, at any depth."""
        _check_number(value, place)
        if isinstance(value, str) and _NEEDS_DIGITS.search(value):
            self._in_digits.append(place)
        elif isinstance(value, Mapping):
            for key, child in value.items():
                self._check_values(child, (place, key))
        elif isinstance(value, list):
            for index, child in enumerate(value):
                self._check_values(child, (place, index))

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


def _check_min_properties(schema: Mapping[str, Any], place: _Place) -> None:
    """Of minProperties: the compiler counts a further key as often as it is written."""
    least, required = schema["minProperties"], schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_closed or not isinstance(least, int):
        return
    names = required if isinstance(required, list) else []
    most = len({name for name in names if isinstance(name, str)}) + 1
    if least > most:
        raise ValueError(
            f"the schema has {least} at {_pointer(place)}; beside patternProperties, or without "
            f"additionalProperties: false, it may be at most {most}, one more than the required "
            "properties"
        )


def _exclusive(keyword: str, schema: Mapping[str, Any]) -> Any:
    """The value of an exclusive bound. Where it is whole and the other bound lies less than 1 from
    it, the compiler lets it through; so it becomes the next number of NUM_DIGITS."""
    bound, toward = _EXCLUSIVE[keyword]
    value = schema[keyword]
    if value is True:
        value = schema.get(bound)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or schema.get("type") == "integer" or value != math.trunc(value):
        return schema[keyword]
    num_digits = len(str(abs(math.trunc(value))))
    if num_digits > NUM_DIGITS:
        return schema[keyword]
    distance = Decimal(toward).scaleb(min(num_digits - NUM_DIGITS, -1))
    return float(Decimal(value) + distance)


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
