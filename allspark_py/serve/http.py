"""Pure ASGI middleware: request ids, keys, limits and errors, for every route."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from allspark.serve.choice import request_id as current_request_id
from allspark.serve.errors import ApiError
from allspark.serve.sse import Message, Receive, Send
from allspark.serve.state import ServerState
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

logger = logging.getLogger("allspark.serve")

App = Callable[[Any, Receive, Send], Awaitable[None]]

# Routes without a key: whether the server is up, and the pages, which ask for the key themselves.
OPEN_ROUTES = frozenset({"/health", "/", "/ui", "/docs", "/openapi.json"})  # and below /ui
# POST routes that are answered while the models sleep and while the server shuts down.
ALWAYS = frozenset({"/sleep", "/wakeup", "/abort_request"})
_ALWAYS_OF_ONE = re.compile(r"/v1/responses/[^/]+/cancel")
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Gate:
    """Stands before all routes.

    It gives each request an id, checks its key, refuses what is beyond the limits, and counts what
    runs. It is no BaseHTTPMiddleware, which would hide that a client went away.
    """

    def __init__(self, app: App, state: ServerState):
        self._app = app
        self._state = state
        self._keys = [hashlib.sha256(key.encode()).digest() for key in state.settings.api_keys]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # answered as GET; uvicorn leaves out the body
            scope = {**scope, "method": "GET"}
        headers = {key: value for key, value in scope["headers"]}
        request_id = _request_id(headers.get(b"x-request-id", b""))
        current_request_id.set(request_id)
        # A stream sends its events past what stands between, which only looks at the beginning.
        scope.setdefault("state", {}).update(request_id=request_id, send=send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = _id_headers(request_id, scope)
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        path = scope["path"]
        is_always = path in ALWAYS or _ALWAYS_OF_ONE.fullmatch(path)
        is_work = scope["method"] == "POST" and not is_always
        try:
            self._check_headers(scope["headers"])
            if not _is_open(path) and scope["method"] != "OPTIONS":
                scope["state"]["api_key"] = self._check_key(headers)
            if is_work:
                self._check_room()
        except ApiError as error:
            await answer(error, scope)(scope, receive, send_with_id)
            return
        if is_work:
            self._state.begin()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if is_work:
                self._state.end()

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        size = sum(len(key) + len(value) for key, value in headers)
        bound = self._state.settings.max_header_bytes
        if size > bound:
            message = f"the headers have {size} bytes; the bound is {bound}"
            raise ApiError(431, message, code="headers_too_large")

    def _check_key(self, headers: dict[bytes, bytes]) -> bytes:
        """The digest of the request's key; empty where the server is open."""
        if not self._keys:
            return b""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key] if scheme.lower() == b"bearer" else []
        given.append(headers.get(b"x-api-key", b""))
        digests = [hashlib.sha256(each.strip()).digest() for each in given]
        # All are compared, so that the time tells nothing.
        is_known = [any([hmac.compare_digest(d, own) for own in self._keys]) for d in digests]
        if not any(is_known):
            message = "the key is missing or wrong; give it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")
        return digests[is_known.index(True)]

    def _check_room(self) -> None:
        state = self._state
        if state.is_draining:
            raise ApiError(503, "the server is shutting down", code="engine_unavailable")
        if state.is_sleeping:
            raise ApiError(503, "the models sleep; POST /wakeup wakes them", code="sleeping")
        bound = state.settings.max_concurrent_requests
        if bound and state.num_running >= bound:
            message = f"{state.num_running} requests run; the bound is {bound}"
            raise ApiError(429, message, code="too_many_requests")


def _is_open(path: str) -> bool:
    return path in OPEN_ROUTES or path.startswith("/ui/")


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if _SAFE_ID.fullmatch(text) else uuid.uuid4().hex


def _id_headers(request_id: str, scope: Any) -> list[tuple[bytes, bytes]]:
    """Under the names at which the route's clients look."""
    names = [b"x-request-id"]
    if is_anthropic(scope):
        names.append(b"request-id")
    return [(name, request_id.encode()) for name in names]


def is_anthropic(scope: Any) -> bool:
    """Whether a request is of Anthropic's protocol. Both have /v1/models; its header tells."""
    path = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    is_shared = path.startswith(("/v1/models", "/anthropic/"))
    return is_shared and any(key == b"anthropic-version" for key, _ in scope["headers"])


def shape(error: ApiError, scope: Any) -> dict[str, Any]:
    """The body for an error, as the route's clients read it."""
    if is_anthropic(scope):
        return error.to_anthropic(scope.get("state", {}).get("request_id"))
    return error.to_openai()


def answer(error: ApiError, scope: Any) -> Response:
    """The response for an error."""
    body = orjson.dumps(shape(error, scope))
    return Response(body, error.status, error.headers, media_type="application/json")


def server_fault(request: Request, error: Exception) -> Response:
    """The response where the server itself is wrong; logs why."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    text = "the server failed; its log says why"
    return answer(ApiError(500, text, code="internal_error"), request.scope)


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error of a route an answer in the shape that its clients read."""

    async def of_api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error, request.scope)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = answer(ApiError(error.status_code, str(error.detail)), request.scope)
        response.headers.update(error.headers or {})  # which methods are allowed
        return response

    async def of_server(request: Request, error: Exception) -> Response:
        return server_fault(request, error)

    app.add_exception_handler(ApiError, of_api)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, of_server)
