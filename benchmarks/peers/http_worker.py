"""The common part of workers that start a server program and measure it as its clients do."""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import tempfile
import time
from typing import Any

from peers import process_tree
from peers.base import EngineError, ProgramEnded, last_lines
from peers.worker import Request, Timeline

_END_S = 5  # from a broken connection to the end of the server's process


class HttpServer:
    """A server of streams. Subclasses say how it is started, what a request is and how many tokens
    an event has; these are the parts in which servers differ."""

    name = ""  # in messages
    path = "/v1/completions"
    start_s = 120.0  # the most that its start takes

    def __init__(self, job: dict[str, Any]) -> None:
        self.remarks: list[str] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.start(self.command(job, self._port))

    def command(self, job: dict[str, Any], port: int) -> list[str]:
        raise NotImplementedError

    def body(self, request: Request) -> dict[str, Any]:
        return {
            "model": "bench", "prompt": request["ids"], "max_tokens": request["num_output"],
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip

    def num_tokens(self, event: dict[str, Any], timeline: Timeline) -> int:
        """Of an event; `timeline` has those before."""
        return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))

    def start(self, command: list[str]) -> None:
        """Returns when the server has answered a request; otherwise raises EngineError with the
        reason."""
        # To a file: nobody reads while the server runs, and a pipe would fill up.
        process_tree.adopt_orphans()
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        end = time.monotonic() + self.start_s
        try:
            while not self._is_healthy():
                if self._process.poll() is not None:
                    raise self._ended()
                if time.monotonic() > end:
                    said = f"its last lines: {last_lines(self._said())}"
                    raise EngineError(f"{self.name} did not start within {self.start_s} s; {said}")
                time.sleep(0.05)
            # If this processor cannot run a kernel, the server dies here and not in the workload.
            self.serve([{"ids": [3] * 40, "num_output": 2}])
        except EngineError:
            self.close()
            raise

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _ended(self) -> ProgramEnded:
        return ProgramEnded(self.name, self._process.wait(), self._said())

    def _is_healthy(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=10) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return b" 200 " in connection.recv(64)
        except OSError:
            return False

    def serve(self, requests: list[Request]) -> list[Timeline]:
        streams = [_Stream(self, request) for request in requests]
        # One thread for all clients, which share the cores with the server.
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                if stream.connect(self._port):
                    selector.register(stream.socket, selectors.EVENT_READ, stream)
            while selector.get_map():
                for key, _ in selector.select():
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                        key.data.socket.close()
        timelines = [stream.parse() for stream in streams]
        wanted = sum(request["num_output"] for request in requests)
        if sum(sum(timeline.counts) for timeline in timelines) < wanted:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                pass
            else:
                raise self._ended()
        return timelines

    def later_s(self, request: Request) -> float | None:
        return None

    def cpu_seconds(self) -> float:
        return process_tree.cpu_seconds(self._process.pid)

    def close(self) -> None:
        # When asked to end, some wait forever; none has anything to save.
        self._process.kill()
        self._process.wait()
        process_tree.kill_children()
        self._log.close()


class _Stream:
    def __init__(self, server: HttpServer, request: Request) -> None:
        self._server = server
        body = json.dumps(server.body(request)).encode()
        head = (
            f"POST {server.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._message = head.encode() + body
        # What came, and when. Parsing waits for the end: the client shares the cores with the
        # server, and its work is not the server's.
        self._came: list[tuple[float, bytes]] = []

    def connect(self, port: int) -> bool:
        """Sends the request; False if there is no server, which serve notices by missing tokens."""
        self.timeline = Timeline()
        try:
            self.socket = socket.create_connection(("127.0.0.1", port))
            self.socket.sendall(self._message)
        except OSError:
            return False
        return True

    def read(self) -> bool:
        """Notes what came; False at the end."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        self._came.append((time.perf_counter(), data))
        return bool(data)

    def parse(self) -> Timeline:
        """The tokens that came, each when its event was complete."""
        rest = b""
        for moment, data in self._came:
            # Headers and the sizes of chunks stand on other lines: servers send whole events.
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.timeline.add(self._server.num_tokens(event, self.timeline), moment)
        return self.timeline
