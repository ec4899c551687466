"""The token ids of texts that templates made."""

from __future__ import annotations

from typing import Any

from allspark.unicode_text import check_unicode


def encode_exactly(tokenizer: Any, text: str) -> list[int]:
    """The ids of the text and nothing else; special tokens that it names are these tokens. Raises
    ValueError where it is no Unicode."""
    check_unicode(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_after_first_tokens(tokenizer: Any, text: str, sequence_start: bool) -> list[int]:
    """Where a sequence starts, after the tokens that the tokenizer puts before any text. They are
    not repeated if the text begins with them. Tokens that it puts after a text are left out."""
    ids = encode_exactly(tokenizer, text)
    if not sequence_start:
        return ids
    first = first_tokens(tokenizer)
    return ids if ids[: len(first)] == first else first + ids


def first_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before any text, BOS for example."""
    probe = "a"
    plain, whole = encode_exactly(tokenizer, probe), list(tokenizer.encode(probe))
    for length in range(len(whole) - len(plain) + 1):
        if whole[length : length + len(plain)] == plain:
            return whole[:length]
    return []
