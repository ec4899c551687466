"""Talks with a model in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Generator
from typing import Any

from allspark.remote.events import Usage

from . import engine_flags
from .talk import AnswerError, Talk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a path, a name on a hub, or smollm2")
    add("--model-name", metavar="NAME",
        help="what the model is called; a chat template's name also chooses that")  # fmt: skip
    add("--adapter-name", metavar="NAME",
        help="one of --adapters that answers (default: the only one)")  # fmt: skip
    engine_flags.add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    from allspark.pipeline import pipeline

    config = engine_flags.to_engine_config(options)
    engine_flags.choose_adapter(options, config)
    config.max_batch_size = config.max_batch_size or 1
    system = None
    if options.chat_template is None and options.cap is None:  # the tokenizer's own has no other
        system, options.meta_instruction = options.meta_instruction, None
    template = engine_flags.to_chat_template(options)
    with pipeline(
        options.model,
        model_name=options.model_name,
        backend_config=config,
        chat_template_config=template,
        log_level="ERROR",
    ) as pipe:
        backend = PipelineBackend(pipe, options.adapter_name)
        Talk(backend, sys.stdin, sys.stdout, system).run()
    return 0


class PipelineBackend:
    """Answers of a model in this process."""

    what_is_set = "a field of GenerationConfig, as in /set temperature 0.5"

    def __init__(self, pipe: Any, adapter: str | None = None):
        from allspark.pipeline import GenerationConfig
        from allspark.pipeline.fields import rules

        self._rules = rules(GenerationConfig)
        self.name = pipe.model_name
        self.counts = Usage()
        self._pipe = pipe
        self._adapter = adapter
        self._session = pipe.session()
        self._config = GenerationConfig(
            do_sample=True, temperature=0.7, top_p=0.8, max_new_tokens=None
        )

    def begin(self, system: str | None) -> None:
        """A new session."""
        self._session = self._pipe.session()
        if system:
            self.messages.append({"role": "system", "content": system})

    def answer(self, question: str) -> Generator[str, None, None]:
        """The next turn of the session."""
        pieces = self._pipe.chat(
            question, self._session, self._config, stream_response=True, adapter_name=self._adapter
        )
        try:
            for piece in pieces:
                yield piece.text
        finally:
            pieces.close()
            response = self._session.response
            self.counts = Usage(
                prompt=response.input_token_len,
                output=response.generate_token_len,
                cached=response.cached_tokens,
            )
        if response.error_message is not None:
            raise AnswerError(response.error_message)

    def forget_answer(self) -> None:
        """A session of the turns before."""
        earlier, messages = self._session.history[:-1], self.messages[:-2]
        self._session = self._pipe.session()
        self._session.history.extend(earlier)
        self.messages.extend(messages)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The session's."""
        messages: list[dict[str, Any]] = self._session.conversation.messages
        return messages

    @property
    def settings(self) -> dict[str, Any]:
        """The generation config, without what a conversation cannot have."""
        return {
            name: value
            for name, value in dataclasses.asdict(self._config).items()
            if self._rules[name].treatment == "mapped"
        }

    def set(self, name: str, value: Any) -> None:
        """A field of it."""
        if name not in self.settings:
            raise ValueError(f"there is no setting {name!r}; /set shows them")
        self._config = dataclasses.replace(self._config, **{name: value})
