"""Turns token ids into text as they arrive, and holds back text that may still change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# What a decoder writes for bytes that do not make a complete character yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How many tokens in a row without text are decoded again; longer runs are only special tokens.
_MAX_SILENT = 32
# The methods of transformers' classes that do no more than the package 'tokenizers'.
_PLAIN_DECODERS = {
    "PreTrainedTokenizerBase.decode",
    "TokenizersBackend._decode",
    "PreTrainedTokenizerFast._decode",
}


def _plain_backend(tokenizer: Any) -> Any:
    """The tokenizer of the package 'tokenizers' whose decoding `tokenizer` returns unchanged; None
    if there is none."""
    methods = (getattr(type(tokenizer), name, None) for name in ("decode", "_decode"))
    names = {getattr(method, "__qualname__", "") for method in methods}
    if not names <= _PLAIN_DECODERS or tokenizer.clean_up_tokenization_spaces:
        return None
    return tokenizer.backend_tokenizer


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
        self._backend = _plain_backend(tokenizer)
        # Decodes token by token as this class does, a tenth of the time. None: this class does.
        self._stream = self._open_stream()

    def put(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that is now certain; may be empty."""
        if self._stream is None:
            return self._put(ids)
        step, backend, known = self._stream.step, self._backend, self._ids
        text = ""
        rest = iter(ids)
        for token in rest:
            known.append(token)
            try:
                piece = step(backend, token)
            except Exception:  # the text no longer begins with the text before
                self._stream = None
                return text + self._put(rest)
            if piece is not None:
                self._prefix_begin, self._prefix_end = self._prefix_end, len(known)
                text += piece
            elif len(known) - self._prefix_end >= _MAX_SILENT:
                self._put(())
                if len(known) == self._prefix_end:  # it dropped the tokens without text
                    self._stream = self._open_stream()
                    step = self._stream.step
        return text

    def _open_stream(self) -> Any:
        if self._backend is None:
            return None
        from tokenizers.decoders import DecodeStream

        return DecodeStream(
            ids=self._ids[self._prefix_begin :], skip_special_tokens=self._skip_special_tokens
        )

    def _put(self, ids: Iterable[int]) -> str:
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
