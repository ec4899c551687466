"""HTTP/1.1 over asyncio, as little of it as a measurement needs: a thousand streams must not keep
the client busier than the server. Needs httptools."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import httptools
from allspark.bench.outcome import RequestFailed
from allspark.remote.address import Address

_CONNECT_S = 30.0
# A connection that was closed while it was idle is lost at once, when a request is sent over it. A
# server that closes one later may have worked on the request.
_STALE_S = 0.1


class Reader(Protocol):
    """Takes an answer as it comes. A RequestFailed that it raises ends the exchange."""

    def begin(self, status: int, content_type: str) -> None:
        """The head of the answer."""

    def body(self, data: bytes) -> None:
        """A part of the body."""

    def end(self, is_cut: bool) -> None:
        """The body has ended; `is_cut`: because the connection did."""


class Limit(NamedTuple):
    """The time for a whole answer. It includes opening a connection, and a second one."""

    seconds: float
    end: float  # by the clock of the loop


class Connection(asyncio.Protocol):
    """One connection to a server, for one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None
        self._sent = 0.0
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._content_type = ""
        self._has_length = False
        self._has_bytes = False
        self._has_head = False
        self._is_ended = False

    async def exchange(self, data: bytes, reader: Reader, limit: Limit) -> None:
        """Sends a request, and gives its answer to the reader.

        Raises:
            RequestFailed: the reader's, or that of a connection that failed.
            Stale: the connection was lost before a server could have worked on the request.
        """
        loop = asyncio.get_running_loop()
        self._begin_answer()
        self._parser = httptools.HttpResponseParser(self)
        self._reader = reader
        self._done = loop.create_future()
        late = RequestFailed(f"no whole answer within {limit.seconds:g} s")
        timer = loop.call_at(limit.end, self._fail, late)
        assert self._transport is not None
        self._sent = loop.time()
        self._transport.write(data)
        try:
            await self._done
        finally:
            timer.cancel()
            self._reader = None
            if not self._is_ended:
                self.close()

    def close(self) -> None:
        """Ends the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _finish(self, is_cut: bool) -> None:
        if self._reader is None or self._done is None or self._done.done():
            return
        self._tell(self._reader.end, is_cut)
        if not self._done.done():
            self._done.set_result(None)

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls the reader; what it raises is the failure of the exchange."""
        try:
            call(*arguments)
        except RequestFailed as error:
            self._fail(error)

    # asyncio's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._reader is None:
            self.close()  # nobody asked for it
            return
        self._has_bytes = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(RequestFailed(f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        if not self._has_head:
            since = self._done.get_loop().time() - self._sent
            is_stale = not self._has_bytes and since < _STALE_S
            kind = Stale if is_stale else RequestFailed
            self._fail(kind("the server closed the connection without an answer"))
        else:
            # A body without a length ends with its connection.
            self._finish(is_cut=self._has_length or exc is not None)

    # httptools' calls, which must not raise.

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lower in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and self._reader is not None:
            self._has_head = True
            self._tell(self._reader.begin, status, self._content_type)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None and self._done is not None and not self._done.done():
            self._tell(self._reader.body, data)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if not self._has_head:  # 100 Continue, and the like
            return
        self._is_ended = True
        if not self._parser.should_keep_alive():
            self.close()
        self._finish(is_cut=False)


class Stale(RequestFailed):
    """The connection ended at once, before the first byte of an answer."""


class Connections:
    """The connections to a server, which are kept for the next request. They go nowhere else: no
    proxy is used, and no redirection followed."""

    def __init__(self, address: Address):
        self._address = address
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    async def exchange(self, data: bytes, reader: Reader, timeout: float) -> None:
        """Sends a request over a connection that is free, or a new one. Raises RequestFailed."""
        limit = Limit(timeout, asyncio.get_running_loop().time() + timeout)
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                await self._exchange(connection, data, reader, limit)
                return
            except Stale:  # it had been closed while it was idle
                break
        await self._exchange(await self._open(limit), data, reader, limit)

    async def _exchange(
        self, connection: Connection, data: bytes, reader: Reader, limit: Limit
    ) -> None:
        try:
            await connection.exchange(data, reader, limit)
        finally:  # also an answer that is an error leaves it usable
            if connection.is_open:
                self._idle.append(connection)

    async def _open(self, limit: Limit) -> Connection:
        address, loop = self._address, asyncio.get_running_loop()
        wait = min(limit.end - loop.time(), _CONNECT_S)
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(Connection, address.host, address.port, ssl=self._tls), wait
            )
        except asyncio.TimeoutError:
            raise RequestFailed(f"cannot connect within {wait:.3g} s") from None
        except OSError as error:
            raise RequestFailed(f"cannot connect: {error}") from None
        return connection

    async def close(self) -> None:
        """Closes those that are idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes them in its next round
