"""MessageBuilder: an assistant message from a choice's text, piece by piece.

The same pieces make the deltas of a stream and the message that is not streamed, so both are the
same message.
"""

from __future__ import annotations

from typing import Any, Protocol

from allspark.serve.parsers.json_texts import is_json_object
from allspark.serve.parsers.messages import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from pydantic_core import from_json


class Parser(Protocol):
    """What finds reasoning and tool calls in an output."""

    def put(self, text: str) -> list[Delta]: ...

    def flush(self) -> list[Delta]: ...


def read_deltas(parser: Parser | None, text: str, is_end: bool) -> list[Delta]:
    """What a piece of an output makes certain. Without a parser it is content."""
    if parser is None:
        return [ContentDelta(text)] if text else []
    deltas = parser.put(text) if text else []
    return [*deltas, *parser.flush()] if is_end else deltas


def partial_object(text: str) -> dict[str, Any]:
    """The object of a call's arguments; of those that were cut off, what is certain."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessageBuilder:
    """The message of one choice so far.

    Args:
        parser: None where the output is content and nothing else.
        reasoning_fields: the names under which reasoning is sent; none: it is left out.
    """

    def __init__(self, parser: Parser | None, reasoning_fields: tuple[str, ...]):
        self._parser = parser
        self._reasoning_fields = reasoning_fields
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._num_taken = 0  # pieces of it, by take_reasoning
        self.tool_calls: list[dict[str, Any]] = []

    def put(self, text: str, is_end: bool) -> dict[str, Any]:
        """Adds text; returns what of the message that makes certain, as a delta; may be empty."""
        if self._parser is None:
            if not text:
                return {}
            self._content.append(text)
            return {"content": text}
        delta: dict[str, Any] = {}
        for each in read_deltas(self._parser, text, is_end):
            self._add(each, delta)
        return delta

    def _add(self, each: Delta, delta: dict[str, Any]) -> None:
        if isinstance(each, ContentDelta):
            self._content.append(each.text)
            delta["content"] = delta.get("content", "") + each.text
        elif isinstance(each, ReasoningDelta):
            self._reasoning.append(each.text)
            for name in self._reasoning_fields:
                delta[name] = delta.get(name, "") + each.text
        elif isinstance(each, ToolCallBegin):
            call = {"id": each.id, "type": "function", "function": {"name": each.name}}
            self.tool_calls.append({**call, "function": {"name": each.name, "arguments": ""}})
            begun = {"index": each.index, **call}
            begun["function"] = {"name": each.name, "arguments": ""}
            delta.setdefault("tool_calls", []).append(begun)
        elif isinstance(each, ToolCallArguments):
            self.tool_calls[each.index]["function"]["arguments"] += each.text
            calls = delta.setdefault("tool_calls", [])
            if calls and calls[-1]["index"] == each.index:
                calls[-1]["function"]["arguments"] += each.text
            else:
                calls.append({"index": each.index, "function": {"arguments": each.text}})

    @property
    def is_plain(self) -> bool:
        """The message is the text, whatever that is."""
        return self._parser is None

    @property
    def is_empty(self) -> bool:
        """There is neither content nor a call."""
        return not (self._content or self.tool_calls)

    @property
    def ends_with_calls(self) -> bool:
        """There are calls, and the last one is not cut off."""
        return bool(self.tool_calls) and is_json_object(self.calls[-1][1])

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Names and arguments of the calls."""
        functions = [call["function"] for call in self.tool_calls]
        return [(function["name"], function["arguments"]) for function in functions]

    @property
    def reasoning(self) -> str:
        """What was found of it."""
        return "".join(self._reasoning)

    def take_reasoning(self) -> str:
        """What was found of it since the last call."""
        new = self._reasoning[self._num_taken :]
        self._num_taken = len(self._reasoning)
        return "".join(new)

    def message(self) -> dict[str, Any]:
        """The message, once all text was added."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self.tool_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self.tool_calls
        if self._reasoning:
            for name in self._reasoning_fields:
                message[name] = "".join(self._reasoning)
        return message
