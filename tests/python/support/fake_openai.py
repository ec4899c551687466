"""A server of OpenAI's protocol that says exactly what a test tells it, byte for byte."""

from __future__ import annotations

import json
import socket
import threading

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Connection:
    """What an answer is sent over."""

    def __init__(self, sock):
        self.sock = sock
        self.is_open = True

    def send(self, data):
        self.sock.sendall(data)

    def event(self, value, separator=b"\n\n"):
        """One event, as one chunk of HTTP."""
        data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode())
        data += separator
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def finish(self):
        """The end of a stream of events."""
        self.event(b"[DONE]")
        self.send(b"0\r\n\r\n")

    def whole(self, status, body, kind="application/json", headers=""):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Reason\r\ncontent-type: {kind}\r\n{headers}"
        self.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def close(self):
        self.is_open = False
        self.sock.close()


def delta(text=None, finish_reason=None, **more):
    """A chunk of a chat."""
    fields = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": {**fields, **more}, "finish_reason": finish_reason}]}


def usage(prompt, output):
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


# Answers that fail.


def cut(request, connection):
    connection.send(STREAM)
    connection.event(delta("half an"))
    connection.close()


def ended_early(request, connection):
    connection.send(STREAM)
    connection.event(delta("half an"))
    connection.send(b"0\r\n\r\n")


class FakeServer:
    """Calls `answer(request, connection)` for each request, in a thread for each connection; the
    request is its path, headers and body."""

    def __init__(self, answer):
        self.requests = []
        self.num_connections = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def _accept(self):
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            thread = threading.Thread(target=self._serve, args=(Connection(sock),))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection):
        try:
            with connection.sock.makefile("rb") as file:
                while connection.is_open and (line := file.readline()):
                    headers = {}
                    while (header := file.readline().strip()) != b"":
                        name, _, value = header.decode().partition(":")
                        headers[name.lower()] = value.strip()
                    body = file.read(int(headers.get("content-length", 0)))
                    request = {
                        "path": line.split()[1].decode(),
                        "headers": headers,
                        "body": json.loads(body) if body else None,
                    }
                    self.requests.append(request)
                    self._answer(request, connection)
        except OSError:  # the client went away
            pass
        finally:
            connection.sock.close()


class FakeClock:
    """A clock that a server in another thread moves: it goes on once the client has looked."""

    def __init__(self):
        self._time = 0.0
        self._num_reads = 0
        self._changed = threading.Condition()

    def __call__(self):
        with self._changed:
            self._num_reads += 1
            self._changed.notify_all()
            return self._time

    def at(self, time, send):
        """Calls `send` at this time, and waits until the client has looked at the clock."""
        with self._changed:
            self._time = time
            before = self._num_reads
        send()
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_reads > before, 20)
