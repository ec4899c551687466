"""Work on texts beside the event loop, such that huge texts hold up no other request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from allspark.own_threads import OwnThreads, schema_threads
from allspark.pipeline.served_model import ServedModel
from allspark.serve.errors import ApiError

Result = TypeVar("Result")

# Texts above this take a tokenizer a tenth of a second or more.
LARGE = 1 << 18
# Texts up to this take a millisecond at most, template included.
SMALL = 1 << 12
# What an element of a list or an object takes, as characters. Without it a million of empty ones
# would be small, and counted for long.
_ELEMENT = 8
# One thread: large texts wait for each other, and leave the other threads to small ones.
_large = OwnThreads(1, "allspark-large-text")


async def off_loop(texts: Any, work: Callable[..., Result], *arguments: Any) -> Result:
    """What work(*arguments) returns, on a thread. `texts`: JSON values that it works on."""
    if size_of(texts, LARGE) <= LARGE:
        return await asyncio.to_thread(work, *arguments)
    return await _large.run(work, *arguments)


def begin(work: Coroutine[Any, Any, Result], changed: Callable[[], None]) -> asyncio.Task[Result]:
    """Begins work for somebody who cannot wait: `changed` is called once it is done, unless it was
    cancelled."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: None if task.cancelled() else changed())
    return task


def is_working() -> bool:
    """Whether a thread still works on a large text or a schema, perhaps for a client that is
    gone."""
    return _large.is_busy or schema_threads.is_busy


def size_of(value: Any, limit: int) -> int:
    """Roughly the characters and numbers of a JSON value. Above `limit` it is not counted on."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 1
    elif value and isinstance(value[0], int):
        return len(value)
    size = 0
    for each in value:
        size += _ELEMENT + size_of(each, limit - size)
        if size > limit:
            break
    return size


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


def template_error(error: Exception, rendered: str = "messages") -> ApiError:
    """For what a chat template refuses: the error of the field that it names, or of the one that is
    rendered."""
    text = str(error)
    found = _TEMPLATE_FIELD.match(text)
    param = found[0] if found is not None else rendered
    return ApiError(400, text, param=param, code="invalid_value")


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """The variables of chat_template_kwargs. Raises ApiError for one that is a field."""
    for name in given or ():
        if name in _NO_VARIABLES:
            param = "chat_template_kwargs"
            message = f"{param} has {name!r}, which is no variable of a chat template"
            raise ApiError(400, message, param=param, code="invalid_value")
    return dict(given or {})
