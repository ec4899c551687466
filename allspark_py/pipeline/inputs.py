"""The forms in which a pipeline takes prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from allspark.error_text import shown, wrong_type

# A text, a conversation, or token ids.
Prompt: TypeAlias = "str | list[dict[str, Any]] | list[int]"

_FORMS = "a str, a conversation (a list of dicts), token ids, or a list of these"


def to_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """One prompt or many; returns them, and whether it was one.

    Raises:
        TypeError, ValueError: it is something else; the message names the prompt.
    """
    if _is_one(prompts):
        return [to_prompt("prompts", prompts)], True
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray, Mapping)):
        raise wrong_type("prompts", prompts, _FORMS)
    return [to_prompt(f"prompts[{i}]", item) for i, item in enumerate(prompts)], False


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, (str, tuple)):
        return True
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], (Mapping, int))


def to_prompt(name: str, prompt: Any) -> Prompt:
    """One prompt. Raises TypeError or ValueError with `name` where it is none."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, tuple):
        raise ValueError(
            f"{name} is a tuple, which is a text with images; vision-language models are not served"
        )
    if isinstance(prompt, list) and prompt:
        kind = Mapping if isinstance(prompt[0], Mapping) else int
        for index, item in enumerate(prompt):
            if not isinstance(item, kind) or isinstance(item, bool):
                must = "a message (a dict)" if kind is Mapping else "a token id (an int)"
                raise TypeError(f"{name}[{index}] is {shown(item)}; it must be {must}")
        return prompt
    if isinstance(prompt, list):
        raise ValueError(f"{name} is empty; it must have a message or a token id")
    raise wrong_type(name, prompt, "a str, a conversation (a list of dicts) or token ids")
