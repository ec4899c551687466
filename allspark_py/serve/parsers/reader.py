"""Reads an output that arrives in pieces, as if it were all there.

A parser is written as generator functions that take what they need from a `Reader`. Where the
output so far does not decide what comes next, they yield, and go on when there is more. So nothing
depends on where the output was cut: every decision is made on the text itself.

The work is linear. A reader keeps only the text that is not decided yet, less than a marker's
length; what a parser holds back for longer goes to lists of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")
# A parsing function: yields while it waits for more of the output, and returns a value.
Steps: TypeAlias = Generator[None, None, _T]
# Takes a piece of text.
Sink: TypeAlias = Callable[[str], object]

_BLANKS = re.compile(r"\s*")
_NO_QUOTE = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[^,\[\]}\s<]*")


def _ignore(text: str) -> None:
    """A sink."""


class Markers:
    """Texts to look for. None may be the beginning of another: which of them is there would
    depend on text that has not come."""

    def __init__(self, *texts: str):
        for text in texts:
            if not text or any(o != text and o.startswith(text) for o in texts):
                raise ValueError(f"the marker {text!r} is empty or begins another one")
        self.texts = texts
        self.max_length = max(map(len, texts), default=0)
        whole = "|".join(re.escape(text) for text in dict.fromkeys(texts)) or r"(?!)"
        begun = "|".join(_beginning(text) for text in dict.fromkeys(texts) if len(text) > 1)
        # Group 1: a whole marker. Without it: the output so far ends within one.
        self.growing = re.compile(f"({whole})" + (rf"|(?:{begun})\Z" if begun else ""))
        self.final = re.compile(f"({whole})")


def _beginning(text: str) -> str:
    """An expression for each beginning of the text that is not empty and not all of it."""
    expression = ""
    for char in reversed(text[1:-1]):
        expression = f"(?:{re.escape(char)}{expression})?"
    return re.escape(text[0]) + expression


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """The same object for the same texts: compiling the expressions takes longer than a parse."""
    return Markers(*texts)


class Reader:
    """The output so far, from the first character that was not taken yet.

    Attributes:
        cut: the beginning of a marker with which the output ended.
    """

    def __init__(self) -> None:
        self.cut = ""
        self._text = ""
        self._pos = 0
        self._has_ended = False

    def feed(self, piece: str) -> None:
        """More of the output came."""
        self._text = self._text[self._pos :] + piece
        self._pos = 0

    def end(self) -> None:
        """No more will come."""
        self._has_ended = True

    def take(self, length: int = 1) -> str:
        """Characters that are known to be there."""
        begin, self._pos = self._pos, self._pos + length
        return self._text[begin : self._pos]

    def until(self, texts: Markers, sink: Sink) -> Steps[str | None]:
        """Passes on the text before the first marker, and takes the marker.

        Returns:
            The marker. None at the end of the output: if that is within a marker, its beginning is
            in `cut`, and was not passed on.
        """
        while True:
            found = self._search(texts)
            if self._has_ended and not found:
                begun = texts.growing.search(self._text, self._pos)
                self._pass(sink, begun.start() if begun else len(self._text))
                self.cut = self._text[self._pos :]
                self._pos = len(self._text)
                return None
            self._pass(sink, found.start() if found else len(self._text))
            if found and found[1] is not None:
                self._pos = found.end()
                return found[1]
            yield

    def _pass(self, sink: Sink, end: int) -> None:
        """Passes on the text up to a position."""
        if end > self._pos:
            sink(self._text[self._pos : end])
            self._pos = end

    def _search(self, texts: Markers) -> re.Match[str] | None:
        # At the end a beginning of a marker is text, and may contain another marker.
        pattern = texts.final if self._has_ended else texts.growing
        return pattern.search(self._text, self._pos)

    def marker(self, texts: Markers) -> Steps[str | None]:
        """Takes a marker if the output goes on with one; else returns None."""
        while True:
            pattern = texts.final if self._has_ended else texts.growing
            found = pattern.match(self._text, self._pos)
            if found and found[1] is not None:
                self._pos = found.end()
                return found[1]
            if self._has_ended or (not found and self._pos < len(self._text)):
                return None
            yield

    def run(self, chars: re.Pattern[str], sink: Sink = _ignore) -> Steps[str]:
        """Passes on the characters that match, each for itself, and returns the first that does
        not. It is not taken; "" at the end of the output."""
        while True:
            found = chars.match(self._text, self._pos)
            self._pass(sink, found.end() if found else self._pos)
            if self._pos < len(self._text):
                return self._text[self._pos]
            if self._has_ended:
                return ""
            yield

    def blanks(self, sink: Sink = _ignore) -> Steps[str]:
        """As `run`, for white space."""
        return self.run(_BLANKS, sink)

    # JSON, as models write it: what is no JSON goes through too.

    def string(self, sink: Sink) -> Steps[bool]:
        """Passes on a string with its quotes, of which the first comes next. Returns False where
        the output ends before the last one."""
        sink(self.take())
        while True:
            end = self._pos
            while True:
                found = _NO_QUOTE.match(self._text, end)
                assert found  # it matches the empty text
                end = found.end()
                if end + 1 >= len(self._text) or self._text[end] == '"':
                    break
                end += 2  # a backslash, and what it stands before
            has_quote = self._text[end : end + 1] == '"'
            self._pass(sink, end + has_quote)
            if has_quote:
                return True
            if self._has_ended:
                self._pass(sink, len(self._text))  # a backslash, if anything
                return False
            yield

    def value(self, sink: Sink, stops: tuple[str, ...] = ()) -> Steps[bool]:
        """Passes on a JSON value, whose first character comes next. Returns False where the output
        ends before the value, or goes on with one of `stops` outside of strings; that marker is not
        taken."""
        first = self._text[self._pos]
        if first == '"':
            return (yield from self.string(sink))
        if first not in "{[":
            # A number, a word, or what the model took for one.
            after = yield from self.run(_SCALAR, sink)
            return after != "" and after != "<"
        depth = 0
        structure = _structure(stops)
        while True:
            found = self._search(structure)
            self._pass(sink, found.start() if found else len(self._text))
            if found is None or found[1] is None:  # nothing, or perhaps a stop
                if self._has_ended:
                    return False
                yield
                continue
            char = found[1]
            if len(char) > 1:
                return False
            if char != '"':
                self._pass(sink, found.end())
            if char == '"':
                if not (yield from self.string(sink)):
                    return False
            elif char in "{[":
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    return True


def _structure(stops: tuple[str, ...]) -> Markers:
    return markers('"', "{", "}", "[", "]", *stops)
