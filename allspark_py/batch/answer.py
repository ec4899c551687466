"""Answer: the output line of an input line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What is written for a line."""

    data: bytes  # with its "\n"
    is_error: bool = False
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


def to_line(value: Any) -> bytes:
    """A value as a line of JSON. Of text that is no Unicode, lone surrogates, come escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"
