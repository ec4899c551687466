"""OwnThreads: threads for work that takes seconds, beside those of asyncio.

asyncio's own threads are few, and a loop that closes waits for what they do: work on them must be
short.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class OwnThreads:
    """At most `count` threads, begun as they are needed, with a name that begins with `name`. It
    is for the whole life of a process. Used on event loops alone."""

    def __init__(self, count: int, name: str):
        self._count = count
        self._name = name
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # none of the threads is in a fork

    def _begin(self) -> None:
        self._executor = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        self._unfinished: set[Future[Any]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether there is work, perhaps for somebody who does not wait any more."""
        return bool(self._unfinished)

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """What work(*arguments) returns, once a thread has called it."""
        future = self._executor.submit(work, *arguments)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return await asyncio.wrap_future(future)


# For compiling the formats of requests, and for validating against their schemas. These threads
# mostly wait: how many compile at once is the compiler's to bound.
schema_threads = OwnThreads(8, "allspark-schema")
