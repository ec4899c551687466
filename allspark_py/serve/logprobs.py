"""Log-probabilities in the forms of the chat and completion routes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

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


def _row(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": logprob, "bytes": list(token_bytes(tokenizer, token))}


def chat_rows(
    tokenizer: Any,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[Sequence[tuple[int, float]]],
) -> list[dict[str, Any]]:
    """An entry of `logprobs.content` for each token. Infinite values become -9999, which JSON
    can hold."""
    rows = []
    for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=False)):
        top = tops[index] if index < len(tops) else ()
        row = _row(tokenizer, token, max(logprob, -9999.0))
        row["top_logprobs"] = [_row(tokenizer, id, max(value, -9999.0)) for id, value in top]
        rows.append(row)
    return rows


class CompletionRows:
    """The `logprobs` object of a completion, which grows with its tokens."""

    def __init__(self, tokenizer: Any, num_top: int):
        self._tokenizer = tokenizer
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
        for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=False)):
            text = token_text(self._tokenizer, token)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if logprob is None else max(logprob, -9999.0))
            top = tops[index] if index < len(tops) else ()
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
            found.setdefault(token_text(self._tokenizer, id), max(value, -9999.0))
        return found
