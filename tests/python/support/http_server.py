"""A server in a thread of the test, and what its requests do to the engine."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import httpx
from allspark import AsStatus
from allspark.serve.app import make_app
from allspark.serve.catalog import Catalog
from allspark.serve.server import Server, bind
from allspark.serve.settings import ServerSettings
from support.waiting import wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class RunningServer:
    """A server in a thread.

    Args:
        send_buffer: bytes of a connection that the system keeps for a slow client.
    """

    def __init__(self, models, make_app=make_app, send_buffer=None, **settings):
        port = threading.Event()
        self.port = 0

        def started(number):
            self.port = number
            port.set()

        settings = {"server_name": "127.0.0.1", "server_port": 0, **settings}
        settings = ServerSettings(**settings)
        sockets = None
        if send_buffer is not None:
            sockets = bind(settings)
            for each in sockets:  # connections inherit it
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.server = Server(Catalog(models), settings, started, make_app)
        self._thread = threading.Thread(target=self.server.run, args=(sockets,))
        self._thread.start()
        assert port.wait(30)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        self.server.stop()
        self._thread.join(40)
        assert not self._thread.is_alive()

    @contextlib.contextmanager
    def held(self):
        """The event loop stands still. What is sent meanwhile it finds as a whole, however slowly
        it was sent."""
        is_held, go_on = threading.Event(), threading.Event()

        def hold():
            is_held.set()
            go_on.wait(60)

        self.server._loop.call_soon_threadsafe(hold)
        assert is_held.wait(60)
        try:
            yield
        finally:
            go_on.set()

    def post(self, path, **body):
        return self.client.post(path, json={"model": "demo", **body})

    def events(self, path, **body):
        """The data of a stream's events, and the whole text."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = response.text.split("\n\n")
        assert parts[-1] == "" and parts[-2] == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@contextlib.contextmanager
def paused(model):
    """Requests wait while the model has no memory."""
    assert model.engine.unload_device_mem(model.name) == AsStatus.ALLSPARK_SUCCESS
    try:
        yield
    finally:
        model.engine.load_device_mem(model.name)


def abort_until(server, count, **body):
    """The server knows a request by its name a moment after the engine has it."""
    aborted = 0

    def is_done():
        nonlocal aborted
        aborted += server.post("/abort_request", **body).json()["aborted"]
        return aborted >= count

    wait_until(is_done, what=f"{count} aborted requests")
    assert aborted == count


def error_of(response):
    return response.status_code, response.json()["error"]
