"""Connection: a client's connection, whose client cannot hold it by being slow, silent or gone.

One object for each connection, made by uvicorn; all calls come on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import httptools
import orjson
from allspark.serve.errors import ApiError
from allspark.serve.http import shape
from allspark.serve.settings import ServerSettings
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

# A body that comes more slowly than this, after its first client_timeout seconds, is given up.
MIN_BYTES_PER_S = 8192
# Requests that wait on a connection for the answer before theirs. Beyond them nothing is read, so
# that a client that goes away is not noticed before it is written to.
MAX_PIPELINED = 16
# The most that may wait: one read has thousands of short requests. The connection ends after them.
MAX_WAITING = 1000
# How long a refused connection is still read, for nobody.
LINGER_S = 1.0
# Linux's bounds for what notices a peer that vanished.
_MAX_KEEPALIVE_S = 32_767
_MAX_USER_TIMEOUT_MS = (1 << 31) - 1
_LENGTHS = (b"content-length", b"transfer-encoding")
_ERROR_HEADERS = (
    b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with bounds of time for what a client sends and takes.

    A client has client_timeout for the headers of a request, and for the body as long and what its
    size takes at MIN_BYTES_PER_S; then it gets 408. One that vanishes, or that takes nothing of
    what is written for so long, is gone: the system closes its connection.
    """

    def __init__(self, server_settings: ServerSettings, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._timeout = server_settings.client_timeout
        # Of headers while they are incomplete, the whole of them is for the Gate to judge; and of
        # what stands between and after the parts of a body.
        self._max_line_bytes = 4 * server_settings.max_header_bytes
        self._is_refused = False
        self._is_head_known = False  # what comes from the parser was read by another one
        self._has_begun = False  # a request, which is not complete
        self._is_in_headers = False
        self._begin = 0.0
        self._line_bytes = 0  # of whole reads in which no part of a request began or ended
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        # Those before the last one, which may still be answered; in their order.
        self._earlier: deque[RequestResponseCycle] = deque()

    # Of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _notice_death(transport, self._timeout)
        self._begin = self.loop.time()
        self._arm(self._timeout)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._line_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "the request is no HTTP", code="invalid_http"))
            return
        if self.transport.is_closing():
            self._disarm()
            return
        if self._has_begun and self._line_bytes > self._max_line_bytes:
            part = "headers" if self._is_in_headers else "lines around the body's chunks"
            message = f"the {part} have more than {self._max_line_bytes} bytes"
            self._refuse(ApiError(431, message, code="headers_too_large"))
            return
        if not self._has_begun:
            self._disarm()
        elif self._timer is None:
            self._arm(self._timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        for cycle in self._earlier:  # uvicorn tells the last one alone
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            self._pass_offer()

    def _pass_offer(self) -> None:
        """Goes on after a head that offers another protocol. Such offers are not taken; Java's
        client makes one in every request. The parser would skip the body, so that is left to a new
        one, which begins with its length."""
        lengths = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in _LENGTHS]
        self.parser = httptools.HttpRequestParser(self)
        self._is_head_known = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lengths) + b"\r\n")
        self._is_head_known = False

    # Of the parser.

    def on_message_begin(self) -> None:
        if self._is_head_known:
            return
        if len(self.pipeline) >= MAX_WAITING:
            raise ValueError("too many requests wait")  # which ends the parser, as nonsense does
        super().on_message_begin()
        self._has_begun = self._is_in_headers = True
        self._begin = self.loop.time()
        self._line_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._is_head_known:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # else a trailer, which is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_head_known:
            return
        earlier = self.cycle
        super().on_headers_complete()
        if self.cycle is not earlier and self.cycle is not None:
            # Weakly: the cycle has the scope, and should end with its task.
            of_cycle = weakref.ref(self.cycle)
            self.scope["state"]["open_parts"] = functools.partial(_open_parts, of_cycle)
            self.scope["state"]["at_once"] = functools.partial(_at_once, of_cycle)
        self._is_in_headers = False
        self._line_bytes = 0
        if earlier is None or earlier.response_complete:
            return
        while self._earlier and self._earlier[0].response_complete:
            self._earlier.popleft()
        self._earlier.append(earlier)
        if len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._line_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._line_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._has_begun = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_begun and self.expect_100_continue and not self._body_bytes:
            # The client was not told to send the body. What it sends next may be another request.
            self.transport.close()

    # Bounds.

    def _arm(self, seconds: float) -> None:
        if self._timeout:
            self._timer = self.loop.call_later(seconds, self._check)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Ends a connection whose request is late."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self._others():  # perhaps nothing is read meanwhile
            self._arm(self._timeout)
            return
        end = self._begin + self._timeout + self._body_bytes / MIN_BYTES_PER_S
        if (left := end - self.loop.time()) > 0:
            self._arm(left)
        elif not self._has_begun:
            self.transport.close()
        else:
            part = "headers" if self._is_in_headers else "body"
            seconds = round(self.loop.time() - self._begin)
            message = f"the {part} did not come within {seconds} s"
            self._refuse(ApiError(408, message, code="request_timeout"))

    def _own(self) -> RequestResponseCycle | None:
        """That of the request whose body comes."""
        return self.cycle if self._has_begun and not self._is_in_headers else None

    def _others(self) -> list[RequestResponseCycle]:
        """Those that are still to be answered, without that one."""
        known = [*self._earlier, self.cycle]
        own = self._own()
        return [each for each in known if each and each is not own and not each.response_complete]

    def _refuse(self, error: ApiError) -> None:
        """Reads no more, and closes the connection once earlier requests are answered; the error is
        sent where there are none, and no other answer has begun."""
        self._disarm()
        self._is_refused = True
        own, others = self._own(), self._others()
        if others:
            others[-1].keep_alive = False
            if own is not None:
                own.disconnected = True
                own.message_event.set()
            return
        if own is None or not own.response_started:
            body = orjson.dumps(error.to_openai() if own is None else shape(error, own.scope))
            headers = _ERROR_HEADERS % len(body)
            self.transport.write(STATUS_LINE[error.status] + headers + body)
        self._linger()

    def _linger(self) -> None:
        """Closes the connection, once the client could read what was sent. With bytes of the client
        left unread, the system would reset it at once, and the answer would be lost."""
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.flow.resume_reading()
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


