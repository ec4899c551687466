"""Proves that no value is valid for two branches of a `oneOf`, so that `anyOf` means the same.

Branches exclude one another by their JSON types, by `const` and `enum`, or, for objects, by a
required property: either its values differ in all branches, or no other branch allows it.
References within the document are followed. A keyword that is not understood counts as "any value",
so a proof holds whatever else the schema says. The work per document is bounded; past the bound
nothing is proved.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any] | bool
# The values of one JSON type that a schema allows; None: all of them.
_Values: TypeAlias = frozenset[Any] | None

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_TYPE_NAMES = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
_NOT_TOLD_APART = ("array", "object")
_MAX_WORK = 200_000  # keywords, names and values examined
_MAX_NESTED = 48  # schemas open at once, by reference or by combination
_MAX_PROPERTIES = 4  # nesting of properties within properties


@dataclass(frozen=True)
class _Facts:
    """What is known of all values that are valid for a schema. Without arguments: nothing."""

    values: Mapping[str, _Values] = field(default_factory=lambda: dict.fromkeys(_TYPES))
    required: frozenset[str] = frozenset()
    properties: Mapping[str, tuple[Schema, ...]] = field(default_factory=dict)
    names: frozenset[str] | None = None  # property names that an object may have; None: any

    def size(self) -> int:
        finite = sum(len(values) for values in self.values.values() if values is not None)
        return 1 + finite + len(self.required) + len(self.properties) + len(self.names or ())


_ANY = _Facts()
_NONE = _Facts(values={})


class _TooMuchWork(Exception):
    pass


class Prover:
    """Proofs about the schemas of one document, which must not change in the meantime."""

    def __init__(self, root: Schema):
        self._root = root
        self._known: dict[int, _Facts] = {}  # by id() of a schema of the document
        self._work_left = _MAX_WORK
        self._may_follow = not _has_inner_ids(root)

    def is_disjoint(self, schema: Mapping[str, Any]) -> bool:
        """Whether the branches of the schema's `oneOf` exclude one another."""
        beside = {key: value for key, value in schema.items() if key != "oneOf"}
        try:
            common = self._merge(self._parts(beside, 0))
            return self._are_separate([self._facts(b, 0) for b in schema["oneOf"]], common, 0)
        except _TooMuchWork:
            return False

    # What is known of a schema.

    def _facts(self, schema: Schema, nested: int) -> _Facts:
        if schema is False:
            return _NONE
        if not isinstance(schema, Mapping) or nested > _MAX_NESTED:
            return _ANY
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = _ANY  # for a reference that leads back here
            known = self._known[id(schema)] = self._merge(self._parts(schema, nested + 1))
        return known

    def _parts(self, schema: Mapping[str, Any], nested: int) -> list[_Facts]:
        """Facts that all hold for a value that is valid for the schema."""
        self._spend(1 + len(schema))
        parts = []
        if "$ref" in schema:
            parts.append(self._facts(self._target(schema["$ref"]), nested))
            if nested:  # before draft 2019-09, keywords beside $ref are ignored
                return parts
        parts.append(_own_facts(schema))
        for part in _list_of(schema, "allOf"):
            parts.append(self._facts(part, nested))
        for keyword in ("anyOf", "oneOf"):
            branches = _list_of(schema, keyword)
            if branches:
                parts.append(self._union([self._facts(branch, nested) for branch in branches]))
        return parts

    def _merge(self, parts: Iterable[_Facts]) -> _Facts:
        """The facts of values for which all of the parts hold."""
        merged = _ANY
        for part in parts:
            if part is _ANY:
                continue
            if merged is _ANY:
                merged = part
                continue
            self._spend(merged.size() + part.size())
            properties = dict(merged.properties)
            for name, schemas in part.properties.items():
                properties[name] = properties.get(name, ()) + schemas
            merged = _Facts(
                {
                    kind: _both(values, part.values[kind])
                    for kind, values in merged.values.items()
                    if kind in part.values
                },
                merged.required | part.required,
                properties,
                _both(merged.names, part.names),
            )
        return merged

    def _union(self, branches: Sequence[_Facts]) -> _Facts:
        """The facts of values for which at least one of the branches holds."""
        union: dict[str, set[Any] | None] = {}
        for branch in branches:
            self._spend(branch.size())
            for kind, values in branch.values.items():
                known = union.setdefault(kind, set())
                if values is None or known is None:
                    union[kind] = None
                else:
                    known |= values
        return _Facts({k: None if v is None else frozenset(v) for k, v in union.items()})

    def _target(self, reference: Any) -> Schema:
        """The schema that a reference within the document points to; True where that is unclear."""
        if not self._may_follow or not isinstance(reference, str):
            return True
        if not re.fullmatch("#(/.*)?", reference, re.DOTALL):
            return True
        node: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            self._spend(1)
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and step in node:
                node = node[step]
            elif isinstance(node, list) and re.fullmatch("[0-9]{1,9}", step):
                if int(step) >= len(node):
                    return True
                node = node[int(step)]
            else:
                return True
        return node if isinstance(node, (Mapping, bool)) else True

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise _TooMuchWork

    # Proofs. Each compares all branches at once, never pair by pair.

    def _are_separate(self, branches: Sequence[_Facts], common: _Facts, nested: int) -> bool:
        """Whether no value that fits the common facts is valid for two of the branches."""
        for kind in common.values:
            members = [branch for branch in branches if kind in branch.values]
            self._spend(len(branches) + sum(member.size() for member in members))
            if len(members) < 2:
                continue
            values = [member.values[kind] for member in members]
            if None not in values:
                if not _have_no_common_value(values):
                    return False
            elif kind != "object" or not (
                _own_names(members) or self._have_tag(members, common.required, nested)
            ):
                return False
        return True

    def _have_tag(self, objects: Sequence[_Facts], required: frozenset[str], nested: int) -> bool:
        """Whether there is a property whose values differ in all of the objects."""
        if nested == _MAX_PROPERTIES:
            return False
        num_required = Counter(name for member in objects for name in member.required)
        num_required.update(dict.fromkeys(required, len(objects)))
        # Two objects are told apart by a property that one of them requires: the other one lacks
        # it, or has it with another value. So all objects but one must require it.
        tags = [name for name, count in num_required.items() if count >= len(objects) - 1]
        return any(
            self._are_separate([self._property(m, tag) for m in objects], _ANY, nested + 1)
            for tag in tags
        )

    def _property(self, member: _Facts, name: str) -> _Facts:
        if member.names is not None and name not in member.names:
            return _NONE
        return self._merge(self._facts(schema, 0) for schema in member.properties.get(name, ()))


