"""Ids and times of answers: new for each answer, but where an Origin says from what they follow."""

from __future__ import annotations

import secrets
import time
from contextvars import ContextVar

from allspark.batch.origin import Origin

# Of the task that runs: the line of a batch that it answers.
origin: ContextVar[Origin | None] = ContextVar("origin", default=None)


def random_bytes(size: int) -> bytes:
    """Up to 64 bytes, other ones at each call."""
    of_line = origin.get()
    return secrets.token_bytes(size) if of_line is None else of_line.random_bytes(size)


def make_id(kind: str, separator: str = "-") -> str:
    """An id that no other answer has, as "chatcmpl-…"."""
    return f"{kind}{separator}{random_bytes(16).hex()}"


def creation_time() -> int:
    """The time of an answer, in seconds since 1970."""
    of_line = origin.get()
    return int(time.time()) if of_line is None else of_line.created
