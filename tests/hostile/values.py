"""Values that break programs, and texts with the same purpose."""

from __future__ import annotations

from random import Random
from typing import Any

NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 255, 65_536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63,
    2**64, 10**18, 10**30, 10**400, -(2**31), -(2**63), -(2**63) - 1, -(10**400), 0.0, -0.0, 0.5,
    1.5, -1.5, 1e-300, 5e-324, 1e38, 1e39, 1e300, 1e308, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
TEXTS = [
    "", " ", "a", "\0", "a\0b", "\n", "\u2028", "é", "☃", "\U0001f600", "\ud800", "..", "../x", "/",
    "/etc/passwd", "%s%n", "<|endoftext|>", "true", "null", "1", "-1", "auto", "default", "\\", "(",
    "a" * 300, "é" * 5000, "x" * 200_000,
]  # fmt: skip


def nested(rng: Random, kind: type, depth: int) -> Any:
    value: Any = rng.choice(NUMBERS)
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def hostile(rng: Random) -> Any:
    """A value for a field that expects another."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice([None, True, False, [], {}])
    if kind == 7:
        return [hostile(rng) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {rng.choice(TEXTS): hostile(rng) for _ in range(rng.randrange(3))}
    return nested(rng, rng.choice([list, dict]), rng.choice([2, 50, 150, 900]))


_PIECES = [
    "a", "b", "[a-z]", "[^a]", ".", "\\w", "\\d", "\\s", "\\p{L}", "é", "☃", "x y", "\\.", '"',
    "(?i)q", "[\\x00-\\xff]", "\\b", "^", "$", "(?=a)", "\\1", "[", "(?<n>a)", "\\u{1F600}", "0",
]  # fmt: skip
_COUNTS = [0, 1, 2, 3, 5, 10, 30, 100, 1000, 100_000, 10**9, 10**20]


def expression(rng: Random, depth: int = 4) -> str:
    """A regular expression, sometimes wrong, sometimes enormous when it is written out."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(_PIECES)
    kind = rng.randrange(9)
    if kind < 3:
        count = rng.choice([1, 2, 3, 5, 40]) if depth < 3 else rng.choice([1, 2, 3])
        return "".join(expression(rng, depth - 1) for _ in range(count))
    inner = f"({expression(rng, depth - 1)})"
    if kind == 3:
        return inner + rng.choice("*+?")
    if kind == 4:
        return f"{inner}{{{rng.choice(_COUNTS)}}}"
    if kind == 5:
        return f"{inner}{{{rng.choice(_COUNTS)},{rng.choice(_COUNTS)}}}"
    if kind == 6:
        return f"{inner}{{{rng.choice(_COUNTS)},}}"
    if kind == 7:
        return f"({inner}|{expression(rng, depth - 1)})"
    return f"(([a-z0-9._])+)+{rng.choice(_PIECES)}"
