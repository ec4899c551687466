"""Values that a model writes as plain text, turned into JSON by the schemas of their parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from allspark.serve.parsers.json_texts import kind_of, kind_of_text

KINDS = frozenset({"string", "number", "boolean", "null", "object", "array"})
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
# How many schemas of a parameter are looked at. Beyond that it may be of any kind.
_MAX_SCHEMAS = 1000


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of values that a schema allows, more rather than fewer; `root` holds what its
    references lead to."""
    return _Kinds(root).of(schema)


def types(schema: Mapping[str, Any]) -> list[str]:
    """What a schema's `type` lists; "" for what is no text."""
    listed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return [kind if isinstance(kind, str) else "" for kind in listed]


def pointed_to(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema leads to; None for another one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


class _Kinds:
    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        self._num_left -= 1
        if not isinstance(schema, Mapping) or depth > 16 or self._num_left < 0:
            return KINDS
        allowed = KINDS
        if "$ref" in schema:
            allowed &= self.of(pointed_to(schema["$ref"], self._root), depth + 1)
        if "const" in schema:
            allowed &= {kind_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            allowed &= {kind_of(value) for value in schema["enum"]}
        if "type" in schema:
            named = types(schema)
            if schema.get("nullable") is True:
                named.append("null")
            if all(kind in KINDS or kind == "integer" for kind in named):
                allowed &= {"number" if kind == "integer" else kind for kind in named}
        for keyword in "anyOf", "oneOf":
            if isinstance(schema.get(keyword), list):
                some: set[str] = set()
                allowed &= some.union(*(self.of(part, depth + 1) for part in schema[keyword]))
        if isinstance(schema.get("allOf"), list):
            for part in schema["allOf"]:
                allowed &= self.of(part, depth + 1)
        return allowed


def to_json(text: str, allowed: frozenset[str]) -> str:
    """JSON for a text, of one of the allowed kinds where it can be."""
    stripped = text.strip()
    kind = kind_of_text(stripped)
    if kind is not None and kind != "string" and kind in allowed:
        return stripped
    # Templates write the words of Python.
    word = _WORDS.get(stripped.lower())
    if word and ("null" if word == "null" else "boolean") in allowed:
        return word
    if "string" in allowed:
        return json.dumps(text, ensure_ascii=False)
    return stripped if kind is not None else json.dumps(text, ensure_ascii=False)


class TypedValue:
    """One value, which arrives in pieces.

    Strings are passed on as they come. Another value must be whole before it is known what it is.

    Args:
        sink: takes JSON.
        allowed: the kinds that the value may have.
        trims: leave out a newline at the beginning, and one at the end.
    """

    def __init__(self, sink: Callable[[str], object], allowed: frozenset[str], trims: bool):
        self._sink = sink
        self._allowed = allowed
        self._trims = trims
        self._is_string = allowed == {"string"}
        self._is_at_begin = True
        self._newline = ""  # held back: it may be the last character
        self._pieces: list[str] = []
        if self._is_string:
            sink('"')

    def put(self, text: str) -> None:
        if self._trims:
            if self._is_at_begin and text:
                self._is_at_begin = False
                text = text.removeprefix("\n")
            if not text:
                return
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._is_string:
            self._sink(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._pieces.append(text)

    def end(self) -> None:
        """The value is whole."""
        self._sink('"' if self._is_string else to_json("".join(self._pieces), self._allowed))

    def cut(self) -> None:
        """The output ended within the value: its beginning is passed on."""
        if not self._is_string:
            text = "".join(self._pieces)
            if "string" in self._allowed:
                text = json.dumps(text, ensure_ascii=False)[:-1]
            self._sink(text)
