"""bad_words: strings that must not appear in an output, as token sequences for bad_words_ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspark.text_queue import to_words


def take_bad_words(fields: dict[str, Any]) -> tuple[str, ...]:
    """Moves `bad_words` out of a generation config's fields.

    Raises:
        TypeError, ValueError: a value is wrong; the message names field and value.
    """
    words = to_words("bad_words", fields.pop("bad_words", None))
    for index, word in enumerate(words):
        if not word.strip():
            raise ValueError(f"bad_words[{index}] is {word!r}; it must hold more than white space")
    return words


def to_token_sequences(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """The token ids of each word, as it is tokenised at the start of a text and after a space.

    The same letters split into other tokens are not found: a model that may not use a word's usual
    tokens can still spell it.
    """
    sequences: list[list[int]] = []
    for word in words:
        for text in (word, " " + word):
            ids = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
