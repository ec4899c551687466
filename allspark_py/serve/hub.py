"""Hub: reads the queues of all requests of an event loop as they change.

One descriptor and one callback serve any number of streams: no task or future is made for a token.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable

from allspark._allspark import CompletionSet
from allspark.result_queue import ResultQueue

logger = logging.getLogger("allspark.serve")

Failed = Callable[[Exception], None]


class Hub:
    """The changed queues of one event loop. All calls are made on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._completions = CompletionSet()
        self._callbacks: dict[int, tuple[Callable[[], None], Failed]] = {}
        loop.add_reader(self._completions.fileno(), self._drain)

    @classmethod
    def current(cls) -> Hub:
        """The hub of the running loop."""
        loop = asyncio.get_running_loop()
        hub = _hubs.get(loop)
        if hub is None:
            hub = _hubs[loop] = cls(loop)
        return hub

    def watch(
        self, queue: ResultQueue, changed: Callable[[], None], failed: Failed = lambda error: None
    ) -> None:
        """Calls `changed` whenever the queue has something new, until `forget`, or until it raises;
        then `failed` is called with the error."""
        self._callbacks[queue.request_id] = changed, failed
        self._completions.attach(queue._native)

    def forget(self, queue: ResultQueue) -> None:
        """Ends the calls for a queue."""
        self._callbacks.pop(queue.request_id, None)

    def _drain(self) -> None:
        callbacks = self._callbacks
        for request_id in self._completions.drain():
            changed, failed = callbacks.get(request_id, (None, None))
            if changed is None or failed is None:
                continue
            try:
                changed()
            except Exception as error:  # of one stream; the others go on
                callbacks.pop(request_id, None)
                logger.exception("a stream ended in an error of the server")
                failed(error)


_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = weakref.WeakKeyDictionary()
