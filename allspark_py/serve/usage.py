"""The `usage` of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allspark.serve.choice import Choice


def usage(
    num_prompt_tokens: int,
    choices: Sequence[Choice],
    reasoning_tokens: int = 0,
    num_prompts: int = 1,
) -> dict[str, Any]:
    """Tokens of prompts and their outputs, the ends of sequences included. Each prompt has as many
    choices, which follow each other."""
    num_output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output,
        "total_tokens": num_prompt_tokens + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(_cached(choices, i, num_prompts) for i in range(num_prompts))
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def _cached(choices: Sequence[Choice], prompt: int, num_prompts: int) -> int:
    """Tokens of a prompt that the cache had before the request. Its further choices find what the
    first has computed, which is not counted."""
    count = len(choices) // num_prompts
    own = choices[prompt * count : (prompt + 1) * count]
    return min((choice.cached_tokens for choice in own), default=0)
