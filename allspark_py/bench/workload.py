"""The requests of a measurement, and when they are due. The same seed gives the same ones on every
machine and with every version of NumPy: RandomState is frozen."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# A text, token ids, or a conversation as OpenAI's messages.
Prompt = str | list[int] | list[dict[str, Any]]
# Common words, each a single token in most vocabularies.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member "
    "law car city"
).split()


@dataclass(frozen=True)
class Request:
    """One request."""

    prompt: Prompt
    num_output: int  # most output tokens


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Reads "N" or "LOW:HIGH". Raises ValueError."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text!r} must be N or LOW:HIGH, with 1 <= LOW <= HIGH")
        return lengths

    def draw(self, rng: np.random.RandomState, count: int) -> list[int]:
        """This many of them."""
        return [int(each) for each in rng.randint(self.low, self.high + 1, size=count)]

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def generator(seed: int, purpose: str) -> np.random.RandomState:
    """Random numbers for one purpose, apart from those for others."""
    return np.random.RandomState(zlib.crc32(f"{seed} {purpose}".encode()))


def random_requests(
    count: int,
    prompts: Lengths,
    outputs: Lengths,
    seed: int,
    vocabulary: Sequence[int] | None = None,
    purpose: str = "requests",
) -> list[Request]:
    """Requests with random prompts.

    Args:
        vocabulary: the ids of which prompts are made. None: prompts are texts of so many words, of
            which a server's tokenizer makes about as many tokens.
        purpose: other purposes give other prompts.
    """
    rng = generator(seed, purpose)
    sizes = zip(prompts.draw(rng, count), outputs.draw(rng, count), strict=True)
    return [Request(_random_prompt(rng, size, vocabulary), output) for size, output in sizes]


def _random_prompt(
    rng: np.random.RandomState, size: int, vocabulary: Sequence[int] | None
) -> Prompt:
    if vocabulary is None:
        return " ".join(_WORDS[each] for each in rng.randint(0, len(_WORDS), size=size))
    return [int(vocabulary[each]) for each in rng.randint(0, len(vocabulary), size=size)]


def vocabulary_of(tokenizer: Any) -> list[int]:
    """The ids of a tokenizer that are no special or added tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return [token for token in range(len(tokenizer)) if token not in special]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each request is due, in seconds from the first, which is due at 0: exponential gaps, of
    1 / rate on average."""
    gaps = generator(seed, "arrivals").exponential(1 / rate, size=max(0, count - 1))
    return [0.0, *(float(each) for each in np.cumsum(gaps))][:count]
