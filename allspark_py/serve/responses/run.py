"""ResponseRun: a response from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from allspark.serve.chat import StartedConversation
from allspark.serve.errors import ApiError
from allspark.serve.logprobs import chat_rows
from allspark.serve.responses.builder import OutputBuilder
from allspark.serve.responses.record import Record, Status
from allspark.serve.responses.request import ResponsesRequest
from allspark.serve.responses.token_texts import TokenTexts
from allspark.serve.state import ServerState
from allspark.serve.usage import count_reasoning

logger = logging.getLogger("allspark.serve")

# How a response ends, by the finish reason of its output.
_STATUSES: dict[str, Status] = {
    "stop": "completed", "length": "incomplete", "abort": "cancelled", "error": "failed",
}  # fmt: skip
_BROKEN = "the server failed; its log says why"


class ResponseRun:
    """Reads the output of a response into its record. Used on the event loop alone.

    Whoever shows the response is told of changes (`watch`) and reads the record.

    Args:
        is_kept: it is stored once it has ended; until then it is among the library's running ones.
    """

    def __init__(
        self,
        state: ServerState,
        record: Record,
        request: ResponsesRequest,
        conversation: StartedConversation,
        is_kept: bool,
    ):
        self.record = record
        self.is_kept = is_kept
        self._state = state
        self._request = request
        self._conversation = conversation
        self._choice = conversation.choices[0]
        has_rows = bool(conversation.fields.get("logprobs"))
        self._builder = OutputBuilder(record, conversation.parsers[0], has_rows)
        self._tokens = self._token_texts() if has_rows else None
        self._failure: ApiError | None = None
        self._watchers: dict[Callable[[], None], Callable[[BaseException], None]] = {}
        self._has_stopped = False  # the output has; the record may still wait for its usage
        self._ending: asyncio.Task[None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_background(self) -> bool:
        """It goes on without a client."""
        return bool(self.record.head["background"])

    @property
    def error(self) -> ApiError | None:
        """Why it failed; None if it did not."""
        return self._failure

    def start(self) -> None:
        """Begins to read."""
        if self.is_background:  # a shutdown waits for it
            self._state.begin()
        if self.is_kept:
            self._state.responses.running[self.record.id] = self
        self._choice.watch(self._read)

    def watch(self, changed: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Calls `changed` whenever the record did, until `forget`. Where it raises, `failed` is
        called with that, and no more follow."""
        self._watchers[changed] = failed

    def forget(self, changed: Callable[[], None]) -> None:
        """Ends the calls; also those that never began."""
        self._watchers.pop(changed, None)

    async def ended(self) -> None:
        """Returns once the record is whole."""
        await asyncio.shield(self._end)

    def cancel(self, failure: str | None = None) -> None:
        """Ends it with what has come; as failed where a failure is given."""
        if self._has_stopped:
            return
        if self._choice.read():
            self._read()  # it may have come to its end
        if not self._has_stopped:
            if failure is None:
                self._stop("cancelled")
            else:
                self._stop("failed", _failure(failure))

    def _token_texts(self) -> TokenTexts:
        skips = self._conversation.fields.get("skip_special_tokens", True)
        return TokenTexts(self._conversation.entry.model.tokenizer, skips)

    def _read(self) -> None:
        if self._has_stopped:
            return
        try:
            self._take()
        except Exception:
            logger.exception("the output of the response %s cannot be read", self.record.id)
            self._stop("failed", _failure(_BROKEN))
            return
        if self._choice.is_finished:
            error = self._choice.error
            if error is None:
                self._stop(_STATUSES[self._choice.finish_reason])
            else:
                self._stop("failed", self._request.renamed(error))
        else:
            self._notify()

    def _take(self) -> None:
        """Adds what has come to the record."""
        new = self._choice.take()
        ids = new.ids_from_generate
        if ids and not self.record.has_begun:
            self.record.has_begun, self.record.status = True, "in_progress"
        if self._tokens is None:
            self._builder.put(new.text)
            return
        tokenizer = self._conversation.entry.model.tokenizer
        rows = chat_rows(tokenizer, ids, new.token_logprobs_list, new.log_probs_list)
        self._builder.put_tokens(self._tokens.put(new.text, ids, rows))

    def _stop(self, status: Status, failure: ApiError | None = None) -> None:
        """The output has ended."""
        self._has_stopped = True
        self._choice.release()
        try:
            if self._tokens is not None:
                self._builder.put_tokens(self._tokens.flush())
            self._builder.end(is_whole=status == "completed")
        except Exception:
            logger.exception("the output of the response %s cannot be read", self.record.id)
            status, failure = "failed", _failure(_BROKEN)
        if self._builder.reasoning:
            self._ending = asyncio.ensure_future(self._end_with_reasoning(status, failure))
        else:
            self._finish(status, failure, 0)

    async def _end_with_reasoning(self, status: Status, failure: ApiError | None) -> None:
        """Counts the tokens of reasoning before the end."""
        tokenizer = self._conversation.entry.model.tokenizer
        count = 0
        try:
            count = await count_reasoning(tokenizer, self._builder.reasoning)
        finally:  # also where the loop ends meanwhile
            self._finish(status, failure, count)

    def _finish(self, status: Status, failure: ApiError | None, num_reasoning: int) -> None:
        """Makes the record whole, and lets everybody know."""
        record = self.record
        for item in record.items:
            item.is_done = record.has_begun = True
        record.completed_at = int(time.time()) if status == "completed" else None
        record.usage = self._usage(num_reasoning)
        if status == "incomplete":
            record.incomplete_details = {"reason": "max_output_tokens"}
        record.status = status
        if failure is not None:
            self._failure = failure
            record.fail(failure.message, is_of_request=failure.status < 500)
        self._end.set_result(None)
        if self.is_background:
            self._state.end()
        if self.is_kept:
            self._state.responses.keep(self)
        else:
            self._state.responses.running.pop(record.id, None)
        self._notify()

    def _usage(self, num_reasoning: int) -> dict[str, Any]:
        num_input, num_output = len(self._conversation.prompt_ids), self._choice.num_tokens
        cached = self._choice.cached_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }

    def _notify(self) -> None:
        for changed, failed in list(self._watchers.items()):
            try:
                changed()
            except Exception as error:  # of one client; the others go on
                self.forget(changed)
                logger.exception("a stream ended in an error of the server")
                failed(error)


def _failure(message: str) -> ApiError:
    """Of the server."""
    return ApiError(500, message, code="internal_error")


async def whole_response(run: ResponseRun) -> dict[str, Any]:
    """The answer that is not streamed, once the response has ended. Where nobody waits for it any
    more it ends, and is not stored: no client knows its id."""
    try:
        await run.ended()
    except BaseException:
        run.is_kept = False
        run.cancel()
        raise
    if run.error is not None:
        raise run.error
    return run.record.response()