def _has_inner_ids(root: Schema) -> bool:
    """Whether a part of the document may be a document of its own, so that '#' refers to that."""
    waiting = list(root.values()) if isinstance(root, Mapping) else []
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("$id"), str) or isinstance(node.get("id"), str):
                return True
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return False


def _list_of(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _both(some: _Values, others: _Values) -> _Values:
    if some is None or others is None:
        return others if some is None else some
    return some & others


def _own_facts(schema: Mapping[str, Any]) -> _Facts:
    """Facts from the schema's keywords other than alternatives and references."""
    values: dict[str, _Values] = dict.fromkeys(_TYPES)
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)):
        named = [kinds] if isinstance(kinds, str) else kinds
        allowed = ["number" if kind == "integer" else kind for kind in named]
        if all(kind in _TYPES for kind in allowed):
            values = {kind: None for kind in _TYPES if kind in allowed}
    for listed in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(listed, list):
            listed_values = _by_type(listed)
            values = {
                kind: _both(known, listed_values[kind])
                for kind, known in values.items()
                if kind in listed_values
            }
    names = [name for name in _list_of(schema, "required") if isinstance(name, str)]
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return _Facts(
        values,
        frozenset(names),
        {name: (subschema,) for name, subschema in properties.items()},
        frozenset(properties) if is_closed else None,
    )


def _by_type(listed: Sequence[Any]) -> dict[str, _Values]:
    """The listed values by type; arrays and objects are not distinguished."""
    found: dict[str, set[Any]] = {}
    for value in listed:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.setdefault("number", set()).add(_as_float(value))
        else:
            kind = _TYPE_NAMES[type(value)]
            known = found.setdefault(kind, set())
            if kind not in _NOT_TOLD_APART:
                known.add(value)
    return {k: None if k in _NOT_TOLD_APART else frozenset(v) for k, v in found.items()}


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _have_no_common_value(values: Sequence[_Values]) -> bool:
    sets = [some for some in values if some is not None]
    return len(frozenset().union(*sets)) == sum(map(len, sets))


def _own_names(objects: Sequence[_Facts]) -> bool:
    """Whether all objects, or all but one, require a property that no other object allows."""
    allowed = [member.names for member in objects if member.names is not None]
    if len(allowed) < len(objects):
        return False
    times = Counter(name for names in allowed for name in names)
    with_own = sum(any(times[name] == 1 for name in m.required) for m in objects)
    return with_own >= len(objects) - 1
