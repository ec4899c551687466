"""BlockingClient: one request at a time, over the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from allspark.remote.address import is_local
from allspark.remote.errors import CUT, NO_WORDS, RemoteError, message_of
from allspark.remote.events import DONE, EventReader, LineReader

_READ_BYTES = 1 << 16
# How streams are taken apart, by their content type.
_READERS: dict[str, type[EventReader] | type[LineReader]] = {
    "text/event-stream": EventReader,
    "application/x-ndjson": LineReader,
}


class BlockingClient:
    """Talks with the server at a URL. Thread-safe.

    Args:
        url: what every path is appended to.
        headers: of every request.

    Its methods raise:
        ConnectionError: nothing answers there, or the connection ended too early.
        RemoteError: the server refuses, or its answer is not what the protocol says.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], ssl_context: ssl.SSLContext | None = None
    ):
        self.url = url
        self.headers = {"content-type": "application/json", **headers}
        self._opener = _opener(url, ssl_context)

    def call(
        self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """The JSON that GET, or with a body POST, gives.

        Args:
            timeout: seconds in which something must come; None: those of the module `socket`.
        """
        try:
            with self._open(path, body, timeout) as response:
                return _to_json(_read(response))
        except TimeoutError:
            raise ConnectionError(f"{self.url} gives no answer in time") from None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON of a stream's events as they come, up to the one that ends it. Closing the
        iterator closes the connection. An answer that came whole is one event.

        A stream that ends without `[DONE]` ends the iterator, too.
        """
        with self._open(path, body) as response:
            kind = response.headers.get_content_type()
            if kind not in _READERS:
                if kind != "application/json":
                    raise RemoteError(f"the answer is {kind}, not a stream of events", 200)
                yield _checked(_to_json(_read(response)))
                return
            for data in _payloads(response, _READERS[kind]()):
                if data == DONE:
                    return
                yield _checked(_to_json(data))

    def _open(
        self, path: str, body: dict[str, Any] | None, timeout: float | None = None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            wait = socket.getdefaulttimeout() if timeout is None else timeout
            response: http.client.HTTPResponse = self._opener.open(request, timeout=wait)
        except urllib.error.HTTPError as error:
            with error:
                raise RemoteError.of(error.code, error.read(), str(error.reason)) from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"no server at {self.url}: {error.reason}") from None
        except http.client.RemoteDisconnected:
            raise ConnectionError(f"{self.url} closed the connection without an answer") from None
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP server at {self.url}: {error!r}") from None
        return response


def _payloads(
    response: http.client.HTTPResponse, reader: EventReader | LineReader
) -> Iterator[bytes]:
    while data := _read(response, _READ_BYTES):
        yield from reader.feed(data)
    yield from reader.end()


def _read(response: http.client.HTTPResponse, size: int | None = None) -> bytes:
    try:
        return response.read() if size is None else response.read1(size)
    except (http.client.HTTPException, ConnectionError):
        raise ConnectionError(CUT) from None


def _to_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        shown = data[:100].decode(errors="replace")
        raise RemoteError(f"the server sent what is no JSON: {shown!r}", 200) from None


def _checked(event: Any) -> dict[str, Any]:
    """An event of a stream; one that is an error is raised."""
    if not isinstance(event, dict):
        raise RemoteError(f"the server sent {str(event)[:100]!r} as an event", 200)
    if event.get("error"):
        raise RemoteError(message_of(event) or NO_WORDS, 200, event["error"])
    return event


def _opener(url: str, context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    handlers: list[Any] = []
    if is_local(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)
