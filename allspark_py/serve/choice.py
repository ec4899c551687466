"""Choice: one output of a request, read as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from allspark._allspark import AsStatus, EventForm, GeneratedElements, RequestHandle
from allspark.result_queue import ResultQueue
from allspark.serve.catalog import Entry
from allspark.serve.errors import ApiError, invalid_value, refused
from allspark.serve.hub import Hub, News, PlainEnd, Watched
from allspark.serve.sse import Writer
from allspark.text_queue import TextElements

# An engine's finish reasons that have another name in HTTP.
_FINISH_REASONS = {"deadline": "length", "cancelled": "abort"}

# How the error begins of an output whose format was found to be too complex while it was computed,
# and of one to which the format and other fields leave no token.
_FAILED_GRAMMAR = ("token mask: the grammar failed", "token mask: no token of the vocabulary")
_NO_TOKEN = "no token that the mask allows"

# The request of the task that runs, for /abort_request.
request_id: ContextVar[str] = ContextVar("request_id", default="")
_live: set[Choice] = set()


def stop_choices(of_request: str | None) -> int:
    """Ends the outputs of a request, or with None of all; returns how many. One whose end is on
    its way is not counted again."""
    found = [choice for choice in _live if of_request in (None, choice.request_id)]
    return sum(choice.stop() for choice in found)


@dataclass(frozen=True, slots=True)
class Own:
    """What a request says of the ends of its outputs, beside what its model does.

    Attributes:
        stops: its stop strings and tokens.
        format_name: what it calls the format of its outputs. Without one they may have that of
            their tools.
    """

    stops: frozenset[str | int] = frozenset()
    format_name: str = "tools"


class Choice:
    """Text, ids and log-probabilities of one output. Used on the event loop alone.

    What comes is read at once, and kept until `take` fetches it, so a slow client holds up nobody.
    """

    __slots__ = (
        "_details", "_entry", "_handle", "_is_released", "_is_stopped", "_num_taken",
        "_own", "_queue", "_texts", "cached_tokens", "index", "is_finished",
        "num_tokens", "request_id", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        entry: Entry,
        handle: RequestHandle,
        queue: ResultQueue,
        own: Own,
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
        self._own = own
        # What was not taken yet: texts, the begin of the ids, and what came with how many of them.
        self._texts: list[str] = []
        self._num_taken = 0
        self._details: list[tuple[GeneratedElements, int]] = []
        self._is_released = False
        self._is_stopped = False
        _live.add(self)

    def watch(
        self,
        changed: Callable[[], None],
        failed: Callable[[Exception], None] = lambda error: None,
        only_end: bool = False,
    ) -> None:
        """Calls `changed` whenever something has come, or with `only_end` all of it. Where it
        cannot be read, or `changed` raises, that is the end, and `failed` is called."""
        only_end = only_end and not self._queue._has_stops  # which reading finds
        Hub.current().watch(Watched(self._queue, self._add, changed, failed, only_end))

    def watch_text(
        self,
        changed: Callable[[], None],
        failed: Callable[[Exception], None],
        with_ids: bool = False,
    ) -> None:
        """As watch, for those who take nothing but text until the end, or text and ids."""
        watched = Watched(
            self._queue, self._add, changed, failed,
            put_text=self._keep, with_ids=with_ids, read_end=self._add_end,
        )  # fmt: skip
        Hub.current().watch(watched)

    def write_events(self, form: EventForm, offer: Callable[[bytes], bool]) -> None:
        """After watch_text, where text alone makes the events: `offer` is called with each instead
        of `changed`, and says whether it took it. What it did not take waits for `write_event`.
        Where text is more than the decoded ids, there is no effect."""
        Hub.current().write_events(self._queue, form, offer)

    def write_event(self, form: EventForm, writer: Writer) -> None:
        """Writes what has come since the last event, by `write_events` or this."""
        Hub.current().resume(self._queue)
        if writer.is_free:
            text, ids = self.take_text(), self.take_ids()
            if text or (ids and form.has_ids):
                writer.write(form(text, ids))

    def read(self) -> bool:
        """Reads what has come since the hub did; False if that was nothing."""
        return self._add(self._queue._native.read())

    def _add(self, news: News) -> bool:
        if self.is_finished:
            return False
        queue = self._queue
        _, ids, num_cached, elements, is_end = news
        text, count = queue._put(ids, is_end)
        if text:
            self._texts.append(text)
        if count:
            self.num_tokens += count
            self.token_ids += ids if count == len(ids) else ids[:count]
        if num_cached > self.cached_tokens:
            self.cached_tokens = num_cached
        if elements is not None:
            self._details.append((elements, count))
        if is_end or queue._stopped:
            self.is_finished = True
            self.release()
            return True
        return bool(ids) or elements is not None

    def _add_end(self, news: PlainEnd) -> None:
        _, ids, self.cached_tokens, _, _, text, num_written = news
        self._keep(text, ids)
        self._num_taken += num_written
        self._queue._end_plain(self.num_tokens)
        self.is_finished = True
        self.release()

    def _keep(self, text: str, ids: Sequence[int] = ()) -> None:
        if text:
            self._texts.append(text)
        self.num_tokens += len(ids)
        self.token_ids += ids

    @property
    def has_news(self) -> bool:
        """Whether `take` has something, or there is an end to tell."""
        has_more = self._num_taken < self.num_tokens or self._texts or self._details
        return bool(has_more) or self.is_finished

    def take(self) -> TextElements:
        """What was read since the last call."""
        taken = TextElements(self.take_text(), self.take_ids())
        for elements, count in self._details:
            taken.add_details(elements, count)
        self._details.clear()
        return taken

    def take_ids(self) -> list[int]:
        """The ids that were read since the last call; what else there is waits for `take`."""
        ids = self.token_ids[self._num_taken :]
        self._num_taken = self.num_tokens
        return ids

    def take_text(self) -> str:
        """The text that was read since the last call; the rest waits for `take`."""
        texts = self._texts
        if len(texts) == 1:
            return texts.pop()
        text = "".join(texts)
        texts.clear()
        return text

    @property
    def error(self) -> ApiError | None:
        """Why the output ended in an error; None if it did not."""
        if self._queue.finish_reason not in ("error", "interrupted"):
            return None
        text, name = self._queue.error or "the request failed", self._own.format_name
        if text.startswith(_NO_TOKEN):
            text = "other fields, such as min_tokens or bad_words, leave no token that it allows"
        elif text.startswith(_FAILED_GRAMMAR):
            text = text.removeprefix("token mask: ")
        else:
            return ApiError(500, text, code="internal_error")
        return invalid_value(f"{name}: {text}", name)

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
        end: str | int | None = self._queue.stop_word
        if end is None and self.token_ids:
            end = self.token_ids[-1]
        return end if end in self._own.stops else None

    def stop(self) -> bool:
        """Ends the output with the tokens so far; it then ends as any other. False where it has
        ended, or was stopped before."""
        if self._is_released or self._is_stopped:
            return False
        self._is_stopped = True
        model = self._entry.model
        model.engine.stop_request(model.name, self._handle)
        return True

    def release(self) -> None:
        """Stops the request if it runs, and frees it; a second call has no effect."""
        if not self._is_released:
            self._is_released = True
            _live.discard(self)
            Hub.current().forget(self._queue)
            model = self._entry.model
            model.engine.release_request(model.name, self._handle)


async def start_choices(
    entry: Entry, ids: list[int], fields: dict[str, Any], own: Own, first_index: int = 0
) -> list[Choice]:
    """Starts a prompt's outputs, `n` of them.

    Raises:
        ApiError: the engine does not take the request.
    """
    model = entry.model
    started = await model.engine.start_request_ids_async(model.name, model.loader, ids, fields)
    return _choices(entry, started, own, first_index)


async def start_prepared(
    entry: Entry, prepare: Callable[[], tuple[list[int], dict[str, Any]]], own: Own
) -> list[Choice]:
    """As start_choices, with the ids and fields that `prepare` returns, which must be quick: it
    runs on the thread of the starts. The fields have no response_format.

    Raises:
        ApiError: as start_choices does, and where `prepare` does.
    """
    model = entry.model
    started = await model.engine.start_prepared_async(model.name, model.loader, prepare)
    return _choices(entry, started, own, 0)


def _choices(
    entry: Entry, started: tuple[Any, Any, Any], own: Own, first_index: int
) -> list[Choice]:
    status, handles, queues = started
    if status != AsStatus.ALLSPARK_SUCCESS:
        raise refused(status, entry.model.engine.last_error())
    if not isinstance(handles, list):
        handles, queues = [handles], [queues]
    return [
        Choice(first_index + i, entry, handle, queue, own)
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
        if not choice.is_finished:
            choice.watch(changed, failed, only_end=True)
    changed()
    await done
