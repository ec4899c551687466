"""Ids of answers."""

from __future__ import annotations

import uuid


def make_id(kind: str, separator: str = "-") -> str:
    """An id that no other answer has, as "chatcmpl-…"."""
    return f"{kind}{separator}{uuid.uuid4().hex}"
