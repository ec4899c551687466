"""Log-probabilities in the forms of the chat and completion routes."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

Form = TypeVar("Form")

# Those that a stream makes before others have their turn: they take two milliseconds.
MOST_ROWS = 256

# What a decoder writes for a part of a character.
_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def token_text(tokenizer: Any, token: int) -> str:
    """The text of one token, special ones included."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    piece = str(tokenizer.convert_ids_to_tokens(token))
    # Decoders of SentencePiece's vocabularies leave out the first space of a text.
    return piece.replace(_SPACE, " ") if piece.startswith(_SPACE) else text


@functools.cache
def _byte_letters() -> Mapping[str, int]:
    """The byte for which each letter stands in a vocabulary of bytes (GPT-2's `bytes_to_unicode`):
    printable characters of Latin-1 for themselves, and those from 256 on for the others in turn."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes of one token, which may be a part of a character."""
    text = token_text(tokenizer, token)
    if _REPLACEMENT not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token))
    byte = _BYTE_PIECE.match(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    letters = _byte_letters()
    if piece and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return text.encode()


class _Tokens(dict[int, tuple[str, list[int]]]):
    """Texts and bytes by id, for as many tokens as there are. Each is made once: that takes twenty
    times as long as the rest of a row, which may show twenty of them."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = weakref.ref(tokenizer)

    def __missing__(self, token: int) -> tuple[str, list[int]]:
        tokenizer = self._tokenizer()
        made = token_text(tokenizer, token), list(token_bytes(tokenizer, token))
        self[token] = made
        return made


_tokens: weakref.WeakKeyDictionary[Any, _Tokens] = weakref.WeakKeyDictionary()


def _tokens_of(tokenizer: Any) -> _Tokens:
    known = _tokens.get(tokenizer)
    if known is None:
        known = _tokens[tokenizer] = _Tokens(tokenizer)
    return known


def chat_rows(
    tokenizer: Any,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[Sequence[tuple[int, float]]],
) -> list[dict[str, Any]]:
    """An entry of `logprobs.content` for each token. Infinite values become -9999, which JSON
    can hold."""
    tokens = _tokens_of(tokenizer)

    def row(token: int, logprob: float) -> dict[str, Any]:
        text, data = tokens[token]
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}

    rows = []
    for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=False)):
        top = tops[index] if index < len(tops) else ()
        rows.append({**row(token, logprob), "top_logprobs": [row(*each) for each in top]})
    return rows


class Rows(Generic[Form]):
    """Log-probabilities of an output that wait to be shown.

    Args:
        make: the form that a route has for ids, their log-probabilities, and the likeliest tokens.
    """

    def __init__(self, make: Callable[[Sequence[int], Sequence[Any], Sequence[Any]], Form]):
        self._make = make
        self._waiting: list[tuple[int, float | None, Sequence[tuple[int, float]]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]]],
    ) -> None:
        """Adds tokens; the last of them may have no likeliest ones."""
        tops = [*tops, *[()] * (len(ids) - len(tops))]
        self._waiting += zip(ids, logprobs, tops, strict=False)

    def take(self, most: int | None = None) -> Form:
        """What waits longest: `most` of it, or all."""
        taken = self._waiting[:most]
        del self._waiting[:most]
        ids, logprobs, tops = zip(*taken, strict=True) if taken else ((), (), ())
        return self._make(ids, logprobs, tops)


class CompletionRows:
    """The `logprobs` object of a completion, which grows with its tokens."""

    def __init__(self, tokenizer: Any, num_top: int):
        self._tokens = _tokens_of(tokenizer)
        self._num_top = num_top
        self._offset = 0

    def rows(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]]],
    ) -> dict[str, Any]:
        """For the next tokens. A logprob of None is the first token's of a prompt."""
        found: dict[str, Any] = {
            "text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": [],
        }  # fmt: skip
        for token, logprob, top in zip(ids, logprobs, tops, strict=True):
            text, _ = self._tokens[token]
            found["text_offset"].append(self._offset)
            self._offset += len(text)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if logprob is None else max(logprob, -9999.0))
            found["top_logprobs"].append(self._top(token, logprob, top))
        return found

    def _top(
        self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]
    ) -> dict[str, float] | None:
        if logprob is None or not self._num_top:
            return None
        # Several tokens may have one text, of which the likeliest counts.
        found: dict[str, float] = {}
        for id, value in [*top, (token, logprob)]:
            found.setdefault(self._tokens[id][0], max(value, -9999.0))
        return found
