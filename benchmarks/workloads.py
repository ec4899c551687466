"""The requests of the benchmarks: token ids and output lengths, the same on every machine.

Greedy sampling and no end of sequence, so that every request gives exactly its number of tokens.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

WORKLOADS = ("single", "p1024", "b32", "mixed", "gap")
_SEED = 20250


@dataclass(frozen=True)
class Request:
    ids: list[int]
    num_output: int


@dataclass(frozen=True)
class Workload:
    """Requests that are all handed over at once, unless a measurement says otherwise."""

    name: str
    requests: list[Request] = field(default_factory=list)

    @property
    def num_output(self) -> int:
        return sum(request.num_output for request in self.requests)

    @property
    def num_prompt(self) -> int:
        return sum(len(request.ids) for request in self.requests)

    @property
    def max_length(self) -> int:
        return max(len(request.ids) + request.num_output for request in self.requests)


def _log_normal(
    rng: np.random.Generator, mean: float, sigma: float, bounds: tuple[int, int], count: int
) -> list[int]:
    """Lengths with this mean before they are clipped to the bounds."""
    draws = np.exp(rng.normal(np.log(mean) - sigma**2 / 2, sigma, count))
    return [int(length) for length in np.clip(np.rint(draws), *bounds)]


def make_workload(name: str, vocab_size: int, divisor: int = 1) -> Workload:
    """The workload `name`; `divisor` > 1 shortens prompts and outputs for a quick look.

    `single`, `p1024`, `b32` (32 requests) and `mixed` (32 of log-normal lengths) run as they are.
    `gap` is a stream that decodes, and a long prompt that arrives meanwhile; the stream keeps its
    length. `streams` are 64 streams of short prompts.
    """
    rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])

    def request(num_prompt: int, num_output: int) -> Request:
        prompt_tokens = max(1, num_prompt // divisor)
        ids = rng.integers(3, min(vocab_size, 8000), size=prompt_tokens)
        return Request([int(token) for token in ids], max(1, num_output // divisor))

    if name == "single":
        return Workload(name, [request(128, 128)])
    if name == "p1024":
        return Workload(name, [request(1024, 1)])
    if name == "b32":
        return Workload(name, [request(128, 128) for _ in range(32)])
    if name == "mixed":
        prompts = _log_normal(rng, 200, 0.8, (16, 800), 32)
        outputs = _log_normal(rng, 120, 0.8, (8, 400), 32)
        return Workload(name, [request(*lengths) for lengths in zip(prompts, outputs, strict=True)])
    if name == "gap":
        running = request(128, 1)
        return Workload(name, [Request(running.ids, 512), request(8192, 1)])
    if name == "streams":
        return Workload(name, [request(32, 256) for _ in range(64)])
    raise ValueError(f"workload is {name!r}; it must be one of {WORKLOADS} or 'streams'")
