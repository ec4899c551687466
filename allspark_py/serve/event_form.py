"""Events of a stream that differ in their text alone, or in their text and token ids.

Such an event is made by putting these between constants: that costs a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from allspark._allspark import EventForm
from allspark.serve.sse import frame

_TEXT = "the text stands here"
_IDS = [1234567890123, 3210987654321]


def text_form(make: Callable[[str], Any]) -> EventForm:
    """The form of the events that `make` gives for a text."""
    before, _, after = frame(make(_TEXT)).rpartition(orjson.dumps(_TEXT))
    return EventForm(before, None, after)


def ids_form(make: Callable[[str, list[int]], Any]) -> EventForm:
    """The same for events that have token ids behind the text."""
    rest, _, after = frame(make(_TEXT, _IDS)).rpartition(orjson.dumps(_IDS))
    before, _, between = rest.rpartition(orjson.dumps(_TEXT))
    return EventForm(before, between, after)
