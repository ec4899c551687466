"""TextChunk: the events of a stream that differ in their text alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from allspark.serve.sse import frame

_TEXT = "the text stands here"


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
