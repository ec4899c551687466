"""The queues that DashInfer's scripts get, whose status waits for their reader.

Such a script reads in turns, GenerateStatus() and Get(), and ends at the first status that is
terminal, without looking for tokens that came between the two. Here it cannot miss any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import allspark.result_queue
import allspark.text_queue
from allspark._allspark import GenerateRequestStatus

# So many times in a row a reader may ask for the status; the ancestor's scripts ask three times,
# twice to print it.
_MOST_ANSWERS = 4


class ResultQueue(allspark.result_queue.ResultQueue):
    """Tokens, status and statistics of one request.

    The status stays `Generating` as long as there are tokens to fetch. A caller who only asks, and
    fetches once the request has ended, is told that it has: after `sync_request`, or when it was
    told `Generating` several times and fetched nothing in between.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._num_fetched = 0  # tokens
        self._num_answers = 0  # "Generating" in a row
        self._end_is_known = False

    def GenerateStatus(self) -> GenerateRequestStatus:
        """The request's status; never blocks."""
        # Read before the queue's length: what comes before a terminal status counts by then.
        finished, status = self.finished, super().GenerateStatus()
        if status == GenerateRequestStatus.Init:
            return status
        with self._lock:
            reads = not self._end_is_known and self._num_answers < _MOST_ANSWERS
            if finished and not (reads and self._has_unread()):
                return status
            self._num_answers += 1
        # Never ContextFinished, at which the ancestor's benchmark gives a request up.
        return GenerateRequestStatus.Generating

    def know_end(self) -> None:
        """The caller has waited for the end: the status says so from now on."""
        with self._lock:
            self._end_is_known = True

    @property
    def is_read(self) -> bool:
        """Whether somebody has begun to fetch."""
        return self._num_fetched > 0

    def _has_unread(self) -> bool:
        return self.GeneratedLength() > self._num_fetched

    def _take(self, fetch: Callable[[], Any]) -> Any:
        elements = super()._take(fetch)
        with self._lock:
            self._num_answers = 0
            if elements is not None:
                self._num_fetched += len(elements.ids_from_generate)
        return elements


class TextQueue(ResultQueue, allspark.text_queue.TextQueue):
    """The same, of a request whose config has fields about text."""

    def _has_unread(self) -> bool:
        return not (self._stopped or self._flushed)
