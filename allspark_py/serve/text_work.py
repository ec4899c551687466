"""Work on texts beside the event loop, such that huge texts hold up no other request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from allspark.own_threads import OwnThreads, schema_threads

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


async def on_thread(texts: Any, work: Callable[..., Result], *arguments: Any) -> Result:
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
