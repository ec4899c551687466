"""Builds formats of an output: trees of a `structural_tag`, see docs/guided_decoding.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Format: TypeAlias = dict[str, Any]


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def schema(json_schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": dict(json_schema)}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def response_format(given: Mapping[str, Any]) -> Format:
    """What a whole output in that format would be."""
    return {"type": "response_format", "response_format": dict(given)}


def any_text() -> Format:
    return {"type": "any_text"}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)} if len(elements) != 1 else elements[0]


def one_of(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)} if len(elements) != 1 else elements[0]


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def star(content: Format) -> Format:
    return {"type": "star", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def listed(element: Format, separator: Format, many: bool) -> Format:
    """One element, or if `many` also more of them with a separator between."""
    return sequence(element, star(sequence(separator, element))) if many else element


@dataclass(frozen=True)
class CallFormat:
    """A tool's name, and the format of its arguments in some syntax."""

    name: str
    arguments: Format


@dataclass(frozen=True)
class Parts:
    """The formats of the parts of an output that hold calls.

    Attributes:
        triggers: what begins such a part in free text.
        tags: the parts. Each begins with a trigger.
        separator: stands between two parts; None: an output ends with its first part.
        first: calls without a trigger, with which an output may begin.
        excludes: what free text must not contain, since it would be read as a call.
    """

    triggers: Sequence[str]
    tags: Sequence[Format]
    separator: str | None = ""
    first: Format | None = None
    excludes: Sequence[str] = ()
