"""HTTP as bytes over a socket: what no client library sends."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from dataclasses import dataclass


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)


class Raw:
    """A connection to a server of this machine."""

    def __init__(self, port, receive_buffer=None):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, data):
        self.socket.sendall(data)
        return self

    def head(self):
        """Status and headers of the next answer; None if the connection was closed."""
        line = self._file.readline()
        if not line:
            return None
        version, status, _ = line.decode().split(" ", 2)
        assert version == "HTTP/1.1"
        headers = {}
        while (line := self._file.readline().decode().rstrip("\r\n")):
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        return Answer(int(status), headers, b"")

    def answer(self, has_body=True):
        """The next answer; None if the connection was closed."""
        answer = self.head()
        if answer is None or not has_body or answer.status < 200:
            return answer
        headers = answer.headers
        if "content-length" in headers:
            body = self._file.read(int(headers["content-length"]))
        else:
            assert headers["transfer-encoding"] == "chunked", headers
            body = b"".join(iter(self.chunk, b""))
        return Answer(answer.status, headers, body)

    def chunk(self):
        """The next chunk of a body; empty at its end."""
        size = int(self._file.readline(), 16)
        data = self._file.read(size)
        self._file.readline()
        return data

    def is_closed(self):
        """Whether the server closes the connection, waiting for it."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def reset(self):
        """Goes away as a process that is killed with data unread does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self):
        with contextlib.suppress(OSError):
            self._file.close()
        self.socket.close()


def request(method, path, body=b"", version="1.1", **headers):
    """The bytes of a request. A header's underscores are hyphens; None leaves a usual one out."""
    usual = {"host": "localhost", "content_type": "application/json", "content_length": len(body)}
    if not body:
        usual = {"host": "localhost"}
    fields = {**usual, **headers}
    lines = [f"{method} {path} HTTP/{version}"]
    lines += [f"{k.replace('_', '-')}: {v}" for k, v in fields.items() if v is not None]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def post(path, /, headers=None, **fields):
    """A request with a JSON body for the model "demo"."""
    body = json.dumps({"model": "demo", **fields}).encode()
    return request("POST", path, body, **(headers or {}))