class PartWriter:
    """Writes parts of a body of unknown length, as the cycle's `send` does, for a fraction of what
    that costs.

    It keeps the cycle alive, and so is for those who end with it.
    """

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._flow = cycle.flow

    def __call__(self, data: bytes) -> bool:
        """False where `send` has more to do than to write; nothing was written then."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class _HeldWrites:
    """Stands in for a cycle's transport, and keeps what is written."""

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._data: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._data.append(data)

    def flush(self) -> None:
        data, self._data = self._data, []
        if data:
            self._transport.write(b"".join(data))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@contextlib.contextmanager
def _at_once(of_cycle: weakref.ref[RequestResponseCycle]) -> Iterator[None]:
    """What an answer writes inside goes out as one write: a call of the system and a wake of the
    client for head and first part, not for each."""
    cycle = of_cycle()
    if cycle is None:
        yield
        return
    transport = cycle.transport
    held = _HeldWrites(transport)
    cycle.transport = held  # type: ignore[assignment]
    try:
        yield
    finally:
        cycle.transport = transport
        held.flush()


def _open_parts(of_cycle: weakref.ref[RequestResponseCycle]) -> PartWriter | None:
    """The writer of an answer that has begun; None where its body is not written in parts."""
    cycle = of_cycle()
    if cycle is None or not cycle.chunked_encoding or cycle.scope["method"] == "HEAD":
        return None
    return PartWriter(cycle)


def _notice_death(transport: asyncio.Transport, timeout_s: float) -> None:
    """Lets the system close a connection whose peer vanished, whether it is written to or not, and
    one whose peer takes nothing."""
    peer = transport.get_extra_info("socket")
    if not timeout_s or peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        socket.TCP_KEEPIDLE: min(max(1, round(timeout_s / 2)), _MAX_KEEPALIVE_S),
        socket.TCP_KEEPINTVL: min(max(1, round(timeout_s / 6)), _MAX_KEEPALIVE_S),
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: min(round(1000 * timeout_s), _MAX_USER_TIMEOUT_MS),
    }
    for option, value in options.items():
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
