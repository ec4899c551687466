"""Events of a stream that differ in their text alone, or in their text and token ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from allspark.serve.sse import frame

_TEXT = "the text stands here"
_IDS = [1234567890123, 3210987654321]


class TextChunk:
    """Makes such an event by putting the text between two constants: that costs a tenth.

    Args:
        make: the event for a text.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, make: Callable[[str], Any]):
        self._before, _, self._after = frame(make(_TEXT)).rpartition(orjson.dumps(_TEXT))

    def __call__(self, text: str) -> bytes:
        """The event."""
        return b"%b%b%b" % (self._before, orjson.dumps(text), self._after)


class IdsChunk:
    """The same for events with token ids behind the text.

    Args:
        make: the event for a text and its ids.
    """

    __slots__ = ("_after", "_before", "_between")

    def __init__(self, make: Callable[[str, list[int]], Any]):
        whole = frame(make(_TEXT, _IDS))
        rest, _, self._after = whole.rpartition(orjson.dumps(_IDS))
        self._before, _, self._between = rest.rpartition(orjson.dumps(_TEXT))

    def __call__(self, text: str, ids: list[int]) -> bytes:
        """The event."""
        parts = (self._before, orjson.dumps(text), self._between, orjson.dumps(ids), self._after)
        return b"%b%b%b%b%b" % parts
