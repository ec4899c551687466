"""Calls off the event loop that are never left running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def off_loop(call: Callable[[], Result]) -> Result:
    """What a call on a thread returns. Where it is cancelled, it first waits for the call's end: so
    what the call uses, such as an open file, can be closed then."""
    # No task: the end of a loop cancels all tasks.
    future = asyncio.get_running_loop().run_in_executor(None, call)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:  # which may come more than once
            cancelled = error
    if cancelled is None:
        return future.result()
    future.exception()  # so that asyncio does not report it
    raise cancelled
