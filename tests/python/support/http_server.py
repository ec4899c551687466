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


def error_of(response):
    return response.status_code, response.json()["error"]
