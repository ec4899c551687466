"""Reads calls that are JSON objects: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from allspark.serve.parsers.collector import Collector
from allspark.serve.parsers.reader import Reader, Steps

_ARGUMENTS = ("arguments", "parameters")
# Keys of a call. Without a marker before it, an object that begins with another key is none.
_KEYS = ("name", *_ARGUMENTS, "type", "id")
_NO_BLANK = re.compile(r"\S")
# Between and after calls: separators, and a bracket that models write once too often.
_BETWEEN_CALLS = re.compile(r"[\s,;}]*")


def read_objects(
    reader: Reader,
    out: Collector,
    stops: tuple[str, ...] = (),
    known: Collection[str] | None = None,
) -> Steps[None]:
    """Reads objects to the first thing that is none, and the end of their list. What is no call
    becomes content.

    Args:
        stops: markers that end an object, wherever they are outside of strings.
        known: where the objects may be something else than calls, the names of the tools. Then a
            call is what has one of these names, or a name and an object of arguments.
    """

    def blanks(text: str) -> None:
        out.content(_NO_BLANK.sub("", text))

    while (char := (yield from reader.run(_BETWEEN_CALLS, blanks))) == "{":
        call = _Call(out, known)
        is_whole = yield from _read_object(reader, call, stops)
        if not call.end(is_whole) or not is_whole:
            return
    if char == "]":
        reader.take()


class _Call:
    """One object. Until it is known to be a call, all of it is kept."""

    def __init__(self, out: Collector, known: Collection[str] | None):
        self._out = out
        self._known = known
        self._raw: list[str] = []
        self._arguments: list[str] = []  # that came before the name
        self._name: str | None = None
        self._has_begun = False
        self.has_arguments = False
        self._has_object = False  # of arguments
        self._are_arguments_whole = False

    @property
    def is_certain(self) -> bool:
        """It is a call, if it has a name."""
        return self._known is None or self._has_begun

    @property
    def has_name(self) -> bool:
        return self._name is not None

    def raw(self, text: str) -> None:
        """Text that is a part of the call's object."""
        if not self._has_begun:
            self._raw.append(text)

    def name(self, name: str) -> None:
        self._name = name
        if self._known is None or name in self._known or self._has_object:
            self._begin()

    def arguments(self, text: str) -> None:
        """A piece of the arguments."""
        if self._has_begun:
            self._out.arguments(text)
        else:
            self._arguments.append(text)

    def begin_arguments(self, is_object: bool) -> None:
        self.has_arguments = True
        self._has_object = is_object
        if is_object:
            self._begin()

    def end_arguments(self, is_whole: bool) -> None:
        self._are_arguments_whole = is_whole

    def _begin(self) -> None:
        if not self._has_begun and self._name is not None:
            self._has_begun = True
            self._out.begin_call(self._name)
            self._out.arguments("".join(self._arguments))
            self._raw.clear()

    def end(self, is_whole: bool) -> bool:
        """The object ends, with its bracket if `is_whole`. Returns whether it was a call."""
        if not self._has_begun:
            self._out.released("".join(self._raw))
            return False
        if not self.has_arguments and is_whole:
            self._out.arguments("{}")
        self._out.end_call(is_whole if not self.has_arguments else self._are_arguments_whole)
        return True


def _read_object(reader: Reader, call: _Call, stops: tuple[str, ...]) -> Steps[bool]:
    """Reads the object that comes next. Returns False where it is broken or cut off, or no call."""
    call.raw(reader.take())
    while True:
        char = yield from reader.blanks(call.raw)
        if char == "}":
            call.raw(reader.take())
            return True
        if char == ",":
            call.raw(reader.take())
            continue
        if char != '"':
            return False
        key = yield from _read_string(reader, call)
        if key is None or (not call.is_certain and key not in _KEYS):
            return False
        if (yield from reader.blanks(call.raw)) != ":":
            return False
        call.raw(reader.take())
        char = yield from reader.blanks(call.raw)
        if not char:
            return False
        if key == "name" and char == '"' and not call.has_name:
            name = yield from _read_string(reader, call)
            if name is None:
                return False
            call.name(name)
        elif key in _ARGUMENTS and not call.has_arguments:
            if not (yield from _read_arguments(reader, call, char, stops)):
                return False
        elif not (yield from reader.value(call.raw, stops)):
            return False


def _read_arguments(reader: Reader, call: _Call, first: str, stops: tuple[str, ...]) -> Steps[bool]:
    if first == "{":
        call.begin_arguments(is_object=True)

        def sink(text: str) -> None:
            call.raw(text)
            call.arguments(text)

        is_whole = yield from reader.value(sink, stops)
    else:
        # None at all, or the object's text as a string; something else is passed on as it is.
        call.begin_arguments(is_object=False)
        pieces: list[str] = []

        def keep(text: str) -> None:
            call.raw(text)
            pieces.append(text)

        is_whole = yield from reader.value(keep, stops)
        text = "".join(pieces)
        if first == '"':
            text = decoded(text, is_whole)
        call.arguments("{}" if is_whole and text in ("", "null") else text)
    call.end_arguments(is_whole)
    return is_whole


def _read_string(reader: Reader, call: _Call) -> Steps[str | None]:
    """Reads the string that comes next; None where it is cut off."""
    pieces: list[str] = []

    def keep(text: str) -> None:
        call.raw(text)
        pieces.append(text)

    is_whole = yield from reader.string(keep)
    return decoded("".join(pieces), is_whole) if is_whole else None


def decoded(literal: str, is_whole: bool) -> str:
    """The text of a JSON string. Where that has wrong escapes, its characters."""
    if is_whole:
        candidates = [literal]
    else:
        # It may be cut within an escape, of 6 characters, and within the second of a pair.
        candidates = [literal[: len(literal) - cut] + '"' for cut in range(12)]
    for text in candidates:
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            continue
    return literal[1 : -1 if is_whole else None]
