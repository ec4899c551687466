"""bad_words: strings that must not appear in an output, as token sequences for bad_words_ids."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from allspark import exit_gate
from allspark.text_options import to_words

# Texts per call of the tokenizer. A call tokenises without the GIL and then builds its results with
# it, so other threads wait for the results of one batch at most.
_BATCH = 256
# Long lists take turns. Between two batches they leave the cores to the engine, this many times as
# long as a batch took. So they slow down other requests by little.
_PAUSE = 3.0
_turn = threading.Lock()


def _renew_lock() -> None:
    """For a fork: the thread that holds the lock may not be in it."""
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


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
    if len(texts) <= _BATCH:
        with exit_gate.passing():
            encoded = _encode(tokenizer, texts)
    else:
        # The gate comes first: a thread that stays there for ever holds nobody up.
        with exit_gate.passing(), _turn:
            encoded = [ids for batch in _batches(tokenizer, texts) for ids in batch]
    return [list(ids) for ids in dict.fromkeys(tuple(map(int, ids)) for ids in encoded) if ids]


def _batches(tokenizer: Any, texts: list[str]) -> Iterator[Sequence[Sequence[int]]]:
    for begin in range(0, len(texts), _BATCH):
        started = time.perf_counter()
        yield _encode(tokenizer, texts[begin : begin + _BATCH])
        if begin + _BATCH < len(texts):
            time.sleep(_PAUSE * (time.perf_counter() - started))


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
