"""Relay: passes requests on to another server, and its answers back in the pieces that come.

It lets the page stand in front of a server that runs elsewhere. Keys and errors are that server's.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import httpx2
from allspark.serve.errors import ApiError
from allspark.serve.http import Gate, add_error_handlers
from allspark.serve.json_body import read_body
from allspark.serve.routes import information, page
from allspark.serve.sse import Receive, Send, frame, until_gone
from allspark.serve.state import ServerState
from fastapi import FastAPI
from starlette.requests import Request

logger = logging.getLogger("allspark.serve")

Header = tuple[bytes, bytes]
# An answer may take any time to begin and to go on; the client decides how long it waits.
_TIMEOUT = httpx2.Timeout(None, connect=10)
# They are about one connection, or the sender makes them anew.
_NOT_PASSED = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection request-id te "
    b"trailer transfer-encoding upgrade x-request-id".split()
)
# Cookies of this host are other programs' and no business of that server.
_NOT_ASKED = _NOT_PASSED | {b"host", b"content-length", b"cookie", b"expect"}
_NOT_ANSWERED = _NOT_PASSED | {b"set-cookie", b"date", b"server"}


def make_page_app(state: ServerState, url: httpx2.URL) -> Any:
    """The ASGI application of the page alone: /v1 is answered by the server at `url`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    for router in (information.health_router(state), page.make_router(), page.make_home_router()):
        app.include_router(router)
    app.add_route("/v1/{path:path}", Relay(url, state.settings.max_body_bytes))  # type: ignore[arg-type]
    return Gate(app, state)


def server_url(text: str) -> httpx2.URL:
    """The URL of a server, without /v1 at its end.

    Raises:
        ValueError: it is none.
    """
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{text} is no URL: {error}") from None
    is_plain = not (url.userinfo or url.query or url.fragment)
    if url.scheme not in ("http", "https") or not url.host or not is_plain:
        raise ValueError("the URL of a server must have the form http[s]://HOST[:PORT][/PATH]")
    return url.copy_with(path=url.path.rstrip("/").removesuffix("/v1"))


class Relay:
    """An ASGI application: requests go to the same path below `url`."""

    def __init__(self, url: httpx2.URL, max_body_bytes: int):
        self._url = url
        self._max_body_bytes = max_body_bytes
        self._ssl = ssl.create_default_context()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        body = await read_body(Request(scope, receive), self._max_body_bytes)
        request = httpx2.Request(
            scope["method"], self._target(scope), headers=_asked(scope), content=body
        )
        answer = _Answer(send)
        try:
            await until_gone(receive, self._pass_on(request, answer))
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            if not answer.has_begun:
                message = f"{self._url} cannot be reached: {reason}"
                raise ApiError(502, message, code="upstream_unreachable") from None
            logger.warning("%s broke off an answer: %s", self._url, reason)
            await answer.break_off(f"{self._url} broke off the answer: {reason}")
        except ApiError:  # the client went away, and with it the request to the server
            if not answer.has_begun:
                raise

    def _target(self, scope: Any) -> httpx2.URL:
        path = scope["path"]
        # Another server could read such a path as one that is not below /v1.
        if {".", ".."} & set(path.split("/")):
            raise ApiError(404, "Not Found")
        target = quote(path, safe="/:@!$&'()*+,;=~").encode()
        if query := scope["query_string"]:
            target += b"?" + quote(query, safe="/:@!$&'()*+,;=~?%").encode()
        return self._url.copy_with(raw_path=self._url.raw_path.rstrip(b"/") + target)

    async def _pass_on(self, request: httpx2.Request, answer: _Answer) -> None:
        # A client for each request: it ends with it, and nobody has to close it later. Proxies of
        # the environment are for other hosts than one's own server.
        async with httpx2.AsyncClient(verify=self._ssl, timeout=_TIMEOUT, trust_env=False) as own:
            response = await own.send(request, stream=True)
            await answer.begin(response)
            async for piece in response.aiter_raw():
                await answer.put(piece)
            await answer.end()


class _Answer:
    """What the client has been sent."""

    def __init__(self, send: Send):
        self._send = send
        self._is_stream = False
        self.has_begun = False

    async def begin(self, response: httpx2.Response) -> None:
        self.has_begun = True
        kind = response.headers.get("content-type", "")
        self._is_stream = kind.startswith("text/event-stream")
        headers = _without(response.headers.raw, _NOT_ANSWERED)
        start = {"type": "http.response.start", "status": response.status_code}
        await self._send({**start, "headers": headers})

    async def put(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def break_off(self, reason: str) -> None:
        """Tells the client of a stream. Others see a connection that ends too early."""
        if self._is_stream:
            error = ApiError(502, reason, code="upstream_unreachable")
            await self.end(b"\n\n" + frame(error.to_openai()))


def _asked(scope: Any) -> list[Header]:
    headers = _without(scope["headers"], _NOT_ASKED)
    return [*headers, (b"x-request-id", scope["state"]["request_id"].encode())]


def _without(headers: Iterable[Header], dropped: frozenset[bytes]) -> list[Header]:
    """The headers but those dropped, and those that the header Connection names."""
    pairs = [(key.lower(), value) for key, value in headers]
    named = {
        name.strip().lower()
        for key, value in pairs
        if key == b"connection"
        for name in value.split(b",")
    }
    return [(key, value) for key, value in pairs if key not in dropped | named]
