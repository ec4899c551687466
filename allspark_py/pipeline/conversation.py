"""Conversation: the tokens of a chat, so that each turn computes only what it adds."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allspark.chat_template import ChatTemplate


@dataclass
class Conversation:
    """Messages, and the token ids that the model has computed of them.

    An answer's ids are kept as they were generated. Encoding its text again could give other ids,
    which the prefix cache would not have.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    # The rendered text and ids up to the end of the last answer, without its end token.
    _text: str = ""
    _ids: array[int] = field(default_factory=lambda: array("i"))

    @property
    def num_tokens(self) -> int:
        """Ids of the conversation so far."""
        return len(self._ids)

    @property
    def num_bytes(self) -> int:
        """What the text and ids take, without the messages."""
        return sys.getsizeof(self._text) + sys.getsizeof(self._ids)

    def ask(
        self, template: ChatTemplate, tokenizer: Any, *asked: dict[str, Any]
    ) -> tuple[str, list[int]]:
        """Text and ids of the prompt of one message or more, whose answer continues the
        conversation. Where the template completes texts, each of them stands alone."""
        is_chat = template.capability == "chat"
        text = template.render([*self.messages, *asked] if is_chat else list(asked))
        if self._ids and text.startswith(self._text):
            added = text[len(self._text) :]
            return text, [*self._ids, *template.encode(tokenizer, added, sequence_start=False)]
        return text, template.encode(tokenizer, text, sequence_start=True)

    def num_kept(self, ids: Sequence[int]) -> int:
        """How many ids of a prompt are those of the conversation so far: all of them, or none where
        the template renders earlier messages otherwise than before."""
        count = len(self._ids)
        return count if array("i", ids[:count]) == self._ids else 0

    def answered(
        self, message: dict[str, Any], text: str, ids: Sequence[int], answer: str,
        answer_ids: Sequence[int],
    ) -> None:  # fmt: skip
        """Adds a turn: what was asked with its prompt's text and ids, and the answer."""
        self.messages += [message, {"role": "assistant", "content": answer}]
        self._text = text + answer
        self._ids = array("i", [*ids, *answer_ids])
