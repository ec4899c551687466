"""The loop of a conversation in the terminal, which `chat` and `client` share."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from allspark.remote.events import Usage
from allspark.unicode_text import check_unicode

from . import interrupt

_HELP = """\
An empty line sends what was typed. `exit` ends the program, `end` begins a new conversation.
/system TEXT     the system prompt, for a new conversation
/set NAME VALUE  {what_is_set}
/set             shows what is set
/retry           asks the last question anew
/save FILE       writes the conversation as JSON
/stats           tokens and speed of the last answer
/help            this text"""
# A model's text must not steer the terminal.
_CONTROLS = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


class AnswerError(RuntimeError):
    """A question got no answer, or only a part of one. It is not part of the conversation."""


class Backend(Protocol):
    """What answers."""

    name: str
    # What /set sets, for the help.
    what_is_set: str
    # Of the last answer.
    counts: Usage

    def begin(self, system: str | None) -> None:
        """A new conversation."""

    def answer(self, question: str) -> Generator[str, None, None]:
        """Yields the pieces of the answer; question and answer are then part of the conversation.
        If it is ended before, what came is the answer.

        Raises:
            AnswerError: it failed, for the reason in its text.
        """

    def forget_answer(self) -> None:
        """Takes the last question and its answer back."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation, as OpenAI's messages."""

    @property
    def settings(self) -> dict[str, Any]:
        """What /set has set or can set."""

    def set(self, name: str, value: Any) -> None:
        """Sets one of them. Raises TypeError or ValueError where it cannot."""


class Talk:
    """One conversation after the other, until the input ends."""

    def __init__(self, backend: Backend, source: TextIO, out: TextIO, system: str | None = None):
        self._backend = backend
        self._source = source
        self._out = out
        self._is_terminal = source is sys.stdin and source.isatty()
        if self._is_terminal:
            # input() then edits lines and remembers them, and takes more than a terminal's 4,095
            # characters in a line.
            with contextlib.suppress(ImportError):  # there are Pythons without it
                importlib.import_module("readline")
        self._help = _HELP.format(what_is_set=backend.what_is_set)
        self._stats = "there is no answer yet"
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._say(self._help),
            "retry": self._retry,
            "save": self._save,
            "set": self._set,
            "stats": lambda _: self._say(self._stats),
            "system": self._set_system,
        }
        self._system = system
        self._begin()

    def _begin(self) -> None:
        self._backend.begin(self._system)
        # The last question, and whether it is part of the conversation.
        self._question: str | None = None
        self._is_kept = False

    def _show(self, text: str, end: str = "") -> None:
        encoding = self._out.encoding or "utf-8"
        text = text.translate(_CONTROLS).encode(encoding, "replace").decode(encoding)
        print(text, end=end, file=self._out, flush=True)

    def _say(self, text: str) -> None:
        self._show(text, end="\n")

    def run(self) -> None:
        """Reads and answers until `exit` or the end of the input."""
        interrupt.check()
        if self._is_terminal:
            self._say(f"{self._backend.name}. {self._help.splitlines()[0]} /help has more.")
        for text in self._questions():
            try:
                check_unicode(text)
            except ValueError as error:
                self._say(f"[{error}]")
                continue
            word = text.strip()
            if word == "exit":
                return
            if word == "end":
                self._begin()
                self._say("a new conversation")
            elif word.startswith("/"):
                name, _, rest = word[1:].partition(" ")
                command = self._commands.get(name)
                if command is None:
                    self._say(f"there is no command /{name}; /help lists them")
                else:
                    command(rest.strip())
            elif word:
                self._answer(text)

    def _read_line(self, prompt: str) -> str:
        """A line with its end; "" at the end of the input."""
        if not self._is_terminal:
            return self._source.readline()
        try:
            return input(prompt) + "\n"
        except EOFError:
            return ""

    def _questions(self) -> Iterator[str]:
        """Texts that end with an empty line; commands and single words end with their line."""
        lines: list[str] = []
        while True:
            try:
                line = self._read_line("" if lines else "\n>>> ")
            except KeyboardInterrupt:
                interrupt.take()
                lines.clear()
                continue
            if not line:
                if lines:
                    yield "\n".join(lines)
                return
            line = line.rstrip("\r\n")
            if not lines and (line.startswith("/") or line.strip() in ("exit", "end")):
                yield line
            elif line:
                lines.append(line)
            elif lines:
                yield "\n".join(lines)
                lines.clear()

    def _answer(self, question: str) -> None:
        self._question = question
        before = len(self._backend.messages)
        begin, first = time.monotonic(), None
        pieces = self._backend.answer(question)
        failure = None
        try:
            for piece in pieces:
                if first is None and piece:
                    first = time.monotonic() - begin
                self._show(piece)
        except KeyboardInterrupt:
            interrupt.take()
            pieces.close()
        except AnswerError as error:
            failure = str(error)
        self._is_kept = len(self._backend.messages) > before
        if failure is None:
            self._say("")
            self._stats = _stats(self._backend.counts, time.monotonic() - begin, first)
        else:
            self._say(f"{'' if first is None else chr(10)}[{failure}]")

    def _retry(self, _: str) -> None:
        if self._question is None:
            self._say("there is no question yet")
            return
        if self._is_kept:
            self._backend.forget_answer()
        self._answer(self._question)

    def _save(self, path: str) -> None:
        if not path:
            self._say("/save needs the name of a file")
            return
        messages = self._backend.messages
        text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            self._say(str(error))
        else:
            self._say(f"{len(messages)} messages are in {path}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            pairs = [f"{key}={value!r}" for key, value in self._backend.settings.items()]
            self._say(self._in_lines(", ".join(pairs)))
            return
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            self._backend.set(name, parsed)
        except (TypeError, ValueError) as error:
            self._say(str(error))

    def _in_lines(self, text: str) -> str:
        """The text, broken between words where there is a terminal."""
        if not self._is_terminal:
            return text
        width = shutil.get_terminal_size().columns
        return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._begin()
        self._say("a new conversation with this system prompt" if text else "a new conversation")


def _stats(counts: Usage, seconds: float, first: float | None) -> str:
    asked = "an unknown number of tokens asked"
    if counts.prompt is not None:
        asked = f"{counts.prompt} tokens asked"
    if counts.cached is not None:
        asked += f" ({counts.cached} of them cached)"
    answered = f"answered in {seconds:.2f} s"
    if counts.output is not None:
        answered = f"{counts.output} {answered} ({counts.output / seconds:.1f} a second)"
    return f"{asked}, {answered}, the first after {first or seconds:.2f} s"
