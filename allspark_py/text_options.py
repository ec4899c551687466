"""TextOptions: what a generation config says about the output's text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from allspark._allspark import WordMatcher
from allspark.error_text import shown

# Limits of stop_words and of bad_words: entries, and characters in total.
MAX_WORDS = 100_000
MAX_WORD_CHARACTERS = 1_000_000


def to_words(name: str, value: Any) -> tuple[str, ...]:
    """A field that is None, a str or a list of strings. Raises TypeError for anything else, and
    ValueError for more than a request may have."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple, type(None))):
        raise TypeError(f"{name} is {shown(value)}; it must be a list of str")
    for index, word in enumerate(value or ()):
        if not isinstance(word, str):
            raise TypeError(f"{name}[{index}] is {shown(word)}; it must be a str")
    words: tuple[str, ...] = tuple(value or ())
    if len(words) > MAX_WORDS:
        raise ValueError(f"{name} has {len(words)} entries; the bound is {MAX_WORDS}")
    if (size := sum(map(len, words))) > MAX_WORD_CHARACTERS:
        raise ValueError(f"{name} has {size} characters; the bound is {MAX_WORD_CHARACTERS}")
    return words


@dataclass(frozen=True)
class TextOptions:
    """The fields of a generation config that are about text; the engine itself sees only ids."""

    stop_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def take(cls, fields: dict[str, Any]) -> TextOptions | None:
        """Moves its fields out of `fields`; returns None if there are none.

        Raises:
            TypeError, ValueError: a value is wrong; the message names field, value and bound.
        """
        taken = {name: fields.pop(name) for name in TEXT_FIELDS if name in fields}
        if not taken:
            return None
        for name in ("include_stop_str_in_output", "skip_special_tokens"):
            value = taken.get(name, False)
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {shown(value)}; it must be a bool")
        words = to_words("stop_words", taken.get("stop_words"))
        for index, word in enumerate(words):
            if not word:
                raise ValueError(f"stop_words[{index}] is empty; it must hold a character at least")
        return cls(**{**taken, "stop_words": words})

    @cached_property
    def matcher(self) -> WordMatcher:
        """Finds the stop words; one for all sequences of a request."""
        return WordMatcher(self.stop_words)


TEXT_FIELDS = tuple(TextOptions.__dataclass_fields__)
