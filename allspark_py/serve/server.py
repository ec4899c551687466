"""Server: runs the application until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import uvicorn
from allspark.serve.app import make_app
from allspark.serve.batches.service import Batches
from allspark.serve.catalog import Catalog
from allspark.serve.connection import Connection
from allspark.serve.settings import ServerSettings
from allspark.serve.state import ServerState

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(settings: ServerSettings) -> list[socket.socket]:
    """Takes the address and the port, where nobody is answered yet.

    Raises:
        OSError: another program has the port, or this machine has no such address.
    """
    host, port = settings.server_name, settings.server_port
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(made := socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((address[0], port, *address[2:]))
            port = port or made.getsockname()[1]
    except OSError as error:
        for each in sockets:
            each.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sockets


class Server:
    """Serves the models of a catalog.

    Args:
        on_start: called with the port once requests are taken.
        make_app: makes the ASGI application.
    """

    def __init__(
        self,
        catalog: Catalog,
        settings: ServerSettings | None = None,
        on_start: Callable[[int], None] = lambda port: None,
        make_app: Callable[[ServerState], Any] = make_app,
    ):
        self.state = ServerState(catalog, settings or ServerSettings())
        self._batches = self.state.batches = Batches(self.state)
        self._on_start = on_start
        self._uvicorn = _Uvicorn(self._config(make_app(self.state)), self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._early_signal = False

    def _config(self, app: Any) -> uvicorn.Config:
        settings = self.state.settings
        return uvicorn.Config(
            app,
            host=settings.server_name,
            port=settings.server_port,
            loop="uvloop",
            http=cast(Any, functools.partial(Connection, settings)),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=cast(int, settings.idle_timeout),
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            timeout_graceful_shutdown=1,
        )

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `stop`, SIGTERM or SIGINT; signals only where this is the main thread.

        Args:
            sockets: of `bind`; None: they are made now.
        """
        try:
            with self._signals():
                self._uvicorn.run(sockets)
        finally:
            try:
                self.state.responses.close()
            finally:
                self._batches.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Keeps a signal that comes before the event loop takes signals: asyncio would answer it
        by cancelling a task, which code that is just being imported may swallow."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: one that Python did not install, and cannot.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._early_signal = True

    def _take_signals(self) -> None:
        """On the event loop, once it runs in the main thread."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop)
        if self._early_signal:
            self._stop()

    def stop(self) -> None:
        """Begins to shut down: new requests are refused, those that run end within
        shutdown_timeout. A second call ends them at once. From any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._drain is not None:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            return
        self.state.is_draining = True
        self._drain = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await self._batches.stop()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.state.idle(), self.state.settings.shutdown_timeout)
        self._uvicorn.should_exit = True

    def _started(self, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        if self.state.is_draining:  # a signal came before
            return
        self._batches.start()
        self._on_start(port)


class _Uvicorn(uvicorn.Server):
    """uvicorn whose signals begin a shutdown that still answers: by itself it would first close the
    port."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._server = server

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._server._started(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        await self._server.state.responses.end()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._server._take_signals()
        yield
