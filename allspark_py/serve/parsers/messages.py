"""The parts of an assistant message: whole, and as the pieces that a stream sends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class ContentDelta:
    """A piece of the text that answers the user."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of what the model wrote before its answer."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A tool call begins. Sent once for each call, before its arguments."""

    index: int  # of the call in the message
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments


@dataclass
class ToolCall:
    """One call.

    Attributes:
        arguments: JSON text, as the model wrote it. Of a call that was cut off, its beginning.
        is_complete: the arguments are a whole JSON object. False where the output was cut off, or
            where the model wrote something else.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool


@dataclass
class Message:
    """An assistant message; absent parts are empty."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
