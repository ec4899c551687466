"""The words that messages of errors share."""

from __future__ import annotations

from typing import Any

_MAX_SHOWN = 200


def shown(value: Any) -> str:
    """A value in a message: of a long one the beginning."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "of too many digits to show"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def wrong_type(name: str, value: Any, expected: str) -> TypeError:
    """An exception that names an argument, its type and the expected type."""
    what = "None" if value is None else f"a {type(value).__name__}"
    return TypeError(f"{name} is {what}; it must be {expected}")


def needs_extra(what: str, extra: str) -> str:
    """The message where the packages of one of allspark's extras are not installed."""
    return f"{what} needs the extra {extra!r} (docs/quick_start.md#installing)"
