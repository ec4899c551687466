"""Nearly valid inputs: a seed with a few changes, reproducible by the random generator."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Mutate = Callable[[random.Random, Sequence[bytes]], bytes]

# Numbers at the limits of fields of 1, 2, 4 and 8 bytes.
_NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 127, 128, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 62,
            (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 8, 64, 127, 4097, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
    2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e-45, 1e38, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"), "", "a", "0", ".", "\ud800", "\0", "{i}{e}",
    "x" * 999, [], [[]], {}, {"": 0}, [1, 2], [0] * 65, [None], ["a", "a"],
)  # fmt: skip
# Texts that are hard for JSON readers: endless numbers and nesting, duplicate keys.
_JSON_TEXTS = (
    b"9" * 5000, b"-" + b"9" * 5000, b"1e999999", b"[" * 5000, b'{"a":' * 2000, b"NaN",
    b"-Infinity", b'"\\ud800"', b"\xff", b"\xef\xbb\xbf", b"\0", b'{"a": 1, "a": 2}', b"",
)  # fmt: skip


def mutated_bytes(
    rng: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes] = (), most: int = 6
) -> bytes:
    """One of the seeds with up to ``most`` changes; ``tokens``: pieces that inputs consist of."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, most)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(9 if tokens else 8)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and place < len(data):
            data[place] = rng.randrange(256)
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice(_NUMBERS) & ((1 << 8 * size) - 1)
            data[place : place + size] = number.to_bytes(size, "little")
        elif kind == 3:
            del data[place : place + rng.choice((1, 1, 2, 4, 8, 64))]
        elif kind == 4:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 1, 4, 8))))
        elif kind == 5:  # a copy of a piece, elsewhere
            begin = rng.randrange(len(data) + 1)
            data[place:place] = data[begin : begin + rng.choice((1, 4, 16, 64))]
        elif kind == 6:  # a piece of another seed
            other = rng.choice(seeds)
            begin = rng.randrange(len(other) + 1)
            size = rng.choice((1, 4, 16, 64, 256))
            data[place : place + size] = other[begin : begin + size]
        elif kind == 7 and rng.random() < 0.2:
            del data[place:]
        elif kind == 8:
            data[place : place + rng.choice((0, 0, 1, 2))] = rng.choice(tokens)
    return bytes(data)


def mutated_json(rng: random.Random, seeds: Sequence[bytes], most: int = 4) -> bytes:
    """One of the JSON seeds with some values, keys or bytes changed, as text."""
    if rng.random() < 0.1:
        return mutated_bytes(rng, seeds, _JSON_TEXTS, most)
    value = json.loads(rng.choice(seeds))
    for _ in range(rng.randint(1, most)):
        value = _change_somewhere(rng, value, seeds)
    return json.dumps(value).encode()


def _containers(value: Any, found: list[Any]) -> None:
    if isinstance(value, (dict, list)):
        found.append(value)
        for child in value.values() if isinstance(value, dict) else value:
            _containers(child, found)


def _change_somewhere(rng: random.Random, value: Any, seeds: Sequence[bytes]) -> Any:
    containers: list[Any] = []
    _containers(value, containers)
    if not containers:
        return copy.deepcopy(rng.choice(_VALUES))
    place = rng.choice(containers)
    if not place:
        if isinstance(place, list):
            place.append(copy.deepcopy(rng.choice(_VALUES)))
        else:
            place["a"] = copy.deepcopy(rng.choice(_VALUES))
        return value
    key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    kind = rng.randrange(8)
    if kind <= 2:
        place[key] = copy.deepcopy(rng.choice(_VALUES))
    elif kind == 3 and isinstance(place[key], int) and not isinstance(place[key], bool):
        place[key] = rng.choice((place[key] + 1, place[key] - 1, -place[key], place[key] * 1000))
    elif kind == 4:
        del place[key]
    elif kind == 5:  # a value from another place
        other = rng.choice(containers)
        if other:
            chosen = rng.choice(list(other.values()) if isinstance(other, dict) else other)
            place[key] = copy.deepcopy(chosen)
    elif kind == 6:  # a field of another seed
        other = json.loads(rng.choice(seeds))
        if isinstance(other, dict) and isinstance(place, dict) and other:
            name = rng.choice(list(other))
            place[name] = other[name]
    elif isinstance(place, dict):
        place[rng.choice(("", "a", str(key) + "x", "\ud800"))] = place.pop(key)
    else:
        place.insert(key, copy.deepcopy(place[key]))
    return value
