"""Starts requests off the event loop, since a start may wait for room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class OrderedStarts:
    """One thread for each model: its requests start in the order of the calls, and do not wait for
    those of another model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, ThreadPoolExecutor] = {}

    async def run(
        self,
        model_name: str,
        start: Callable[[Callable[[], bool]], T],
        undo: Callable[[T], object],
    ) -> T:
        """Calls start(gives_up) on the model's thread. Once the caller is cancelled, gives_up()
        returns True; what was started nevertheless is passed to `undo`."""
        with self._lock:
            thread = self._threads.get(model_name)
            if thread is None:
                thread = ThreadPoolExecutor(1, thread_name_prefix="allspark-start")
                self._threads[model_name] = thread
        cancelled = threading.Event()
        future = thread.submit(start, cancelled.is_set)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancelled.set()

            def discard(done: Future[T]) -> None:
                if not done.cancelled() and done.exception() is None:
                    undo(done.result())

            future.add_done_callback(discard)
            raise
