"""Choice: one output of a request, read as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from allspark._allspark import RequestHandle
from allspark.serve.catalog import Entry
from allspark.serve.errors import ApiError
from allspark.serve.hub import Failed, Hub
from allspark.text_queue import TextElements, TextQueue

# An engine's finish reasons that have another name in HTTP.
_FINISH_REASONS = {"deadline": "length", "cancelled": "abort"}

# How the error begins of an output whose format was found to be too complex while it was computed.
_FAILED_GRAMMAR = ("token mask: the grammar failed", "token mask: no token of the vocabulary")

# The request of the task that runs, for /abort_request.
request_id: ContextVar[str] = ContextVar("request_id", default="")
_live: set[Choice] = set()


def stop_choices(of_request: str | None) -> int:
    """Ends the outputs of a request, or with None of all; returns how many."""
    found = [choice for choice in _live if of_request in (None, choice.request_id)]
    for choice in found:
        choice.stop()
    return len(found)


class Choice:
    """Text, ids and log-probabilities of one output. Used on the event loop alone.

    `read` takes what has come. Until `take` fetches it, it is kept here, so a slow client holds up
    nobody.
    """

    def __init__(
        self,
        index: int,
        entry: Entry,
        handle: RequestHandle,
        queue: TextQueue,
        own_stop_ids: frozenset[int],
    ):
        self.index = index
        self.request_id = request_id.get()
        self.is_finished = False
        self.num_tokens = 0
        self.cached_tokens = 0
        self.token_ids: list[int] = []
        self._entry = entry
        self._handle = handle
        self._queue = queue
        self._own_stop_ids = own_stop_ids
        self._pieces: list[TextElements] = []
        self._is_released = False
        _live.add(self)

    def watch(self, changed: Callable[[], None], failed: Failed = lambda error: None) -> None:
        """Reads whenever something has come, and calls `changed` then. Where either raises, that is
        the end, and `failed` is called."""

        def on_change() -> None:
            if self.read():
                changed()

        Hub.current().watch(self._queue, on_change, failed)
        on_change()

    def read(self) -> bool:
        """Takes what has come from the queue; False if that was nothing."""
        if self.is_finished:
            return False
        queue = self._queue
        # Asked first: all tokens from before a terminal status are then in the queue. What comes
        # after the call below is signalled again.
        finished = queue.finished
        elements = queue.GetNoWait()
        if elements is not None:
            self._pieces.append(elements)  # type: ignore[arg-type]  # a TextQueue's
            self.num_tokens += len(elements.ids_from_generate)
            self.token_ids += elements.ids_from_generate
            self.cached_tokens = max(self.cached_tokens, elements.prefix_cache_len)
        if finished or queue.stop_word is not None:
            self.is_finished = True
            self.release()
        return elements is not None or self.is_finished

    @property
    def has_news(self) -> bool:
        """Whether `take` has something, or there is an end to tell."""
        return bool(self._pieces) or self.is_finished

    def take(self) -> list[TextElements]:
        """What was read since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    @property
    def error(self) -> ApiError | None:
        """Why the output ended in an error; None if it did not."""
        if self._queue.finish_reason not in ("error", "interrupted"):
            return None
        text = self._queue.error or "the request failed"
        if text.startswith(_FAILED_GRAMMAR):
            text = text.removeprefix("token mask: ")
            return ApiError(400, text, param="response_format", code="invalid_value")
        return ApiError(500, text, code="internal_error")

    @property
    def finish_reason(self) -> str:
        """stop, length, abort or error."""
        reason = self._queue.finish_reason or "error"
        return _FINISH_REASONS.get(reason, reason)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token of the request at which the output ended, or "deadline"."""
        if self._queue.finish_reason == "deadline":
            return "deadline"
        if self._queue.stop_word is not None:
            return self._queue.stop_word
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self._own_stop_ids else None

    def stop(self) -> None:
        """Ends the output with the tokens so far; it then ends as any other."""
        if not self._is_released:
            model = self._entry.model
            model.engine.stop_request(model.name, self._handle)

    def release(self) -> None:
        """Stops the request if it runs, and frees it; a second call has no effect."""
        if not self._is_released:
            self._is_released = True
            _live.discard(self)
            Hub.current().forget(self._queue)
            model = self._entry.model
            model.engine.release_request(model.name, self._handle)


async def start_choices(
    entry: Entry, ids: list[int], fields: dict[str, Any], own_stop_ids: list[int], first_index: int
) -> list[Choice]:
    """Starts a prompt's outputs, `n` of them.

    Raises:
        ApiError: the engine does not take the request.
    """
    from allspark._allspark import AsStatus
    from allspark.serve.errors import refused

    model = entry.model
    status, handles, queues = await model.engine.start_request_ids_async(
        model.name, model.loader, ids, fields
    )
    if status != AsStatus.ALLSPARK_SUCCESS:
        raise refused(status, model.engine.last_error())
    if not isinstance(handles, list):
        handles, queues = [handles], [queues]
    stops = frozenset(own_stop_ids)
    return [
        Choice(first_index + i, entry, handle, queue, stops)
        for i, (handle, queue) in enumerate(zip(handles, queues, strict=True))
    ]


async def finish(choices: Sequence[Choice]) -> None:
    """Returns once all have ended."""
    done = asyncio.get_running_loop().create_future()

    def changed() -> None:
        if not done.done() and all(choice.is_finished for choice in choices):
            done.set_result(None)

    def failed(error: Exception) -> None:
        if not done.done():
            done.set_exception(error)

    for choice in choices:
        choice.watch(changed, failed)
    await done
