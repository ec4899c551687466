"""Turns token ids into text as they arrive, and holds back text that may still change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# What a decoder writes for bytes that do not make a complete character yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How many tokens in a row without text are decoded again; longer runs are only special tokens.
_MAX_SILENT = 32


class Detokenizer:
    """Incremental decoding of one token stream.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=...) -> str`, e.g. a loader's
            `get_tokenizer()`.
        skip_special_tokens: leave special tokens such as end-of-sequence out of the text.

    The pieces that `put` and `flush` return, joined, equal the decoding of all ids at once. A
    character whose bytes are spread over several tokens appears when its last byte arrives.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        # ids[:_prefix_end] were returned; decoding starts at _prefix_begin so that the tokenizer
        # sees some context (SentencePiece drops the space before a first token).
        self._prefix_begin = 0
        self._prefix_end = 0

    def put(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that is now certain; may be empty."""
        self._ids.extend(ids)
        text = self._decode(self._prefix_begin, len(self._ids))
        if text.endswith(_REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Returns what was held back; call once at the end."""
        return self._emit(self._decode(self._prefix_begin, len(self._ids)))

    def _emit(self, text: str) -> str:
        known = self._decode(self._prefix_begin, self._prefix_end)
        if text == known:
            # Context needs tokens that have text: after only special tokens a space would be lost.
            if len(self._ids) - self._prefix_end >= _MAX_SILENT:
                del self._ids[self._prefix_end :]
            return ""
        self._prefix_begin = self._prefix_end
        self._prefix_end = len(self._ids)
        return text[len(known):]

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(
            self._ids[begin:end], skip_special_tokens=self._skip_special_tokens
        )
