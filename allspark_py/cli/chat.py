"""Talks with a model in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from . import engine_flags

_HELP = """\
An empty line sends what was typed. `exit` ends the program, `end` begins a new conversation.
/system TEXT     the system prompt, for a new conversation
/set NAME VALUE  a field of GenerationConfig, as in /set temperature 0.5; without a name, shows them
/retry           answers the last question anew
/save FILE       writes the conversation as JSON
/stats           tokens and speed of the last answer
/help            this text"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a path, a name on a hub, or smollm2")
    engine_flags.add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    from allspark.pipeline import pipeline

    config = engine_flags.to_engine_config(options)
    config.max_batch_size = config.max_batch_size or 1
    template = engine_flags.to_chat_template(options)
    with pipeline(
        options.model, backend_config=config, chat_template_config=template, log_level="ERROR"
    ) as pipe:
        Chat(pipe, sys.stdin, sys.stdout).run()
    return 0


class Chat:
    """One conversation after the other, until the input ends."""

    def __init__(self, pipe: Any, source: TextIO, out: TextIO):
        from allspark.pipeline import GenerationConfig

        self._pipe = pipe
        self._source = source
        self._out = out
        self._is_terminal = source.isatty()
        self._config = GenerationConfig(
            do_sample=True, temperature=0.7, top_p=0.8, max_new_tokens=None
        )
        self._system: str | None = None
        self._begin()
        self._stats = "there is no answer yet"
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._say(_HELP),
            "retry": self._retry,
            "save": self._save,
            "set": self._set,
            "stats": lambda _: self._say(self._stats),
            "system": self._set_system,
        }

    def _begin(self) -> None:
        self._session = self._pipe.session()
        if self._system:
            self._session.conversation.messages.append({"role": "system", "content": self._system})

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def run(self) -> None:
        """Reads and answers until `exit` or the end of the input."""
        if self._is_terminal:
            self._say(f"{self._pipe.model_name}. {_HELP.splitlines()[0]} /help has more.")
        for text in self._questions():
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

    def _questions(self) -> Iterator[str]:
        """Texts that end with an empty line; commands and single words end with their line."""
        lines: list[str] = []
        while True:
            if self._is_terminal:
                print("" if lines else "\n>>> ", end="", file=self._out, flush=True)
            try:
                line = self._source.readline()
            except KeyboardInterrupt:
                lines.clear()
                continue
            if not line:
                if lines:
                    yield "\n".join(lines)
                return
            line = line.rstrip("\n")
            if not lines and (line.startswith("/") or line.strip() in ("exit", "end")):
                yield line
            elif line:
                lines.append(line)
            elif lines:
                yield "\n".join(lines)
                lines.clear()

    def _answer(self, text: str) -> None:
        begin, first = time.monotonic(), None
        pieces = self._pipe.chat(text, self._session, self._config, stream_response=True)
        try:
            for piece in pieces:
                if first is None:
                    first = time.monotonic() - begin
                print(piece.text, end="", file=self._out, flush=True)
        except KeyboardInterrupt:
            pieces.close()
        self._say("")
        response = self._session.response
        if response.error_message is not None:
            self._say(f"[{response.error_message}]")
            return
        seconds = time.monotonic() - begin
        count = response.generate_token_len
        self._stats = (
            f"{response.input_token_len} tokens asked ({response.cached_tokens} of them cached), "
            f"{count} answered in {seconds:.2f} s ({count / seconds:.1f} a second), the first "
            f"after {first or seconds:.2f} s"
        )

    def _retry(self, _: str) -> None:
        if not self._session.history:
            self._say("there is no question yet")
            return
        question, _answer = self._session.history[-1]
        earlier = self._session.history[:-1]
        messages = self._session.conversation.messages[:-2]
        self._session = self._pipe.session()
        self._session.history.extend(earlier)
        self._session.conversation.messages.extend(messages)
        self._answer(question)

    def _save(self, path: str) -> None:
        if not path:
            self._say("/save needs the name of a file")
            return
        messages = self._session.conversation.messages
        try:
            Path(path).write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            self._say(str(error))
        else:
            self._say(f"{len(messages)} messages are in {path}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            fields = dataclasses.asdict(self._config)
            self._say(", ".join(f"{key}={value!r}" for key, value in fields.items()))
            return
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            self._config = dataclasses.replace(self._config, **{name: parsed})
        except (TypeError, ValueError) as error:
            self._say(str(error))

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._begin()
        self._say("a new conversation with this system prompt" if text else "a new conversation")
