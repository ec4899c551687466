"""What the translations of other protocols to chat share: errors that name a place in a request,
and the content of messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


def renamed(
    error: ApiError, places: Sequence[str], messages: str, names: Mapping[str, str]
) -> ApiError:
    """An error of chat, with the names of the protocol that was translated.

    Args:
        places: of chat's messages in the request.
        messages: what it calls all of them.
        names: of other fields, by those of chat.
    """

    def place(found: re.Match[str]) -> str:
        index = found[1]
        return places[int(index)] if index and int(index) < len(places) else messages

    def of(text: str) -> str:
        text = re.sub(r"\bmessages(?:\[(\d+)\])?", place, text)
        for old, new in names.items():
            text = re.sub(rf"\b{re.escape(old)}\b", new, text)
        return text

    return ApiError(error.status, of(error.message), error.param and of(error.param), error.code)


def to_content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of chat's message: one text, or the parts that the chat template joins."""
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
