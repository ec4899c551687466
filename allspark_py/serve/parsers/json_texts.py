"""What a text is as JSON, read strictly: Python's parser also takes NaN and Infinity."""

from __future__ import annotations

import json
from typing import Any


def refuse_constant(constant: str) -> None:
    """The `parse_constant` of a strict reader. Raises ValueError."""
    raise ValueError(f"{constant} is no JSON")


def kind_of(value: Any) -> str:
    """The kind of a JSON value, as JSON Schema calls it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, (list, tuple)) else "object"


def kind_of_text(text: str) -> str | None:
    """The kind of a JSON text; None for what is none. Linear, whatever the text is."""
    try:
        # Numbers are not made integers: that would take the square of their length.
        value = json.loads(text, parse_constant=refuse_constant, parse_int=float, parse_float=float)
    except (ValueError, RecursionError):
        return None
    return kind_of(value)


def is_json_object(text: str) -> bool:
    """Whether a text is one JSON object and nothing else."""
    return kind_of_text(text) == "object"
