"""Runs the prompts of one call: starts them in order, and reads what they give as it comes."""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from allspark._allspark import AsStatus, CompletionSet, GeneratedElements, RequestHandle
from allspark.detokenizer import open_decoding
from allspark.input_ids import to_id_array
from allspark.pipeline.generation import count_without_end, end_ids
from allspark.pipeline.response import Response, joined
from allspark.pipeline.served_model import ServedModel
from allspark.result_queue import ResultQueue
from allspark.text_options import TEXT_FIELDS
from allspark.text_queue import TextElements

logger = logging.getLogger("allspark")

# Of an engine's finish reasons, those that have another name in a Response.
_REASONS = {"cancelled": "abort", "deadline": "length", "interrupted": "error"}
# Of a status, the error code of a Response.
_CODES = {
    AsStatus.ALLSPARK_PARAM_ERROR: "invalid_request",
    AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR: "invalid_request",
    AsStatus.ALLSPARK_LORA_NOT_FOUND: "model_not_found",
    AsStatus.ALLSPARK_REQUEST_DENIED: "engine_unavailable",
    AsStatus.ALLSPARK_MEMORY_ERROR: "out_of_memory",
}


@dataclass
class Job:
    """A prompt that is to be run."""

    index: int
    # Makes the ids and the fields of the request. Called when there is room for it.
    prepare: Callable[[], tuple[Any, dict[str, Any]]]
    # Called with the handle once the request runs.
    started: Callable[[RequestHandle], None] | None = None


def run(model: ServedModel, jobs: Sequence[Job], stream: bool) -> Iterator[Response]:
    """The pieces of all responses as they come, or with `stream` False each whole.

    Twice as many requests as fit in a step are started at a time, or as many as may wait beside
    those. When the iteration ends early, those that still run are stopped.
    """
    runner = _Runner(model, stream)
    try:
        yield from runner.run(jobs)
    finally:
        runner.close()


class _Runner:
    def __init__(self, model: ServedModel, stream: bool):
        self._model = model
        self._stream = stream
        self._completions = CompletionSet()
        self._running: dict[int, Running] = {}

    def run(self, jobs: Sequence[Job]) -> Iterator[Response]:
        waiting = iter(jobs)
        poller = select.poll()
        poller.register(self._completions.fileno(), select.POLLIN)
        room = 2 * self._model.max_batch_size
        if (bound := self._model.max_outputs) is not None:
            room = min(room, bound)
        job = next(waiting, None)
        while job is not None or self._running:
            # What came is read before more is started, so that no stream waits for long.
            while job is not None and len(self._running) < room:
                yield from self._start(job)
                job = next(waiting, None)
                if job is not None and poller.poll(0):
                    break
            if self._running:
                poller.poll()
                yield from self._read()

    def _start(self, job: Job) -> Iterator[Response]:
        model = self._model
        request = plan(model, job, self._stream)
        if isinstance(request, Response):
            yield request
            return
        status, handle, queue = model.engine.start_request_ids(
            model.name, model.loader, request.ids, request.fields
        )
        if status != AsStatus.ALLSPARK_SUCCESS:
            yield request.refused(status, model.engine.last_error())
            return
        running = Running(request, handle, queue)
        self._running[queue.request_id] = running
        self._completions.attach(queue._native, only_end=running.is_read_at_end)
        if job.started is not None:
            job.started(handle)

    def _read(self) -> Iterator[Response]:
        for request_id in self._completions.drain():
            running = self._running.get(request_id)
            if running is None:
                continue
            response = running.read()
            if running.is_done:
                del self._running[request_id]
                self._release([running.handle])
            if response is not None:
                yield response

    def _release(self, handles: list[RequestHandle]) -> None:
        model = self._model
        if model.max_outputs is not None:
            # A request that is stopped, here or at a stop word, keeps its place until the step that
            # runs has ended. The next start would be refused.
            model.engine.stop_request(model.name, handles)
            model.engine.sync_request(model.name, handles)
        model.engine.release_request(model.name, handles)

    def close(self) -> None:
        """Stops what still runs."""
        self._release([running.handle for running in self._running.values()])
        self._running.clear()


@dataclass
class Request:
    """What a job asks of the engine."""

    model: ServedModel
    index: int
    ids: np.ndarray
    fields: dict[str, Any]
    ends: frozenset[int]  # the tokens that end it
    stream: bool

    def refused(self, status: AsStatus, message: str) -> Response:
        """The response where the engine did not start it."""
        return _failed(self.index, len(self.ids), _CODES.get(status, "internal_error"), message)


