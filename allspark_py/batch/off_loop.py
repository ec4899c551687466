"""Calls off the event loop that are never left running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def off_loop(call: Callable[[], Result]) -> Result:
    """What a call on a thread returns. Where it is cancelled, it first waits for the call's end: so
    what the call uses, such as an open file, can be closed then."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
