"""The `usage` of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from allspark.serve.choice import Choice
from allspark.serve.message import MessageBuilder
from allspark.serve.text_work import begin, on_thread


def usage(
    num_prompt_tokens: int,
    choices: Sequence[Choice],
    reasoning_tokens: int = 0,
    num_prompts: int = 1,
) -> dict[str, Any]:
    """Tokens of prompts and their outputs, the ends of sequences included. Each prompt has as many
    choices, which follow each other."""
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output,
        "total_tokens": num_prompt_tokens + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(_cached(choices, i, num_prompts) for i in range(num_prompts))
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


async def count_reasoning(tokenizer: Any, text: str) -> int:
    """The tokens of a whole reasoning, counted on a thread: it may be long."""
    return await on_thread(text, _length, tokenizer, text)


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


class ReasoningTokens:
    """How many tokens the reasoning of one output has.

    Those of the pieces are counted before its end, since encoding all of it each time would take
    the square of its length, and those of the whole text at its end: on a thread, as it may be
    long.
    """

    def __init__(self, builder: MessageBuilder, tokenizer: Any):
        self.count = 0  # so far
        self._builder = builder
        self._tokenizer = tokenizer
        self._task: asyncio.Task[None] | None = None

    def count_new(self) -> None:
        """Counts the pieces that have come since the last call."""
        text = self._builder.take_reasoning()
        if text:
            self.count += _length(self._tokenizer, text)

    async def count_whole(self) -> None:
        """Counts the whole text. The output has ended."""
        text = self._builder.reasoning
        if text:
            self.count = await count_reasoning(self._tokenizer, text)

    def is_whole(self, changed: Callable[[], None]) -> bool:
        """Whether the whole text of an output that has ended is counted; `changed` is called once
        it is."""
        if not self._builder.reasoning:
            return True
        if self._task is None:
            self._task = begin(self.count_whole(), changed)
        if not self._task.done():
            return False
        self._task.result()  # raises what counting did
        return True

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._task is not None:
            self._task.cancel()


def _cached(choices: Sequence[Choice], prompt: int, num_prompts: int) -> int:
    """Tokens of a prompt that the cache had before the request. Its further choices find what the
    first has computed, which is not counted."""
    count = len(choices) // num_prompts
    own = choices[prompt * count : (prompt + 1) * count]
    return min((choice.cached_tokens for choice in own), default=0)