def plan(model: ServedModel, job: Job, stream: bool) -> Request | Response:
    """The request of a job, or the response that says why there is none."""
    if model.is_closed:
        return _failed(job.index, 0, "engine_unavailable", f"the model {model.name!r} is closed")
    try:
        ids, fields = job.prepare()
        ids = to_id_array(ids)
    except (TypeError, ValueError) as error:
        return _failed(job.index, 0, "invalid_request", str(error))
    except Exception as error:  # of a chat template that the user wrote
        logger.exception("prompt %d cannot be prepared", job.index)
        return _failed(job.index, 0, "internal_error", f"{type(error).__name__}: {error}")
    if len(ids) >= model.session_len:
        text = f"the prompt has {len(ids)} tokens; session_len, with output, is {model.session_len}"
        response = _failed(job.index, len(ids), "context_length_exceeded", text)
        response.finish_reason = "length"
        return response
    ends = end_ids(fields)
    others = fields["stop_words"] or fields["include_stop_str_in_output"]
    if not stream and not others and fields["skip_special_tokens"]:
        # Without the fields about text a request is decoded once, at its end.
        fields = {key: value for key, value in fields.items() if key not in TEXT_FIELDS}
    return Request(model, job.index, ids, fields, ends, stream)


def _failed(index: int, num_tokens: int, code: str, message: str) -> Response:
    return Response(
        index=index,
        input_token_len=num_tokens,
        finish_reason="error",
        error_code=code,
        error_message=message,
    )


class Running:
    """A request that was started."""

    def __init__(self, request: Request, handle: RequestHandle, queue: ResultQueue):
        self.handle = handle
        self.is_done = False
        self._queue = queue
        self._request = request
        self._is_text = "skip_special_tokens" in request.fields
        self._whole = Response(index=request.index, input_token_len=len(request.ids))

    @property
    def is_read_at_end(self) -> bool:
        """Whether nothing is read before the end. Reading is what finds stop strings."""
        return not self._request.stream and not self._is_text

    def read(self) -> Response | None:
        """What came; without streaming None until the end."""
        # Asked first: all tokens from before a terminal status are then in the queue.
        self.is_done = self._queue.finished
        if self.is_read_at_end and not self.is_done:
            return None
        piece = Response(index=self._whole.index, input_token_len=self._whole.input_token_len)
        if (elements := self._queue.GetNoWait()) is not None:
            self._add(elements, piece)
        self.is_done = self.is_done or self._queue.stop_word is not None
        piece.generate_token_len = self._whole.generate_token_len + len(piece.token_ids)
        if self.is_done:
            self._end(piece)
        if not self._request.stream:
            self._whole.extend(piece)
            return self._finish_whole() if self.is_done else None
        self._whole.generate_token_len = piece.generate_token_len
        return piece if self.is_done or piece.token_ids or piece.text else None

    def _add(self, elements: GeneratedElements | TextElements, piece: Response) -> None:
        ids = list(elements.ids_from_generate)
        includes_end = bool(self._request.fields.get("include_stop_str_in_output"))
        count = count_without_end(ids, self._request.ends, includes_end)
        piece.token_ids += ids[:count]
        if self._is_text:
            piece.text += elements.text  # type: ignore[union-attr]
        piece.cached_tokens = max(piece.cached_tokens, elements.prefix_cache_len)
        if self._request.fields.get("logprobs"):
            piece.logprobs = piece.logprobs or []
            # Lists are shorter by the end token where it was left out.
            rows = zip(
                ids[:count], elements.token_logprobs_list, elements.log_probs_list, strict=False
            )
            piece.logprobs += [{**dict(top), token: own} for token, own, top in rows]
        for tensors in elements.tensors_from_model_inference:
            piece.logits = joined(piece.logits, tensors.get("logits"))
            hidden = tensors.get("hidden_states")
            piece.last_hidden_state = joined(piece.last_hidden_state, hidden)

    def _end(self, piece: Response) -> None:
        reason = self._queue.finish_reason or "error"
        piece.finish_reason = _REASONS.get(reason, reason)
        if piece.finish_reason == "error":
            piece.error_code = "internal_error"
            piece.error_message = self._queue.error or f"the request was {reason}"

    def _finish_whole(self) -> Response:
        if not self._is_text:
            decoding = open_decoding(self._request.model.tokenizer)  # as it would stream
            self._whole.text = decoding.put(self._whole.token_ids) + decoding.flush()
        return self._whole
