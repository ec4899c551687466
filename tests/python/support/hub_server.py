"""A hub of models on a loopback address, with the parts of huggingface_hub's and modelscope's
protocols that a download needs: lists of files, the files, and parts of them.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from urllib.parse import parse_qs, unquote, urlsplit


class HubServer(http.server.ThreadingHTTPServer):
    """Serves ``files`` of the one model ``name``: {path: bytes}.

    ``cut`` {path: bytes sent before the connection is closed} holds for one answer each. With
    ``breaks`` the server is ``broken`` after that: requests for files get 503. ``ranges`` lists the
    requests as (path, first byte). ``commit`` is the only one, on both hubs' usual branches.
    """

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.commit = "0123456789abcdef0123456789abcdef01234567"
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.breaks = False
        self.broken = False
        self.ranges: list[tuple[str, int]] = []
        self.unknown: list[str] = []  # requests that no client should need
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def has_revision(self, name: str) -> bool:
        return name in ("main", "master", self.commit)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request, client_address) -> None:
        """Ignored: it is normal that a client closes its connection."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        hub = self.server
        api, legacy = f"/api/models/{hub.name}/", f"/api/v1/models/{hub.name}/"
        if path.startswith(api):
            what, _, revision = path.removeprefix(api).partition("/")
            if not hub.has_revision(revision):
                self._error(404, {"X-Error-Code": "RevisionNotFound"})
            elif what == "revision":
                self._json(self._model())
            elif what == "tree":
                self._json(self._tree())
            else:
                self._error(404)
        elif path.startswith(f"/{hub.name}/resolve/"):
            revision, _, name = path.removeprefix(f"/{hub.name}/resolve/").partition("/")
            self._file(name if hub.has_revision(revision) else "")
        elif path.startswith(legacy) and not hub.has_revision(query["Revision"][0]):
            self._error(404)
        elif path == f"{legacy}repo/files":
            files = [
                {"Path": name, "Name": name, "Type": "blob", "Size": len(data),
                 "Sha256": hashlib.sha256(data).hexdigest(), "Revision": hub.commit}
                for name, data in hub.files.items()
            ]  # fmt: skip
            self._json({"Code": 200, "Success": True, "Data": {"Files": files}})
        elif path == f"{legacy}repo":
            self._file(query["FilePath"][0])
        else:
            hub.unknown.append(self.path)
            self._error(404)

    do_HEAD = do_GET

    def _model(self) -> dict:
        siblings = [{"rfilename": name} for name in self.server.files]
        return {"id": self.server.name, "sha": self.server.commit, "siblings": siblings}

    def _tree(self) -> list[dict]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
            for name, data in self.server.files.items()
        ]

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", headers or {})

    def _file(self, name: str) -> None:
        hub = self.server
        data = hub.files.get(name)
        if data is None:
            self._error(404, {"X-Error-Code": "EntryNotFound"})
            return
        headers = {
            "ETag": f'"{_etag(data)}"',
            "X-Repo-Commit": hub.commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if self.command == "HEAD":
            self._send(200, data, headers)
            return
        begin = 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        hub.ranges.append((name, begin))
        if hub.broken:
            self._error(503)
            return
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206 if begin else 200, data[begin:], headers, hub.cut.pop(name, None))

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.server.broken = self.server.breaks
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        """Prints nothing: tests look at the recorded requests."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
