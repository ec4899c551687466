"""What the translations of other protocols to chat share: errors that name a place in a request,
and the content of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspark.serve.errors import ApiError

_MAX_SHOWN = 100  # characters of a value in an error


def wrong(place: str, problem: str) -> ApiError:
    """The error for a field that is wrong, as "messages[0].content" and "is missing"."""
    return ApiError(400, f"{place} {problem}", param=place, code="invalid_value")


def shown(value: Any) -> str:
    """A value in an error's message."""
    text = repr(value) if isinstance(value, (str, int, float, bool)) else type(value).__name__
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def to_content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of chat's message: one text, or the parts that the chat template joins."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
