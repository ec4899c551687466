"""The queues that DashInfer scripts get. Their status waits for the reader.

Such a script calls GenerateStatus() and Get() in turns and ends at the first terminal status,
without looking for tokens that arrived between the two calls. Here it cannot miss any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import allspark.result_queue
import allspark.text_queue
from allspark._allspark import GenerateRequestStatus

# How many times in a row a reader may ask for the status. DashInfer's scripts ask three times,
# twice to print it.
_MOST_ANSWERS = 4


class ResultQueue(allspark.result_queue.ResultQueue):
    """Tokens, status and statistics of one request.

    The status stays `Generating` as long as there are tokens to fetch. A caller may also only ask,
    and fetch once the request has ended. It gets the terminal status after `sync_request`, or after
    several answers of `Generating` with no fetch in between.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._num_fetched = 0  # tokens
        self._num_answers = 0  # "Generating" in a row
        self._end_is_known = False

    def GenerateStatus(self) -> GenerateRequestStatus:
        """The request's status; never blocks."""
        # Read before the queue's length: tokens from before a terminal status are counted by then.
        finished, status = self.finished, super().GenerateStatus()
        if status == GenerateRequestStatus.Init:
            return status
        with self._lock:
            reads = not self._end_is_known and self._num_answers < _MOST_ANSWERS
            if finished and not (reads and self._has_unread()):
                return status
            self._num_answers += 1
        # Never ContextFinished: DashInfer's benchmark gives a request up at that status.
        return GenerateRequestStatus.Generating

    def know_end(self) -> None:
        """The caller has waited for the end: from now on the status says so."""
        with self._lock:
            self._end_is_known = True

    @property
    def is_read(self) -> bool:
        """Whether any token was fetched."""
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
    """The same for a request whose config has fields about text."""

    def _has_unread(self) -> bool:
        return not (self._stopped or self._flushed)
