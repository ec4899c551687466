"""The events of a response's stream, made from its record.

The record has the output's pieces, so a stream that begins while the response runs, one that goes
on after a cut, and one of a stored response send the same events under the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allspark.serve.responses.record import OutputItem, Record

# The last event of a response, by its status. The protocol has none of its own for `cancelled`.
_LAST = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
_Event = dict[str, Any]


# Events that are made at once: more would hold up the event loop.
_MAX_TAKEN = 500


class Events:
    """The events of one stream.

    Args:
        after: the number of the last event that the client has; -1: none.
    """

    def __init__(self, record: Record, after: int = -1):
        self._events = _walk(record)
        self._next = 0
        self._after = after
        self.is_ended = False  # the last event was taken
        self.has_more = True  # `take` may be called again before the record changes

    def take(self) -> list[_Event]:
        """Events that have come since the last call; where there are many, the first of them."""
        found: list[_Event] = []
        for _ in range(_MAX_TAKEN):
            try:
                event = next(self._events)
            except StopIteration:
                self.is_ended, self.has_more = True, False
                return found
            if event is None:
                self.has_more = False
                return found
            number, self._next = self._next, self._next + 1
            if number > self._after:
                found.append({**event, "sequence_number": number})
        self.has_more = True
        return found


def _walk(record: Record) -> Iterator[_Event | None]:
    """All events in order; None where the next has not come yet."""
    is_background = record.head["background"]
    first = record.begun("queued" if is_background else "in_progress")
    yield {"type": "response.created", "response": first}
    if is_background:
        yield {"type": "response.queued", "response": first}
    while not record.has_begun and not record.is_ended:
        yield None
    if record.has_begun:
        yield {"type": "response.in_progress", "response": record.begun("in_progress")}
    index = 0
    while index < len(record.items) or not record.is_ended:
        if index < len(record.items):
            yield from _item(index, record.items[index])
            index += 1
        else:
            yield None
    if record.error is not None:
        error = {"code": record.error["code"], "message": record.error["message"], "param": None}
        yield {"type": "error", **error}
    yield {"type": _LAST[record.status], "response": record.response()}


def _item(index: int, item: OutputItem) -> Iterator[_Event | None]:
    place: _Event = {"item_id": item.id, "output_index": index}
    is_call = item.kind == "function_call"
    name = {
        "message": "response.output_text",
        "reasoning": "response.reasoning_text",
        "function_call": "response.function_call_arguments",
    }[item.kind]
    yield {"type": "response.output_item.added", "output_index": index, "item": item.begun()}
    if not is_call:
        place["content_index"] = 0
        yield {"type": "response.content_part.added", **place, "part": item.part("")}
    count = 0
    while count < len(item.pieces) or not item.is_done:
        if count == len(item.pieces):
            yield None
            continue
        delta = {"type": f"{name}.delta", **place, "delta": item.pieces[count]}
        if item.kind == "message":
            delta["logprobs"] = item.rows[count] if item.rows else []
        count += 1
        yield delta
    done: _Event = {"type": f"{name}.done", **place}
    if is_call:
        yield {**done, "name": item.name, "arguments": item.text}
    else:
        done["text"] = item.text
        if item.kind == "message":
            done["logprobs"] = item.all_rows()
        yield done
        yield {"type": "response.content_part.done", **place, "part": item.part()}
    yield {"type": "response.output_item.done", "output_index": index, "item": item.shown()}
