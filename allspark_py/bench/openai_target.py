"""OpenAITarget: a server of OpenAI's protocol. Needs httptools and orjson."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from allspark.bench.connection import Connections
from allspark.bench.load import Now
from allspark.bench.outcome import Outcome, RequestFailed
from allspark.bench.workload import Prompt, Request
from allspark.remote.address import Address
from allspark.remote.errors import CUT, NO_WORDS, RemoteError, message_of
from allspark.remote.events import DONE, Delta, EventReader, delta_of, usage_of

ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
_EARLY = "the stream ended before the answer did"


@dataclass(frozen=True)
class Asking:
    """How a server is asked.

    Args:
        endpoint: "chat" or "completions".
        extra: fields of every request. They replace those that are made here; None removes one.
        timeout: seconds for a whole answer.
    """

    model: str
    endpoint: str = "chat"
    is_streamed: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0


class OpenAITarget:
    """Keeps its connections open between requests; one is opened where none is free."""

    def __init__(self, address: Address, headers: Mapping[str, str], asking: Asking):
        self._asking = asking
        self._connections = Connections(address)
        lines = {
            "Host": address.authority,
            "User-Agent": "allspark-bench",
            "Accept": "text/event-stream" if asking.is_streamed else "application/json",
            "Content-Type": "application/json",
            **headers,
        }
        path = address.path + ENDPOINTS[asking.endpoint]
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._head = f"POST {path} HTTP/1.1\r\n{head}Content-Length: ".encode("latin-1")

    async def serve(self, request: Request, outcome: Outcome, now: Now) -> None:
        """See Target. TTFT includes opening a connection, where one is opened."""
        body = orjson.dumps(body_of(request, self._asking))
        data = b"%s%d\r\n\r\n%s" % (self._head, len(body), body)
        reader = _Reader(outcome, now, self._asking.is_streamed)
        await self._connections.exchange(data, reader, self._asking.timeout)

    async def close(self) -> None:
        """Closes the connections."""
        await self._connections.close()


def body_of(request: Request, asking: Asking) -> dict[str, Any]:
    """The body of a request; greedy, unless `extra` says otherwise."""
    body: dict[str, Any] = {
        "model": asking.model,
        "max_tokens": request.num_output,
        "temperature": 0,
        "stream": asking.is_streamed,
    }
    if asking.is_streamed:
        body["stream_options"] = {"include_usage": True}
    if asking.endpoint == "chat":
        body["messages"] = _messages(request.prompt)
    else:
        body["prompt"] = request.prompt
    body.update(asking.extra)
    return {name: value for name, value in body.items() if value is not None}


def _messages(prompt: Prompt) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


class _Reader:
    """Notes the times of chunks with output, and the usage."""

    def __init__(self, outcome: Outcome, now: Now, is_streamed: bool):
        self._outcome = outcome
        self._now = now
        self._is_streamed = is_streamed
        self._status = 0
        self._whole: list[bytes] | None = None  # the body of an answer that is no stream
        self._events = EventReader()
        self._has_ended = False

    def begin(self, status: int, content_type: str) -> None:
        self._status = status
        is_stream = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        if status != 200 or not self._is_streamed:
            self._whole = []
        elif not is_stream:
            kind = content_type or "of no content type"
            raise RequestFailed(f"the answer is {kind}, not a stream of events")

    def body(self, data: bytes) -> None:
        if self._whole is not None:
            self._whole.append(data)
            return
        arrived = self._now()
        for payload in self._events.feed(data):
            self._event(payload, arrived)

    def _event(self, payload: bytes, arrived: float) -> None:
        if payload == DONE:
            self._has_ended = True
            return
        event = _to_object(payload)
        if event.get("error"):
            raise RequestFailed(f"in the stream: {message_of(event) or NO_WORDS}")
        delta = _delta_of(event)
        if delta.has_output:
            self._outcome.times.append(arrived)
        self._has_ended = self._has_ended or delta.finish_reason is not None
        self._count(event)

    def _count(self, answer: dict[str, Any]) -> None:
        usage = usage_of(answer)
        if usage is not None:
            self._outcome.prompt_tokens = usage.prompt
            self._outcome.output_tokens = usage.output

    def end(self, is_cut: bool) -> None:
        self._outcome.end = self._now()
        if self._whole is None:
            for payload in self._events.end():
                self._event(payload, self._outcome.end)
            if not self._has_ended:
                raise RequestFailed(CUT if is_cut else _EARLY)
            return
        body = b"".join(self._whole)
        if self._status != 200:
            raise RequestFailed(f"HTTP {self._status}: {RemoteError.of(self._status, body)}")
        if is_cut:
            raise RequestFailed(CUT)
        answer = _to_object(body)
        if answer.get("error"):
            raise RequestFailed(f"in the answer: {message_of(answer)}")
        self._outcome.whole_has_output = _delta_of(answer).has_output
        self._count(answer)


def _delta_of(answer: dict[str, Any]) -> Delta:
    try:
        return delta_of(answer)
    except RemoteError as error:
        raise RequestFailed(error.message) from None


def _to_object(data: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        shown = data[:60].decode(errors="replace")
        raise RequestFailed(f"the server sent what is no JSON object: {shown!r}")
    return found
