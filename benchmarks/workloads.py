"""The requests of the benchmarks: token ids and output lengths, the same on every machine.

Sampling is greedy and without EOS, so that every request generates exactly its number of tokens.
"""

from __future__ import annotations

import csv
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Every engine serves these; the reports use this order.
WORKLOADS = (
    "single", "p1024", "b8", "b32", "mixed", "azure", "shared", "shared_late", "long", "long16",
)  # fmt: skip
_SEED = 1234
# Ids before it may be special tokens.
FIRST_ID = 3
# Output tokens of the requests that are served before timing starts. Their prompts repeat one id,
# which differs between them.
_WARM_UP = 8
# Prompt tokens of those that only fill the batch: so few that all of them decode together.
_FILLER = 8
_TURN_STEP = 131  # between the ids of a turn and of the next
_AZURE_REQUESTS = 64
# The full trace would take a small machine minutes per engine.
_AZURE_DIVISOR = 4


class MissingData(RuntimeError):
    """A workload whose lengths come from a file that does not exist."""


@dataclass(frozen=True)
class Request:
    ids: list[int]
    num_output: int


@dataclass(frozen=True)
class Workload:
    """Waves of requests: those of a wave are started at once, when the wave before has ended."""

    name: str
    waves: list[list[Request]]

    @property
    def requests(self) -> list[Request]:
        return [request for wave in self.waves for request in wave]

    @property
    def num_output(self) -> int:
        return sum(request.num_output for request in self.requests)

    @property
    def num_prompt(self) -> int:
        return sum(len(request.ids) for request in self.requests)

    @property
    def max_length(self) -> int:
        return max(len(request.ids) + request.num_output for request in self.requests)

    @property
    def max_batch(self) -> int:
        return max(len(wave) for wave in self.waves)

    def turn(self, number: int, num_ids: int) -> list[list[dict[str, Any]]]:
        """The waves of a repeated turn, for a worker: with other ids in each, of `num_ids` beyond
        the special ones, so that the prefix cache holds nothing of them."""

        def shifted(token: int) -> int:
            return FIRST_ID + (token + number * _TURN_STEP) % num_ids

        return [
            [{"ids": [*map(shifted, each.ids)], "num_output": each.num_output} for each in wave]
            for wave in self.waves
        ]

    def warm_up(self) -> list[Request]:
        """A request of every size class: prompts within a power of two are one class. Its prompt is
        as long as the longest of the class, with ids that no request has, so that the prefix cache
        holds nothing of the workload. Its output is a few tokens. Then short ones, until there are
        as many as in the largest wave: engines have something to prepare for a batch, too."""
        longest: dict[int, Request] = {}
        for request in self.requests:
            size = len(request.ids).bit_length()
            if size not in longest or len(request.ids) > len(longest[size].ids):
                longest[size] = request
        sizes = [
            Request([FIRST_ID + size] * len(request.ids), min(request.num_output, _WARM_UP))
            for size, request in sorted(longest.items())
        ]
        length = min(_FILLER, *(len(request.ids) for request in self.requests))
        num_output = min(_WARM_UP, self.max_length - length)
        first_id = FIRST_ID + max(longest) + 1
        fillers = range(self.max_batch - len(sizes))
        return sizes + [Request([first_id + index] * length, num_output) for index in fillers]


def log_normal(
    rng: np.random.Generator, mean: float, sigma: float, bounds: tuple[int, int], count: int
) -> list[int]:
    """Lengths with this mean, before they are clipped to the bounds."""
    draws = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [int(length) for length in np.clip(draws.round(), *bounds)]


def mixed_lengths() -> list[tuple[int, int]]:
    """Prompt and output lengths of `mixed`: 3,373 output tokens in total, a trace with which other
    engines have been measured. Its random generator drew the prompts of single, p1024, b8 and b32
    first."""
    rng = np.random.default_rng(_SEED)
    for num_prompt in [128, 1024] + [128] * (8 + 32):
        rng.integers(300, 7900, size=num_prompt)
    prompts = log_normal(rng, 200, 0.8, (16, 800), 32)
    outputs = log_normal(rng, 120, 0.8, (8, 400), 32)
    return list(zip(prompts, outputs, strict=True))


def shared_data() -> Path:
    """Where real checkpoints, tokenizers, texts and traces are, if they are here."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("ALLSPARK_SHARED_DATA", default))


def azure_lengths() -> list[tuple[int, int]]:
    """Lengths of the first requests of the Azure conversation trace of 2023, shortened."""
    path = shared_data() / "traces" / "AzureLLMInferenceTrace_conv.csv"
    if not path.is_file():
        raise MissingData(f"there is no {path} (set ALLSPARK_SHARED_DATA)")
    with open(path, newline="") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(_AZURE_REQUESTS), strict=False)]
    columns = ("ContextTokens", "GeneratedTokens")
    return [tuple(-(-int(row[key]) // _AZURE_DIVISOR) for key in columns) for row in rows]  # type: ignore[misc]


def make_workload(name: str, vocab_size: int, divisor: int = 1) -> Workload:
    """The workload `name`; `divisor` > 1 shortens prompts and outputs for a quick test.

    There are two more than WORKLOADS, for this engine alone: `gap`, a stream that decodes while a
    long prompt arrives (the stream keeps its length), and `streams`, 64 short prompts.
    """
    rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])

    def ids(count: int) -> list[int]:
        draws = rng.integers(3, min(vocab_size, 7900), size=max(1, count // divisor))
        return [int(token) for token in draws]

    def request(num_prompt: int, num_output: int, prefix: list[int] | None = None) -> Request:
        return Request((prefix or []) + ids(num_prompt), max(1, num_output // divisor))

    if name == "single":
        return Workload(name, [[request(128, 128)]])
    if name == "p1024":
        return Workload(name, [[request(1024, 1)]])
    if name in ("b8", "b32"):
        return Workload(name, [[request(128, 128) for _ in range(int(name[1:]))]])
    if name in ("mixed", "azure"):
        lengths = mixed_lengths() if name == "mixed" else azure_lengths()
        return Workload(name, [[request(*pair) for pair in lengths]])
    if name in ("shared", "shared_late"):
        prefix = ids(512)
        requests = [request(32, 32, prefix) for _ in range(16)]
        return Workload(name, [requests] if name == "shared" else [requests[:1], requests[1:]])
    if name == "long":
        return Workload(name, [[request(8192, 64)]])
    if name == "long16":
        return Workload(name, [[request(2048 - 64, 64) for _ in range(16)]])
    if name == "gap":
        return Workload(name, [[Request(ids(128), 512)], [request(8192, 1)]])
    if name == "streams":
        return Workload(name, [[request(32, 256) for _ in range(64)]])
    raise ValueError(f"workload is {name!r}; it must be one of {WORKLOADS}, 'gap' or 'streams'")
