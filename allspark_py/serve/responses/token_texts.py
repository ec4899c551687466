"""TokenTexts: which part of an output's text is whose token's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allspark.detokenizer import Detokenizer


@dataclass(frozen=True)
class TokenText:
    """A token's text. A token without text is special, or the beginning of a character."""

    text: str
    row: dict[str, Any] | None  # its log-probability; None: an earlier token's row is the text's
    is_special: bool


class TokenTexts:
    """Cuts an output's text at its tokens.

    The text that a queue gives may be behind its tokens, since what may become a stop string is
    held back; a token is given once all of its text is there.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool):
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._special = frozenset(tokenizer.all_special_ids)
        self._text = ""  # not yet given
        self._waiting: deque[tuple[int, dict[str, Any], bool]] = deque()  # with the text's length

    def put(
        self, text: str, ids: Sequence[int], rows: Sequence[dict[str, Any]]
    ) -> list[TokenText]:
        """Adds text and tokens; returns the tokens whose text is there."""
        self._text += text
        for token, row in zip(ids, rows, strict=True):
            length = len(self._detokenizer.put([token]))
            self._waiting.append((length, row, token in self._special))
        found = []
        begin = 0
        while self._waiting and begin + self._waiting[0][0] <= len(self._text):
            length, row, is_special = self._waiting.popleft()
            found.append(TokenText(self._text[begin : begin + length], row, is_special))
            begin += length
        self._text = self._text[begin:]
        return found

    def flush(self) -> list[TokenText]:
        """The output has ended: the rest of the text is the next token's."""
        if not self._text:
            return []
        row = self._waiting[0][1] if self._waiting else None
        return [TokenText(self._text, row, is_special=False)]
