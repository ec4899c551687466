"""ChatTemplate: what every chat template does, wherever its text comes from.

A template makes one text of a conversation, and says which token ids that text has. It may be used
by several threads at once, unless its class says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Base of BaseChatTemplate, whose markers are fields, and of TokenizerTemplate."""

    name: str = ""  # what it is called in messages
    capability: str = "chat"
    stop_words: list[str] | None = None  # strings that end an answer, beside the end tokens

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """The text of one question, ending where the answer begins. `sequence_start` is False where
        it follows an answer in the same sequence."""
        raise NotImplementedError

    def messages2prompt(
        self, messages: str | Messages, sequence_start: bool = True, **kwargs: Any
    ) -> str:
        """The text of a conversation; a str is one question. It ends where the answer begins, or,
        if an assistant's message is the last one, within that message, which the model continues.
        """
        raise NotImplementedError

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The text of a whole conversation, as a server needs it. `continue_final_message` leaves
        the last message, an assistant's, open; then `add_generation_prompt` has no effect.

        Raises:
            ValueError, TypeError: something of the messages or tools cannot be rendered. The text
            names the place, as in "messages[2].content".
        """
        raise NotImplementedError

    def encode(self, tokenizer: Any, text: str, sequence_start: bool = True) -> list[int]:
        """The token ids of a text that this template made."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What its texts depend on, by name; for digests and comparisons."""
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        shown.pop("tokenizer", None)
        return shown

    @classmethod
    def match(cls, model_path: str) -> str | None:
        """The name of the template for a model, by its path or name; None if it is not known."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"
