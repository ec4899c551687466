"""Collects what a parser finds: as pieces for a stream, and as the message so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from allspark.serve.parsers.json_texts import is_json_object
from allspark.serve.parsers.messages import (
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
)
from allspark.serve.parsers.reader import Markers


class _Text:
    """A text without the white space beside its markers.

    White space is held back until it is known what follows: other text, then it belongs to the
    text, or a marker or the end.

    Args:
        markers: texts that must not form by joining: where something is left out between two
            pieces that would spell one together, a space is put there.
    """

    def __init__(self, markers: Markers | None = None) -> None:
        self._markers = markers
        self._is_interrupted = False
        self._pieces: list[str] = []
        self._blanks: list[str] = []  # held back
        self._num_before = 0  # of them, before the first marker that they are beside
        self.is_beside_marker = False  # they are, or would be

    def put(self, text: str) -> str:
        """Adds text. Returns what of it, and of earlier blanks, is now certain."""
        certain = text.rstrip()
        if not certain:
            self._blanks.append(text)
            return ""
        tail = text[len(certain) :]
        if self.is_beside_marker and not self._pieces:
            certain = certain.lstrip()
        else:
            certain = "".join(self._blanks) + certain
        self._blanks = [tail] if tail else []
        self.is_beside_marker = False
        if self._is_interrupted:
            self._is_interrupted = False
            if self._would_become_marker(certain[0]):
                certain = " " + certain
        self._pieces.append(certain)
        return certain

    def _would_become_marker(self, char: str) -> bool:
        """Whether the end of the text and what begins with a character may be one together."""
        if self._markers is None:
            return False
        end = ""
        for piece in reversed(self._pieces):
            end = piece + end
            if len(end) >= self._markers.max_length:
                break
        end = end[-self._markers.max_length :]
        found = self._markers.growing.search(end + char)
        return found is not None and found.start() < len(end)

    def interrupt(self) -> None:
        """Something that is no part of the text stands here."""
        self._is_interrupted = True

    def marker(self) -> None:
        """A marker stands here."""
        self._is_interrupted = True
        if self.is_beside_marker:
            del self._blanks[self._num_before :]  # between two markers
        self._num_before = len(self._blanks)
        self.is_beside_marker = True

    def flush(self) -> str:
        """Returns the rest at the end."""
        rest = "" if self.is_beside_marker else "".join(self._blanks)
        self._blanks = []
        self._pieces.append(rest)
        return rest

    @property
    def is_empty(self) -> bool:
        return not self._pieces

    def __str__(self) -> str:
        return "".join(self._pieces)


class _Call:
    def __init__(self, call_id: str, name: str):
        self.id = call_id
        self.name = name
        self.arguments: list[str] = []
        self.is_complete = False

    def __call__(self) -> ToolCall:
        return ToolCall(self.id, self.name, "".join(self.arguments), self.is_complete)


class Collector:
    """Takes the parts of a message from a parser.

    Args:
        make_id: makes the ids of calls.
        markers: all markers that may stand in content, where they are left out.
    """

    def __init__(self, make_id: Callable[[], str], markers: Markers):
        self.markers = markers
        self._make_id = make_id
        self._deltas: list[Delta] = []
        self._content = _Text(markers)
        self._reasoning = _Text()
        self._has_reasoning = False
        self._calls: list[_Call] = []
        self._ids: set[str] = set()  # of the calls

    def deltas(self) -> list[Delta]:
        """What was found since the last call; neighbours of one kind are one."""
        found, self._deltas = self._deltas, []
        if len(found) < 2:
            return found
        return list(_joined(found))

    def message(self) -> Message:
        """All that was found so far."""
        return Message(str(self._content), str(self._reasoning), [call() for call in self._calls])

    @property
    def is_empty(self) -> bool:
        """Nothing but reasoning was found."""
        return self._content.is_empty and not self._calls

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def has_reasoning(self) -> bool:
        """Reasoning has begun, though perhaps without a text."""
        return self._has_reasoning

    def cut(self, text: str) -> None:
        """The output ended within what may be a marker. After a marker it is taken for one."""
        if not self._content.is_beside_marker:
            self.content(text)

    def others(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        """The markers that are not among these."""
        return tuple(text for text in self.markers.texts if text not in texts)

    def released(self, text: str) -> None:
        """What was read as a call, and is none."""
        for index, part in enumerate(self.markers.final.split(text)):
            if index % 2:
                self.marker()
            else:
                self.content(part)

    def content(self, text: str) -> None:
        """Text without markers."""
        certain = self._content.put(text)
        if certain:
            self._deltas.append(ContentDelta(certain))

    def marker(self) -> None:
        """The content is interrupted by what is none."""
        self._content.marker()

    def interrupt(self) -> None:
        """As `marker`, where the white space beside it is left out anyway."""
        self._content.interrupt()

    def begin_reasoning(self) -> None:
        self._has_reasoning = True
        self._reasoning.marker()
        if not self._reasoning.is_empty:
            self._reasoning.put("\n")  # between two reasonings

    def reasoning(self, text: str) -> None:
        certain = self._reasoning.put(text)
        if certain:
            self._deltas.append(ReasoningDelta(certain))

    def end_reasoning(self) -> None:
        self._reasoning.marker()
        self._content.marker()

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call begins. Its id is the one given, unless an earlier call has it."""
        self._content.marker()
        if not call_id or call_id in self._ids:
            call_id = self._make_id()
        self._ids.add(call_id)
        call = _Call(call_id, name)
        self._deltas.append(ToolCallBegin(len(self._calls), call.id, name))
        self._calls.append(call)

    def arguments(self, text: str) -> None:
        """A piece of the last call's arguments."""
        if text:
            self._calls[-1].arguments.append(text)
            self._deltas.append(ToolCallArguments(len(self._calls) - 1, text))

    def end_call(self, is_whole: bool) -> None:
        """The last call ends, with all of its arguments if `is_whole`."""
        call = self._calls[-1]
        call.is_complete = is_whole and is_json_object("".join(call.arguments))

    def flush(self) -> None:
        """The output has ended."""
        rest = self._content.flush()
        if rest:
            self._deltas.append(ContentDelta(rest))


def _joined(deltas: Iterable[Delta]) -> Iterable[Delta]:
    kind: type | None = None
    texts: list[str] = []
    index = 0
    for delta in deltas:
        if isinstance(delta, ToolCallBegin):
            yield from _delta(kind, index, texts)
            yield delta
            kind, texts = None, []
            continue
        at = delta.index if isinstance(delta, ToolCallArguments) else 0
        if type(delta) is not kind or at != index:
            yield from _delta(kind, index, texts)
            kind, index, texts = type(delta), at, []
        texts.append(delta.text)
    yield from _delta(kind, index, texts)


def _delta(kind: type | None, index: int, texts: list[str]) -> Iterable[Delta]:
    if kind is ToolCallArguments:
        yield ToolCallArguments(index, "".join(texts))
    elif kind is not None:
        yield kind("".join(texts))
