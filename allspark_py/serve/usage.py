"""The `usage` of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspark.serve.choice import Choice


def usage(
    num_prompt_tokens: int, choices: Sequence[Choice], reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Tokens of a prompt and its outputs, the ends of sequences included."""
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output,
        "total_tokens": num_prompt_tokens + num_output,
        "prompt_tokens_details": {
            "cached_tokens": max((choice.cached_tokens for choice in choices), default=0)
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
