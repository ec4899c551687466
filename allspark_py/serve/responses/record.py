"""Record: a response as it is kept, whole or so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

# What a response goes through, and how it ends.
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
RUNNING: tuple[Status, ...] = ("queued", "in_progress")
Kind = Literal["message", "reasoning", "function_call"]
# The first letters of items' ids.
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
}  # fmt: skip


def response_of(item_id: str) -> str | None:
    """The response that has an item, by the item's id; None where the id is no id of an item here.
    An item's id has the response's in it, so that no list of items is needed."""
    prefix, _, rest = item_id.partition("_")
    return f"resp_{rest[:32]}" if prefix in PREFIXES.values() and len(rest) > 32 else None


def item_id(response_id: str, kind: str, place: str) -> str:
    """The id of an item of a response. `place` tells it from the response's other items."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}{place}"


@dataclass
class OutputItem:
    """A part of an output.

    Attributes:
        pieces: its text as it came: a stream sends each as a delta.
        rows: the log-probabilities of each piece's tokens; None: they were not asked for.
        is_done: nothing more comes.
        is_whole: False where the output was cut off in it.
    """

    kind: Kind
    id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    rows: list[list[dict[str, Any]]] | None = None
    is_done: bool = False
    is_whole: bool = True

    @property
    def text(self) -> str:
        """All of its text: of a call the arguments."""
        return "".join(self.pieces)

    def begun(self) -> dict[str, Any]:
        """The item before any of its text."""
        return self._shown("in_progress", None)

    def shown(self) -> dict[str, Any]:
        """The item with its text so far."""
        status = "in_progress" if not self.is_done else "incomplete"
        return self._shown("completed" if self.is_done and self.is_whole else status, self.text)

    def part(self, text: str | None = None) -> dict[str, Any]:
        """The one part of a content; with an empty text the part as it begins."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text if text is None else text}
        part: dict[str, Any] = {"type": "output_text", "annotations": []}
        part["text"] = self.text if text is None else text
        part["logprobs"] = self.all_rows() if text is None else []
        return part

    def all_rows(self) -> list[dict[str, Any]]:
        """The log-probabilities of all tokens."""
        return [row for rows in self.rows or () for row in rows]

    def _shown(self, status: str, text: str | None) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**item, "call_id": self.call_id, "name": self.name, "arguments": text or ""}
        content = [] if text is None else [self.part()]
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": content}
        return {**item, "role": "assistant", "content": content}


@dataclass
class Record:
    """All of a response that outlives its request.

    Attributes:
        head: the fields that stay the same from its start to its end, `id` among them.
        input: its own items, as `input_items` lists them.
        has_begun: it left the queue. One that does not run in the background is never in it.
    """

    head: dict[str, Any]
    input: list[dict[str, Any]]
    items: list[OutputItem] = field(default_factory=list)
    status: Status = "in_progress"
    has_begun: bool = True
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        id: str = self.head["id"]
        return id

    @property
    def previous(self) -> str | None:
        """The response that it goes on from."""
        id: str | None = self.head["previous_response_id"]
        return id

    @property
    def is_ended(self) -> bool:
        """Nothing of it changes any more."""
        return self.status not in RUNNING

    def fail(self, message: str, is_of_request: bool = False) -> None:
        """Makes it one that was not answered, by the server's fault or the request's."""
        self.status = "failed"
        code = "invalid_prompt" if is_of_request else "server_error"
        self.error = {"code": code, "message": message}

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        return {
            **self.head,
            "status": self.status,
            "completed_at": self.completed_at,
            "error": self.error,
            "incomplete_details": self.incomplete_details,
            "output": [item.shown() for item in self.items],
            "usage": self.usage,
        }

    def begun(self, status: Status) -> dict[str, Any]:
        """The response as it was before its output."""
        return Record(self.head, [], status=status).response()

    def to_bytes(self) -> bytes:
        """The record for a store."""
        return orjson.dumps(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """What to_bytes made bytes of."""
        fields = orjson.loads(data)
        return cls(**{**fields, "items": [OutputItem(**item) for item in fields["items"]]})
