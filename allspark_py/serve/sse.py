"""Server-sent events: frames, and an ASGI response that writes them as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any, Protocol, TypeVar

import orjson
from allspark.serve.errors import ApiError
from starlette.responses import Response

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def frame(value: Any, event: str | None = None) -> bytes:
    """One event."""
    data = b"data: " + orjson.dumps(value) + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data


def typed_frame(event: dict[str, Any]) -> bytes:
    """One event that is named after its type."""
    return frame(event, event["type"])


class Source(Protocol):
    """What a stream is made of. `start` is given the writer; `abort` is called once where the
    client went away."""

    def start(self, writer: Writer) -> None: ...

    def abort(self) -> None: ...


class Writer:
    """Writes to one client, never more at a time than it takes.

    `write` sends at once if the client takes it, without a task; what comes while the client does
    not is for the caller to keep: `is_free` says when, and `on_free` is called then.

    Args:
        send: that of ASGI.
        write_part: writes a part of the body at once, without what `send` costs; False where it
            cannot, and `send` is to be called. None: always.
    """

    __slots__ = (
        "_is_closing", "_is_planned", "_loop", "_pending", "_send", "_time", "_write_part",
        "end", "is_free", "last_write", "on_free",
    )  # fmt: skip

    def __init__(self, send: Send, write_part: Callable[[bytes], bool] | None = None):
        self._send = send
        self._write_part = write_part
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.Task[None] | None = None
        self.end: asyncio.Future[None] = self._loop.create_future()  # the last data is sent
        self._is_closing = False
        self._is_planned = False  # `on_free` is to be called again
        self.is_free = True  # whether `write` may be called
        self.on_free: Callable[[], None] = lambda: None
        self._time = self._loop.time
        self.last_write = self._time()

    def write(self, data: bytes, more: bool = True) -> None:
        """Sends data; with `more` False it is the last. Requires: is_free."""
        self.last_write = self._time()
        if more and self._write_part is not None and self._write_part(data):
            return
        self._is_closing = not more
        call = self._send({"type": "http.response.body", "body": data, "more_body": more})
        coroutine: Any = call.__await__()
        try:
            future = coroutine.send(None)  # mostly ends here: the transport took it
        except StopIteration:
            self._sent()
            return
        except Exception as error:
            self.fail(error)
            return
        self.is_free = False
        self._pending = self._loop.create_task(_finish(coroutine, future))
        self._pending.add_done_callback(self._finished)

    def offer(self, data: bytes) -> bool:
        """Sends data if the client takes it; False where it does not, and nothing is sent."""
        if not self.is_free:
            return False
        self.write(data)
        return True

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._pending = None
        self.is_free = True
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)
            return
        self._sent()
        self._call_on_free()

    def call_again(self) -> None:
        """Calls `on_free` once others had their turn: there is more to write than was made."""
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_planned = False
        self._call_on_free()

    def _call_on_free(self) -> None:
        if not self.is_free or self._is_closing or self.end.done():
            return
        try:
            self.on_free()
        except Exception as fault:
            self.fail(fault)

    def _sent(self) -> None:
        if self._is_closing and not self.end.done():
            self.end.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Ends the response where it is: the client sees that it is not whole."""
        if not self.end.done():
            self.end.set_exception(error)

    def cancel(self) -> None:
        """Gives up what is not sent, and all that belongs to the connection."""
        self.on_free = lambda: None
        self._write_part = None
        if self._pending is not None:
            self._pending.cancel()
        self.end.cancel()


class _Rest:
    """What is left of a coroutine that was begun outside a task and waits for `future`."""

    def __init__(self, coroutine: Any, future: Any):
        self._coroutine = coroutine
        self._future = future

    def __await__(self) -> Generator[Any, Any, None]:
        future = self._future
        while True:
            value = yield future
            try:
                future = self._coroutine.send(value)
            except StopIteration:
                return


async def _finish(coroutine: Any, future: Any) -> None:
    await _Rest(coroutine, future)


class EventStream(Response):
    """The response of a source of events. Where nothing else is sent, `keep_alive` is."""

    def __init__(
        self,
        source: Source,
        keep_alive_s: float,
        headers: dict[str, str] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ):
        super().__init__(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # nginx passes events on at once
                **(headers or {}),
            }
        )
        del self.headers["content-length"]
        self._source = source
        self._keep_alive_s = keep_alive_s
        self._keep_alive_data = keep_alive

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        state = scope.get("state", {})
        writer = None
        try:
            with state.get("at_once", contextlib.nullcontext)():
                await send(start)
                open_parts = state.get("open_parts")
                writer = Writer(state.get("send", send), open_parts() if open_parts else None)
                self._source.start(writer)
        except BaseException:
            self._source.abort()
            if writer is not None:
                writer.cancel()
            raise
        gone = asyncio.ensure_future(_gone(receive))
        end = writer.end
        self._keeper = loop.call_later(self._keep_alive_s, self._keep_alive, writer)
        try:
            await asyncio.wait({gone, end}, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                end.result()
            else:
                self._source.abort()
        except BaseException:
            self._source.abort()
            raise
        finally:
            self._keeper.cancel()
            writer.cancel()
            gone.cancel()

    def _keep_alive(self, writer: Writer) -> None:
        """Shows proxies and clients that the connection lives."""
        loop = asyncio.get_running_loop()
        left = writer.last_write + self._keep_alive_s - loop.time()
        if left <= 0 and writer.is_free:
            writer.write(self._keep_alive_data)
        self._keeper = loop.call_later(max(left, 1.0), self._keep_alive, writer)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


Result = TypeVar("Result")


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns; it is cancelled where the client goes away first.

    Raises:
        ApiError: the client went away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection", code="request_cancelled")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
