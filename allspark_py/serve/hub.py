"""Hub: reads the queues of all requests of an event loop as they change.

One descriptor, one callback and one call of the engine serve any number of streams: no task or
future is made for a token.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from allspark._allspark import CompletionSet, GeneratedElements
from allspark.result_queue import ResultQueue

logger = logging.getLogger("allspark.serve")

# Of a queue: the request's id, new ids, how many tokens of the prompt the prefix cache had, the
# elements where they hold more than ids, and whether these are the last.
News: TypeAlias = "tuple[int, list[int], int, GeneratedElements | None, bool]"


@dataclass(slots=True, eq=False)
class Watched:
    """A queue, and what is called for it."""

    queue: ResultQueue
    read: Callable[[News], bool]  # takes what is new; True: `changed` is to be called
    changed: Callable[[], None]
    failed: Callable[[Exception], None]  # one of the others raised
    only_end: bool = False  # whether nothing is read before the status is terminal


class Hub:
    """The changed queues of one event loop. All calls are made on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._completions = CompletionSet()
        self._watched: dict[int, Watched] = {}
        loop.add_reader(self._completions.fileno(), self._drain)

    @classmethod
    def current(cls) -> Hub:
        """The hub of the running loop."""
        loop = asyncio.get_running_loop()
        hub = _hubs.get(loop)
        if hub is None:
            hub = _hubs[loop] = cls(loop)
        return hub

    def watch(self, watched: Watched) -> None:
        """Makes the calls whenever the queue has something new, or with `only_end` its end, until
        `forget`, or until one of them raises."""
        self._watched[watched.queue.request_id] = watched
        self._completions.attach(watched.queue._native, watched.only_end)

    def forget(self, queue: ResultQueue) -> None:
        """Ends the calls for a queue."""
        self._watched.pop(queue.request_id, None)

    def _drain(self) -> None:
        # First all is read, then all is written: each takes less while its code and its data are
        # in the processor's caches.
        changed = []
        for news in self._completions.read():
            watched = self._watched.get(news[0])
            if watched is None:
                continue
            try:
                if watched.read(news):
                    changed.append(watched)
            except Exception as error:
                self._fail(watched, error)
        for watched in changed:
            try:
                watched.changed()
            except Exception as error:
                self._fail(watched, error)

    def _fail(self, watched: Watched, error: Exception) -> None:
        """Ends one stream; the others go on."""
        self.forget(watched.queue)
        logger.exception("a stream ended in an error of the server")
        watched.failed(error)


_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = weakref.WeakKeyDictionary()
