"""Origin: from what the seed, ids and time of a line's answer follow."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

_SEED_BITS = 62  # room for the seeds of a line's outputs, which follow each other


@dataclass
class Origin:
    """What would be random, or the time of day, in an answer of a server.

    Everything follows from the run and the line, so a run that was resumed writes the same bytes as
    one that was not.

    Args:
        run: what tells one run from another.
        number: the line's.
        created: seconds since 1970.
    """

    run: str
    number: int
    created: int
    _count: int = field(default=0, repr=False)

    def random_bytes(self, size: int) -> bytes:
        """Up to 64 bytes, other ones at each call."""
        self._count += 1
        return _digest(self.run, self.number, self._count)[:size]


def line_seed(seed: int, number: int) -> int:
    """The seed of a line that has none of its own."""
    return int.from_bytes(_digest(f"seed {seed}", number, 0)[:8], "big") >> (64 - _SEED_BITS)


def _digest(run: str, number: int, count: int) -> bytes:
    return hashlib.blake2b(f"{run}\n{number}\n{count}".encode()).digest()
