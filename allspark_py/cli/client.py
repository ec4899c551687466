"""Talks in the terminal with a server of OpenAI's protocol."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from typing import Any

from allspark.remote.blocking import BlockingClient
from allspark.remote.errors import RemoteError
from allspark.remote.events import Usage, delta_of, usage_of

from .remote_flags import add_remote_flags, to_remote
from .talk import AnswerError, Talk

_OURS = ("messages", "stream", "n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="of the server, as http://127.0.0.1:23333")
    add_remote_flags(parser)


def run(options: argparse.Namespace) -> int:
    remote = to_remote(options.url, options)
    Talk(RemoteBackend(remote.client(), remote.model), sys.stdin, sys.stdout).run()
    return 0


class RemoteBackend:
    """Answers of a server."""

    what_is_set = "a field of the requests, as in /set temperature 0.5 (null: none)"

    def __init__(self, client: BlockingClient, model: str):
        self.name = f"{model} at {client.url}"
        self.counts = Usage()
        self.messages: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {
            "model": model,
            "stream_options": {"include_usage": True},
        }
        self._client = client

    def begin(self, system: str | None) -> None:
        """No messages."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def answer(self, question: str) -> Generator[str, None, None]:
        """Sends the conversation with the question."""
        self.counts = Usage()
        asked = {"role": "user", "content": question}
        texts: list[str] = []
        is_whole = False
        try:
            yield from self._pieces([*self.messages, asked], texts)
            is_whole = True
        except RemoteError as error:
            texts.clear()
            prefix = "" if error.status == 200 else f"{error.status}: "
            raise AnswerError(prefix + error.message) from None
        except OSError as error:
            texts.clear()
            raise AnswerError(str(error)) from None
        finally:
            # What was stopped before its first piece is no answer.
            if is_whole or texts:
                answer = {"role": "assistant", "content": "".join(texts)}
                self.messages += [asked, answer]

    def _pieces(
        self, messages: list[dict[str, Any]], texts: list[str]
    ) -> Generator[str, None, None]:
        """The answer as it is shown, with its reasoning between marks; `texts` gets it without."""
        body = {**self.settings, "messages": messages, "stream": True}
        is_reasoning = has_ended = False
        for event in self._client.events("/chat/completions", body):
            if (usage := usage_of(event)) is not None:
                self.counts = usage
            delta = delta_of(event)
            has_ended = has_ended or delta.finish_reason is not None
            if delta.reasoning:
                yield delta.reasoning if is_reasoning else f"<think>\n{delta.reasoning}"
                is_reasoning = True
            if delta.text:
                texts.append(delta.text)
                yield f"\n</think>\n\n{delta.text}" if is_reasoning else delta.text
                is_reasoning = False
        if not has_ended:
            raise RemoteError("the stream ended before the answer did", 200)

    def forget_answer(self) -> None:
        """Drops the last two messages."""
        del self.messages[-2:]

    def set(self, name: str, value: Any) -> None:
        """A field of the body. The server says what it thinks of it with the next answer."""
        if name in _OURS:
            raise ValueError(f"{name} is for the conversation to say")
        if value is None or value == "":
            if name == "model":
                raise ValueError("model must be the name of one")
            self.settings.pop(name, None)
        else:
            self.settings[name] = value
