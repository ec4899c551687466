"""Tokenizer: LMDeploy's calls over a transformers tokenizer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allspark.detokenizer import Detokenizer
from allspark.error_text import wrong_type
from allspark.pipeline.model_source import open_tokenizer

_log = logging.getLogger("allspark.lmdeploy_compat")

# A word in more tokens than this stands only for those that are the word itself.
_MAX_INDEXES = 5
# Tokens before a stream that its first token is decoded with.
_CONTEXT = 6


@dataclass
class DetokenizeState:
    """How far detokenize_incrementally is. A new one begins at `ids_offset` of the ids."""

    ids_offset: int = 0
    prev_tokens: list[str] | None = None
    prefix_offset: int = 0
    read_offset: int = 0
    _detokenizer: Detokenizer | None = field(default=None, repr=False, compare=False)

    def as_tuple(self) -> tuple[int, list[str] | None, int, int]:
        return self.ids_offset, self.prev_tokens, self.prefix_offset, self.read_offset


class Tokenizer:
    """The tokenizer of a model. What is not here is looked up in the transformers tokenizer."""

    def __init__(self, model_path: str, trust_remote_code: bool = False):
        if not isinstance(model_path, str):
            raise wrong_type("model_path", model_path, "a str")
        self._tokenizer = open_tokenizer(model_path, trust_remote_code)

    @classmethod
    def of(cls, tokenizer: Any) -> Tokenizer:
        """Over a transformers tokenizer that is there already."""
        new = cls.__new__(cls)
        new._tokenizer = tokenizer
        return new

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """Tokens without those that were added."""
        size: int = self._tokenizer.vocab_size
        return size

    @property
    def bos_token_id(self) -> int | None:
        token: int | None = self._tokenizer.bos_token_id
        return token

    @property
    def eos_token_id(self) -> int | None:
        token: int | None = self._tokenizer.eos_token_id
        return token

    @functools.cached_property
    def prefix_space_tokens(self) -> set[int]:
        """Tokens that begin with SentencePiece's mark of a space."""
        names = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        return {index for index, name in enumerate(names) if name and name.startswith("\u2581")}

    def encode(
        self, s: str, add_bos: bool = True, add_special_tokens: bool = True, **kwargs: Any
    ) -> list[int]:
        """The ids of a text. With `add_bos` one BOS stands in front, if the tokenizer has it there;
        without, none does."""
        ids: list[int] = self._tokenizer.encode(
            s, add_special_tokens=bool(add_special_tokens), **kwargs
        )
        bos, start = self.bos_token_id, 0
        if bos is None:
            return ids
        while start < len(ids) and ids[start] == bos:
            start += 1
        return ids[start - 1 :] if start and add_bos else ids[start:]

    def decode(
        self, t: Sequence[int], offset: int | None = None, skip_special_tokens: bool = True
    ) -> str:
        """The text of the ids from `offset` on. A space in front of the first one is kept, where
        something comes before it."""
        ids = [int(token) for token in t][offset:]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=bool(skip_special_tokens))
        if offset and ids and not text.startswith(" ") and ids[0] in self.prefix_space_tokens:
            return " " + text
        return text

    def detokenize_incrementally(
        self,
        all_input_ids: Sequence[int],
        state: DetokenizeState,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> tuple[str, DetokenizeState]:
        """The text that is new since the call before, and the state for the next one. A character
        that is not complete yet is held back.

        Args:
            all_input_ids: all ids so far, those of earlier calls too.
            spaces_between_special_tokens: no effect: fast tokenizers add none.
        """
        ids = [int(token) for token in all_input_ids]
        begin = state.ids_offset
        detokenizer = state._detokenizer
        if detokenizer is None:
            detokenizer = state._detokenizer = Detokenizer(
                self._tokenizer, bool(skip_special_tokens)
            )
            detokenizer.put(ids[max(0, begin - _CONTEXT) : begin])
        text = detokenizer.put(ids[begin:])
        state.ids_offset = len(ids)
        state.prefix_offset, state.read_offset = begin, len(ids)
        return text, state

    def indexes_containing_token(self, token: str) -> list[int]:
        """The ids of all tokens whose text contains a word, which must itself be one token; if they
        are more than five, of those alone that are the word."""
        if len(self.encode(token, add_bos=False)) > 1:
            _log.warning(
                "%r is more than one token, so no token stands for it; stop_words and bad_words of "
                "a GenerationConfig take such words",
                token,
            )
            return []
        found = [index for index, text in enumerate(self._texts) if token in text]
        if len(found) > _MAX_INDEXES:
            found = [index for index in found if self._texts[index] == token][:_MAX_INDEXES]
        return found

    @functools.cached_property
    def _texts(self) -> list[str]:
        """What each token is alone, with SentencePiece's spaces in front."""
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
        spaced = self.prefix_space_tokens
        texts = [decode([index]) for index in range(len(self._tokenizer))]
        return [
            " " + text if index in spaced and not text.startswith(" ") else text
            for index, text in enumerate(texts)
        ]

    def __call__(self, s: str | Sequence[str]) -> Any:
        """What transformers gives for texts, without special tokens."""
        return self._tokenizer(s, add_special_tokens=False)
