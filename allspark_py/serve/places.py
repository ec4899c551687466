"""What the translations of other protocols to chat share: errors that name a place in a request,
and the content of messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from allspark import error_text
from allspark.serve.errors import ApiError, invalid_value


def wrong(place: str, problem: str) -> ApiError:
    """The error for a field that is wrong, as "messages[0].content" and "is missing"."""
    return invalid_value(f"{place} {problem}", place)


def shown(value: Any) -> str:
    """A value in an error's message."""
    is_short = isinstance(value, (str, int, float, bool))
    return error_text.shown(value) if is_short else type(value).__name__


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
