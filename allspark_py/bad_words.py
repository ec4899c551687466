"""bad_words: strings that must not appear in an output, as token sequences for bad_words_ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspark.text_queue import to_words

# Texts per call of the tokenizer, which releases the GIL for a call, and whose results are large.
_BATCH = 1024


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
    texts = [text for word in dict.fromkeys(words) for text in (word, " " + word)]
    sequences: dict[tuple[int, ...], None] = {}
    for begin in range(0, len(texts), _BATCH):
        for ids in _encode(tokenizer, texts[begin : begin + _BATCH]):
            if ids:
                sequences[tuple(map(int, ids))] = None
    return [list(ids) for ids in sequences]


def _encode(tokenizer: Any, texts: list[str]) -> Sequence[Sequence[int]]:
    if not callable(tokenizer):  # no tokenizer of transformers
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return encoded["input_ids"]
