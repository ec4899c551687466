"""Work on texts beside the event loop, such that huge texts hold up no other request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from allspark.pipeline.served_model import ServedModel
from allspark.serve.errors import ApiError

Result = TypeVar("Result")

# Texts above this take a tokenizer a tenth of a second or more.
LARGE = 1 << 18
# Texts up to this take a millisecond at most, template included.
SMALL = 1 << 12
# One thread: large texts wait for each other, and leave the other threads to small ones.
_large = ThreadPoolExecutor(1, thread_name_prefix="allspark-large-text")
_unfinished: set[Future[Any]] = set()


async def off_loop(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """What work(*arguments) returns, on a thread. `size`: see size_of."""
    if size <= LARGE:
        return await asyncio.to_thread(work, *arguments)
    future = _large.submit(work, *arguments)
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return await asyncio.wrap_future(future)


def is_reading() -> bool:
    """Whether a large text is still worked on, perhaps for a client that is gone."""
    return bool(_unfinished)


def size_of(value: Any) -> int:
    """Roughly the characters and numbers of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if not isinstance(value, Sequence):
        return 1
    if value and isinstance(value[0], int):
        return len(value)
    return sum(map(size_of, value))


def check_chars(model: ServedModel, text: str, name: str) -> None:
    """Raises ApiError where a text is so long that it cannot fit; it would be tokenised in vain."""
    bound = model.max_prompt_chars
    if len(text) > bound:
        length = model.session_len
        message = f"{name}: {len(text)} characters; the model's length, {length} tokens, holds "
        message += f"{bound} at most"
        raise ApiError(400, message, param=name, code="context_length_exceeded")


# What a chat template is given beside its variables, by fields of their own.
_NO_VARIABLES = frozenset({
    "self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template",
})  # fmt: skip


# Fields beside the messages that an error of a chat template may begin with.
_TEMPLATE_FIELD = re.compile(r"(?:tools|documents)\b")


def template_error(error: Exception) -> ApiError:
    """For what a chat template refuses: the error of the field that it names."""
    text = str(error)
    found = _TEMPLATE_FIELD.match(text)
    param = found[0] if found is not None else "messages"
    return ApiError(400, text, param=param, code="invalid_value")


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """The variables of chat_template_kwargs. Raises ApiError for one that is a field."""
    for name in given or ():
        if name in _NO_VARIABLES:
            param = "chat_template_kwargs"
            message = f"{param} has {name!r}, which is no variable of a chat template"
            raise ApiError(400, message, param=param, code="invalid_value")
    return dict(given or {})
