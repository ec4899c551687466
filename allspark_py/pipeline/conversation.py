"""Conversation: the tokens of a chat, so that each turn computes only what it adds."""

from __future__ import annotations

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
    _ids: list[int] = field(default_factory=list)

    def ask(
        self, template: ChatTemplate, tokenizer: Any, message: dict[str, Any]
    ) -> tuple[str, list[int]]:
        """Text and ids of the prompt whose answer continues the conversation."""
        messages = [*self.messages, message]
        text = template.render(messages)
        if self._ids and text.startswith(self._text):
            added = text[len(self._text) :]
            return text, [*self._ids, *template.encode(tokenizer, added, sequence_start=False)]
        return text, template.encode(tokenizer, text, sequence_start=True)

    def answered(
        self, message: dict[str, Any], text: str, ids: Sequence[int], answer: str,
        answer_ids: Sequence[int],
    ) -> None:  # fmt: skip
        """Adds a turn: what was asked with its prompt's text and ids, and the answer."""
        self.messages += [message, {"role": "assistant", "content": answer}]
        self._text = text + answer
        self._ids = [*ids, *answer_ids]
