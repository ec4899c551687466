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

from allspark._allspark import CompletionSet, EventForm, GeneratedElements, TextStreams
from allspark.result_queue import ResultQueue

logger = logging.getLogger("allspark.serve")

# Of a queue: the request's id, new ids, how many tokens of the prompt the prefix cache had, the
# elements where they hold more than ids, and whether these are the last.
News: TypeAlias = "tuple[int, list[int], int, GeneratedElements | None, bool]"
# Of one of which text is told, at its end: News with the ids that were not told, the last text, and
# how many of these ids were in events.
PlainEnd: TypeAlias = "tuple[int, list[int], int, None, bool, str, int]"


@dataclass(slots=True, eq=False)
class Watched:
    """A queue, and what is called for it."""

    queue: ResultQueue
    read: Callable[[News], bool]  # takes what is new; True: `changed` is to be called
    changed: Callable[[], None]
    failed: Callable[[Exception], None]  # one of the others raised
    only_end: bool = False  # whether nothing is read before the status is terminal
    # What takes text, or with with_ids text and ids, where these alone are told; the end then comes
    # to read_end. `changed` is called after both.
    put_text: Callable[..., None] | None = None
    with_ids: bool = False
    read_end: Callable[[PlainEnd], None] | None = None


class Hub:
    """The changed queues of one event loop. All calls are made on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._completions = CompletionSet()
        self._watched: dict[int, Watched] = {}
        self._texts = TextStreams()
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
        queue = watched.queue
        self._watched[queue.request_id] = watched
        if watched.put_text is not None and (plain := queue._plain_decoder()) is not None:
            self._texts.add(queue._native, *plain, watched.with_ids)
        self._completions.attach(queue._native, watched.only_end)

    def write_events(
        self, queue: ResultQueue, form: EventForm, offer: Callable[[bytes], bool]
    ) -> None:
        """From now on a queue's text, or text and ids, is not told: events of it are offered. What
        is not taken waits for `resume`. No effect where text is not told."""
        self._texts.write_events(queue._native, form, offer)

    def resume(self, queue: ResultQueue) -> None:
        """Offers what was not taken, as one event."""
        self._texts.resume(queue._native)

    def forget(self, queue: ResultQueue) -> None:
        """Ends the calls for a queue."""
        if self._watched.pop(queue.request_id, None) is not None:
            self._texts.remove(queue._native)

    def _drain(self) -> None:
        # First all is read, then all is written: each takes less while its code and its data are
        # in the processor's caches. Events of text are written by reading.
        changed = []
        for news in iter(self._completions.read(self._texts).next, None):
            watched = self._watched.get(news[0])
            if watched is None:
                continue
            try:
                if len(news) <= 3:
                    if isinstance(news[1], Exception):  # of writing an event
                        raise news[1]
                    watched.put_text(*news[1:])  # type: ignore[misc]
                    changed.append(watched)
                elif len(news) == 7:
                    watched.read_end(news)  # type: ignore[misc]
                    changed.append(watched)
                elif watched.read(news):
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
