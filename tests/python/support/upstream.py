"""A server whose answers the test writes, and the page before it."""

from __future__ import annotations

import json
import queue
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from allspark.serve.relay import make_page_app, server_url
from support.http_server import RunningServer


class Upstream:
    """A server whose answers the test writes, piece by piece."""

    def __init__(self):
        self.asked = queue.Queue()  # (method, path, headers, body)
        self.pieces = queue.Queue()  # bytes, None for the end, or "break" for a broken connection
        self.is_gone = threading.Event()
        self.headers = {"content-type": "text/event-stream"}
        self.status = 200
        self.models = None  # what /v1/models gives; None: an answer as any other
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                if self.path == "/v1/models" and upstream.models is not None:
                    return self.list_models()
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                upstream.asked.put((self.command, self.path, self.headers, body))
                self.send_response(upstream.status)
                for key, value in upstream.headers.items():
                    self.send_header(key, value)
                if "content-length" not in upstream.headers:
                    self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                if self.command == "HEAD":
                    return
                while (piece := upstream.pieces.get(timeout=30)) is not None:
                    if piece == "break":
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    if piece == "wait":
                        if self.rfile.read(1) == b"":
                            upstream.is_gone.set()
                        return
                    chunked = "content-length" not in upstream.headers
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                    self.wfile.flush()
                if "content-length" not in upstream.headers:
                    self.wfile.write(b"0\r\n\r\n")

            def list_models(self):
                data = json.dumps({"data": upstream.models}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_OPTIONS = do_DELETE = do_HEAD = answer

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def page_before(url, **settings):
    return RunningServer([], lambda state: make_page_app(state, server_url(url)), **settings)
