"""Turns token ids into text as they arrive, and holds back text that may still change."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from allspark._allspark import ByteLevelText, ByteLevelVocabulary

# What a decoder writes for bytes that do not make a complete character yet.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# How many tokens in a row without certain text are decoded again at each token. Longer runs are
# only special tokens, or bytes of no character.
_MAX_SILENT = 32
# Where a text ends so, there is more than the beginning of one character, which has three bytes at
# most.
_INVALID = 4 * _REPLACEMENT
# How many tokens of a vocabulary are decoded, to see that it is done as expected.
_SAMPLE = 4096
# The methods of transformers' classes that do no more than the package 'tokenizers'.
_PLAIN_DECODERS = {
    "PreTrainedTokenizerBase.decode",
    "TokenizersBackend._decode",
    "PreTrainedTokenizerFast._decode",
}


def _plain_backend(tokenizer: Any) -> Any:
    """The tokenizer of the package 'tokenizers' whose decoding `tokenizer` returns; None if it has
    none. It does not clean up spaces, as `tokenizer` may: that would change earlier text."""
    methods = (getattr(type(tokenizer), name, None) for name in ("decode", "_decode"))
    names = {getattr(method, "__qualname__", "") for method in methods}
    if not names <= _PLAIN_DECODERS:
        return None
    return tokenizer.backend_tokenizer


def open_decoding(tokenizer: Any, skip_special_tokens: bool = True) -> Decoding:
    """The fastest that decodes as Detokenizer does: a native class for vocabularies of bytes, for
    others Detokenizer itself."""
    vocabulary = _byte_level(tokenizer)
    if vocabulary is None:
        return Detokenizer(tokenizer, skip_special_tokens)
    return ByteLevelText(vocabulary, skip_special_tokens)


class Decoding(Protocol):
    """The text of one sequence of tokens."""

    def put(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class _Known(NamedTuple):
    # The ids that the next added token may have, with the tokens that have them already.
    next_ids: dict[int, str | None]
    vocabulary: ByteLevelVocabulary | None


_vocabularies: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def _byte_level(tokenizer: Any) -> ByteLevelVocabulary | None:
    """The tokenizer's vocabulary, where decoding means to join the bytes of its tokens; made once
    for a tokenizer."""
    backend = _plain_backend(tokenizer)
    if backend is None:
        return None
    known = _vocabularies.get(tokenizer)
    # Before tokenizers 0.23, to ask for the size of a vocabulary copies it: too slow for a request.
    if known is None or any(backend.id_to_token(id) != at for id, at in known.next_ids.items()):
        known = _Known(_next_ids(backend), _read_byte_level(backend))
        _vocabularies[tokenizer] = known
    return known.vocabulary


def _next_ids(backend: Any) -> dict[int, str | None]:
    """The ids that `tokenizers` may give the next added token: the one after the last added token,
    or the number of the model's own tokens, even where one of these has that id."""
    last_added = max(backend.get_added_tokens_decoder(), default=-1)
    ids = {1 + last_added, backend.get_vocab_size(with_added_tokens=False)}
    return {id: backend.id_to_token(id) for id in ids}


def _read_byte_level(backend: Any) -> ByteLevelVocabulary | None:
    from tokenizers.decoders import ByteLevel

    if not isinstance(backend.decoder, ByteLevel):
        return None
    token_of = {id: token for token, id in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    tokens = [token_of.get(id) for id in range(1 + max(token_of, default=-1))]
    special = [id for id, token in added.items() if token.special]
    vocabulary = ByteLevelVocabulary(tokens, special)
    # Another release of the package may decode in another way.
    sample = [*added, *token_of][:: 1 + len(tokens) // _SAMPLE] + [*added]
    for skips in (False, True):
        text = ByteLevelText(vocabulary, skips)
        decoded = text.put(sample) + text.flush()
        if decoded != backend.decode(sample, skip_special_tokens=skips):
            return None
    return vocabulary


class Detokenizer:
    """Incremental decoding of one token stream.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=...) -> str`, e.g. a loader's
            `get_tokenizer()`.
        skip_special_tokens: leave special tokens such as end-of-sequence out of the text.

    The pieces that `put` and `flush` return, joined, equal the decoding of all ids at once; with
    transformers' fast tokenizers, that without clean_up_tokenization_spaces. A character whose
    bytes are spread over several tokens appears when its last byte arrives.
    """

    __slots__ = (
        "_backend", "_ids", "_is_invalid", "_next_look", "_prefix_begin", "_prefix_end",
        "_skip_special_tokens", "_stream", "_tokenizer",
    )  # fmt: skip

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        # ids[:_prefix_end] were returned; decoding starts at _prefix_begin so that the tokenizer
        # sees some context (SentencePiece drops the space before a first token).
        self._prefix_begin = 0
        self._prefix_end = 0
        # In a long run without certain text: the length at which it is decoded again, whatever the
        # next tokens are, and whether the last look found bytes of no character.
        self._next_look = 0
        self._is_invalid = False
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
                text += self._put(())
                if len(known) > self._prefix_end:  # a stream would decode all again at each token
                    self._stream = None
                    return text + self._put(rest)
                # It dropped the tokens without text.
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
        begin = len(self._ids)
        self._ids.extend(ids)
        length = len(self._ids) - self._prefix_end
        if length < self._next_look and self._changes_nothing(begin):
            return ""
        text = self._decode(self._prefix_begin, len(self._ids))
        if text.endswith(_REPLACEMENT):
            if begin - self._prefix_end >= _MAX_SILENT - 1:  # with one id more, not by many at once
                # So what a run costs stays in proportion to its length.
                self._next_look = 2 * length
                self._is_invalid = text.endswith(_INVALID)
            return ""
        self._next_look = 0
        return self._emit(text)

    def _changes_nothing(self, begin: int) -> bool:
        """Whether the ids from `begin` on, alone, have no text that could make the text certain. At
        worst it comes with the next token that has some."""
        text = self._decode(begin, len(self._ids))
        return not text or (self._is_invalid and text.endswith(_REPLACEMENT))

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
        # The package's own method takes a third of the time.
        decoder = self._tokenizer if self._backend is None else self._backend
        return decoder.decode(self._ids[begin:end], skip_special_tokens=self._skip_special_tokens)
