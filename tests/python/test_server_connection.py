"""A connection of the server, driven without a network: what a client may make it hold and do."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

import uvicorn  # noqa: E402
from allspark.serve.connection import MAX_WAITING, Connection  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402
from support.raw_http import request  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

CHUNKED = {"transfer_encoding": "chunked"}
BOUND = 4 * ServerSettings.max_header_bytes


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self, **extra):
        super().__init__(extra)
        self.written = b""
        self.is_closed = False

    def write(self, data):
        self.written += data

    def can_write_eof(self):
        return False

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_closed

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Client:
    """A connection, with the requests that its application was given and did not answer yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client_timeout=60.0, **extra):
        self.loop = loop
        self.scopes: list = []
        self.answers: list[asyncio.Future] = []
        config = uvicorn.Config(
            self._app, interface="asgi3", proxy_headers=False, lifespan="off", log_config=None
        )
        self.transport = Transport(**extra)
        self.connection = Connection(
            ServerSettings(client_timeout=client_timeout),
            config=config,
            server_state=ServerState(),
            app_state={},
            _loop=loop,
        )
        self.connection.connection_made(self.transport)

    async def _app(self, scope, receive, send):
        self.scopes.append(scope)
        self.answers.append(answer := self.loop.create_future())
        await answer
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def send(self, data: bytes) -> bytes:
        """What is written in answer to one read."""
        self.transport.written = b""
        self.connection.data_received(data)
        self.run()
        return self.transport.written

    def answer(self) -> bytes:
        """Ends the last request that the application was given: what is written."""
        self.transport.written = b""
        self.answers[-1].set_result(None)
        self.run()
        return self.transport.written

    def run(self) -> None:
        for _ in range(3):  # steps of a task
            self.loop.run_until_complete(asyncio.sleep(0))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def error_of(written: bytes) -> tuple[int, dict]:
    head, _, body = written.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


# Trailers, which are no headers.


def test_trailers_are_dropped(loop):
    """Whether they come in the read of the headers or after it."""
    head = request("POST", "/v1/chat/completions", **CHUNKED)
    trailers = b"0\r\nauthorization: Bearer k\r\nx-request-id: z\r\nexpect: 100-continue\r\n\r\n"
    for reads in ([head + b"1\r\n{\r\n" + trailers], [head + b"1\r\n{\r\n", trailers]):
        client = Client(loop)
        for data in reads:
            client.send(data)
        (scope,) = client.scopes
        names = {name for name, _ in scope["headers"]}
        assert names == {b"host", b"transfer-encoding"}
        assert not client.connection.expect_100_continue
        assert client.answer().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "begin, line",
    [
        (b"0\r\n", b"x: " + b"y" * 4000 + b"\r\n"),
        (b"0\r\nx: ", b"y" * 4000),
        (b"1;x=", b"y" * 4000),
    ],
    ids=["trailers", "one trailer", "extension of a chunk"],
)
def test_what_stands_around_chunks_is_bounded(loop, begin, line):
    client = Client(loop)
    client.send(request("POST", "/v1/chat/completions", **CHUNKED) + b"1\r\n{\r\n" + begin)
    size, written = 0, b""
    while not written:
        assert size <= BOUND
        written = client.send(line)
        size += len(line)
    status, error = error_of(written)
    assert (status, error["code"]) == (431, "headers_too_large")
    assert error["message"] == f"the lines around the body's chunks have more than {BOUND} bytes"
    assert client.connection.headers is client.scopes[0]["headers"]
    assert len(client.connection.headers) == 2


def test_chunks_have_no_bound_of_lines(loop):
    """Small ones have more bytes around them than in them."""
    client = Client(loop)
    client.send(request("POST", "/v1/chat/completions", **CHUNKED))
    for _ in range(2 * BOUND // 1000):
        assert client.send(b"1;x=" + b"y" * 990 + b"\r\n \r\n") == b""
    client.send(b"0\r\n\r\n")
    assert client.answer().startswith(b"HTTP/1.1 200")


# Many requests in one read.


OFFER = {"connection": "Upgrade", "upgrade": "h2c"}


@pytest.mark.parametrize("headers", [{}, OFFER], ids=["plain", "offers"])
def test_requests_that_wait_are_bounded(loop, headers):
    """Those within the bound are answered in their order, the last one with the news."""
    client = Client(loop)
    one = b"".join(request("GET", f"/{i}", **headers) for i in range(5000))
    assert client.send(one) == b""
    assert len(client.connection.pipeline) == MAX_WAITING
    for number in range(MAX_WAITING + 1):
        assert client.scopes[-1]["path"] == f"/{number}" and not client.transport.is_closed
        head = client.answer()
        assert head.startswith(b"HTTP/1.1 200")
        assert (b"connection: close" in head) == (number == MAX_WAITING)
    assert client.transport.is_closed and len(client.scopes) == MAX_WAITING + 1


# Errors of a connection.


@pytest.mark.parametrize("path, is_anthropic", [("/v1/messages", True), ("/v1/models", False)])
def test_errors_have_the_shape_of_the_route(loop, path, is_anthropic):
    client = Client(loop)
    client.send(request("POST", path, **CHUNKED))
    written = client.send(b"nonsense\r\n")
    shown = json.loads(written.partition(b"\r\n\r\n")[2])
    assert written.startswith(b"HTTP/1.1 400")
    assert shown["error"]["message"] == "the request is no HTTP"
    assert (shown.get("type") == "error") == is_anthropic


# Bounds of time.


@pytest.fixture
def clock(loop, monkeypatch):
    """The loop's time, which a test moves on."""
    clock = [0.0]
    monkeypatch.setattr(loop, "time", lambda: clock[0])
    return clock


def test_a_body_has_a_second_more_for_each_8192_bytes(loop, clock):
    client = Client(loop, client_timeout=10)
    client.send(request("POST", "/v1/chat/completions", content_length=10**6))
    clock[0] += 9
    client.send(b"x" * 5 * 8192)
    for seconds in (0.9, 5.0):  # since the begin: 9.9 and 14.9
        clock[0] += seconds
        assert client.send(b"") == b""
    clock[0] += 0.2
    status, error = error_of(client.send(b""))
    assert (status, error["message"]) == (408, "the body did not come within 15 s")


def test_without_a_timeout_a_client_may_be_slow(loop, clock):
    client = Client(loop, client_timeout=0)
    for data in (b"POST /v1/completions HTTP/1.1\r\n", b"content-length: 2\r\n\r\n", b"{"):
        clock[0] += 1e6
        assert client.send(data) == b"" and not client.transport.is_closed
    client.send(b"}")
    assert client.answer().startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("seconds", [1, 65_536, 2**40])
def test_any_timeout_is_taken(loop, seconds):
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    with listener, peer, accepted:
        Client(loop, seconds, socket=accepted)
        idle = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert idle == min(max(1, seconds // 2), 32_767)
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        user = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert user == min(1000 * seconds, 2**31 - 1)
