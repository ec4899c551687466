"""BlockBuilder: the content of a message of Anthropic's protocol from a choice's text, piece by
piece.

The same pieces make the events of a stream and the message that is not streamed, so both are the
same message.
"""

from __future__ import annotations

from typing import Any

from allspark.serve.message import Parser, partial_object, read_deltas
from allspark.serve.parsers.messages import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallBegin,
)


class BlockBuilder:
    """The blocks of one choice so far, in the order in which they came.

    Args:
        parser: None where the output is text and nothing else.
    """

    def __init__(self, parser: Parser | None):
        self._parser = parser
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []  # of the blocks: text, thinking, or JSON of the input
        self._is_open = False  # the last one

    def put(self, text: str, is_end: bool) -> list[dict[str, Any]]:
        """Adds text; returns the events of what that makes certain; may be none."""
        events: list[dict[str, Any]] = []
        for delta in read_deltas(self._parser, text, is_end):
            self._add(delta, events)
        if is_end:
            self._close(events)
        return events

    def _add(self, delta: Delta, events: list[dict[str, Any]]) -> None:
        if isinstance(delta, ToolCallBegin):
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            self._open(block, events)
            return
        if isinstance(delta, ContentDelta):
            self._need("text", {"type": "text", "text": ""}, events)
            piece = {"type": "text_delta", "text": delta.text}
        elif isinstance(delta, ReasoningDelta):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            self._need("thinking", block, events)
            piece = {"type": "thinking_delta", "thinking": delta.text}
        else:  # arguments, which are always the last call's
            piece = {"type": "input_json_delta", "partial_json": delta.text}
        self._texts[-1].append(delta.text)
        events.append(self._event("content_block_delta", delta=piece))

    def _need(self, kind: str, block: dict[str, Any], events: list[dict[str, Any]]) -> None:
        """Makes the last block one of a kind."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._open(block, events)

    def _open(self, block: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self._close(events)
        self._blocks.append(block)
        self._texts.append([])
        self._is_open = True
        events.append(self._event("content_block_start", content_block=block))

    def _close(self, events: list[dict[str, Any]]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1]["type"] == "thinking":
            piece = {"type": "signature_delta", "signature": ""}
            events.append(self._event("content_block_delta", delta=piece))
        events.append(self._event("content_block_stop"))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    @property
    def has_tool_use(self) -> bool:
        """Whether a tool is called."""
        return any(block["type"] == "tool_use" for block in self._blocks)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Names of the tools that are called, and their inputs as JSON."""
        return [
            (block["name"], "".join(pieces))
            for block, pieces in zip(self._blocks, self._texts, strict=True)
            if block["type"] == "tool_use"
        ]

    def content(self) -> list[dict[str, Any]]:
        """The blocks, once all text was added."""
        found = []
        for block, pieces in zip(self._blocks, self._texts, strict=True):
            text = "".join(pieces)
            if block["type"] == "tool_use":
                # Anthropic's clients make the same of the deltas of a call that was cut off.
                found.append({**block, "input": partial_object(text)})
            else:
                found.append({**block, block["type"]: text})
        return found
