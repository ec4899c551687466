"""The page of the server over HTTP, and the page that stands before another server."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys

import httpx
import pytest

pytest.importorskip("fastapi")

from allspark.cli import main  # noqa: E402
from allspark.serve.relay import server_url  # noqa: E402
from allspark.serve.routes import page  # noqa: E402
from support.chats import SUM  # noqa: E402
from support.http_server import CHAT, RunningServer, error_of, paused  # noqa: E402
from support.upstream import Upstream, page_before  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402

FILES = {path.name: path.read_text() for path in page.FOLDER.iterdir()}
PATHS = ["/ui", *(f"/ui/{name}" for name in FILES if name != "index.html")]


# The files.


@pytest.mark.parametrize("path", PATHS)
def test_files_come_with_their_types_and_bounds(server, path):
    response = server.client.get(path)
    assert response.status_code == 200
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    ending = path.rpartition(".")[2] if "." in path else "html"
    assert response.headers["content-type"].partition(";")[0] == kind[ending]
    assert response.text == FILES[path.rpartition("/")[2] if "." in path else "index.html"]
    rules = response.headers["content-security-policy"].split("; ")
    policy = dict(rule.split(" ", 1) for rule in rules)
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'",
        "connect-src": "'self'", "img-src": "'self'", "base-uri": "'none'",
        "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    head = server.client.head(path)
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-length"] == str(len(response.content))


def test_a_file_that_is_known_is_not_sent_again(server):
    etag = server.client.get("/ui").headers["etag"]
    for given in (etag, f'W/{etag}, "other"'):
        response = server.client.get("/ui", headers={"if-none-match": given})
        assert response.status_code == 304 and response.content == b""
        assert response.headers["etag"] == etag
        assert "content-security-policy" in response.headers
    assert server.client.get("/ui", headers={"if-none-match": '"other"'}).status_code == 200
    assert server.client.get("/ui/app.js").headers["etag"] != etag


@pytest.mark.parametrize(
    "path",
    ["/ui/nothing.js", "/ui/index.html", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/..%2fapp.py",
     "/ui//etc/passwd", "/ui/%2fetc%2fpasswd", "/ui/app.js/", "/ui/app.js%00.css"],
)  # fmt: skip
def test_there_are_no_other_files(server, path):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:  # httpx would tidy the path
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    status = int(answer.split()[1])
    assert status == 404 or (status == 307 and path == "/ui/app.js/"), answer
    assert b"import " not in answer and b"root:" not in answer


def test_a_slash_at_the_end_leads_to_the_page(server):
    response = server.client.get("/ui/", follow_redirects=True)
    assert response.url.path == "/ui" and response.status_code == 200


def test_the_page_needs_no_key_and_everything_else_does(model):
    with RunningServer([model], api_keys=("secret",)) as server:
        for path in PATHS:
            assert server.client.get(path).status_code == 200, path
        for path in ("/v1/models", "/metrics", "/uix", "/v1/ui/app.js"):
            assert server.client.get(path).status_code == 401, path
        assert server.client.get("/ui/nothing").status_code == 404
        assert server.post(CHAT, messages=SUM).status_code == 401


def test_the_page_can_be_the_servers_home(server, model):
    assert "swagger" in server.client.get("/").text
    with RunningServer([model], home_is_page=True) as other:
        response = other.client.get("/")
        assert (response.status_code, response.headers["location"]) == (307, "ui")
        assert "swagger" in other.client.get("/docs").text
        assert "/ui" not in other.client.get("/openapi.json").json()["paths"]


# What the sources may not have.


@pytest.mark.parametrize("name", FILES)
def test_sources_make_no_markup_and_load_nothing_from_elsewhere(name):
    text = FILES[name]
    for word in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
        "createContextualFragment", "DOMParser", "setHTML", "localStorage", "document.cookie",
        "javascript:", "@import", "url(", "<style", " style=", "<base", "srcdoc", "<iframe",
    ):  # fmt: skip
        assert word.lower() not in text.lower(), word
    assert not re.search(r"\bon[a-z]+\s*=\s*[\"']", text)
    assert not re.search(r"<script(?![^>]*\ssrc=\"ui/[a-z]+\.js\")", text)
    assert not re.search(r"setTimeout\(\s*[\"'`]", text)
    assert not re.search(r"(?:src|href|from|import|fetch)\s*[=(]?\s*[\"'`](?:https?:)?//", text)
    addresses = [a for a in re.findall(r"https?://[^\s\"'`)]+", text) if "w3.org" not in a]
    assert addresses == []


def test_the_page_names_its_files_and_no_other():
    named = set(re.findall(r'(?:src|href)="ui/([^"]+)"', FILES["index.html"]))
    for name, text in FILES.items():
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert named | {"index.html"} == set(FILES)


def test_every_control_has_a_label():
    html = FILES["index.html"]
    labels = set(re.findall(r'<label[^>]* for="([^"]+)"', html))
    for tag in re.findall(r"<(?:input|select|textarea)\b[^>]*>", html):
        found = re.search(r' id="([^"]+)"', tag)
        # The sliders' labels are made with them.
        assert "aria-label" in tag or (found and found[1] in labels) or "type=" in tag, tag


# The page before another server.


@pytest.fixture
def upstream():
    upstream = Upstream()
    yield upstream
    upstream.close()


def test_a_stream_is_passed_on_in_its_pieces(upstream):
    with page_before(upstream.url) as server:
        body = {"stream": True, "messages": SUM}
        with server.client.stream("POST", CHAT, json=body) as response:
            assert response.headers["content-type"] == "text/event-stream"
            pieces = response.iter_raw()
            for piece in (b"data: 1\n\n", b"data: 2\n\n", b": keep-alive\n\n"):
                upstream.pieces.put(piece)  # the next only once this one is here
                assert next(pieces) == piece
            upstream.pieces.put(None)
            assert list(pieces) == []
        assert json.loads(upstream.asked.get(timeout=60)[3]) == body


def test_requests_are_passed_with_keys_and_without_what_is_of_one_connection(upstream):
    upstream.status, upstream.headers = 418, {
        "content-type": "application/json", "content-length": "2", "set-cookie": "a=b",
        "x-own": "yes", "retry-after": "7", "x-request-id": "theirs", "connection": "x-hop",
        "x-hop": "1",
    }  # fmt: skip
    with page_before(upstream.url + "/below/v1/") as server:
        upstream.pieces.put(b"{}")
        upstream.pieces.put(None)
        headers = {
            "authorization": "Bearer K", "x-api-key": "L", "cookie": "secret=1",
            "connection": "x-mine", "x-mine": "1", "x-request-id": "mine", "accept-encoding": "br",
        }  # fmt: skip
        path = "/v1/models/a%20b%2Fc?limit=1&q=%C3%A4"
        response = server.client.request("DELETE", path, headers=headers)
        assert (response.status_code, response.text) == (418, "{}")
        assert response.headers["x-own"] == "yes" and response.headers["retry-after"] == "7"
        assert response.headers.get_list("x-request-id") == ["mine"]
        assert len(response.headers.get_list("date")) == 1
        assert "set-cookie" not in response.headers and "x-hop" not in response.headers
        method, path, asked, body = upstream.asked.get(timeout=60)
        assert (method, path) == ("DELETE", "/below/v1/models/a%20b/c?limit=1&q=%C3%A4")
        assert asked["host"] == upstream.url.removeprefix("http://") and body == b""
        assert asked["authorization"] == "Bearer K" and asked["x-api-key"] == "L"
        assert asked["x-request-id"] == "mine" and asked["accept-encoding"] == "br"
        assert "cookie" not in asked and "x-mine" not in asked


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/./models"])
def test_no_path_leads_out_of_v1(upstream, path):
    with page_before(upstream.url) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 404"), answer
        for other in ("/metrics", "/sleep", "/v2/models"):
            assert server.client.get(other).status_code == 404, other
    assert upstream.asked.empty()


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_goes_away_ends_the_request(upstream, has_begun):
    if not has_begun:
        upstream.headers = {"content-type": "application/json", "content-length": "9"}
    with page_before(upstream.url) as server:
        raw = socket.create_connection(("127.0.0.1", server.port))
        raw.sendall(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        upstream.asked.get(timeout=60)
        if has_begun:
            upstream.pieces.put(b"data: 1\n\n")
            seen = b""
            while b"data: 1" not in seen:
                seen += raw.recv(4096)
        upstream.pieces.put("wait")
        assert not upstream.is_gone.wait(0.05)
        raw.close()
        assert upstream.is_gone.wait(60)


def test_a_server_that_is_away_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with page_before(url) as server:
            status, error = error_of(server.post(CHAT, messages=SUM))
            assert (status, error["code"]) == (502, "upstream_unreachable")
            assert error["message"].startswith(f"{url} cannot be reached: ")
            assert server.client.get("/v1/models").status_code == 502
            assert server.client.get("/health").json() == {"status": "healthy"}
            assert server.client.get("/ui").status_code == 200
            assert server.client.get("/").headers["location"] == "ui"


def test_a_server_that_breaks_off_is_told(upstream):
    with page_before(upstream.url) as server:
        for piece in (b"data: {}\n\n", "break"):
            upstream.pieces.put(piece)
        text = server.client.post(CHAT, json={}).text
        first, last = [part for part in text.split("\n\n") if part]
        assert first == "data: {}"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"].startswith(f"{upstream.url} broke off the answer: ")
        # Without events, the connection ends too early.
        upstream.headers = {"content-type": "application/json", "content-length": "9"}
        for piece in (b"{", "break"):
            upstream.pieces.put(piece)
        with pytest.raises(httpx.RemoteProtocolError):
            server.client.post(CHAT, json={})


def test_bodies_have_a_bound(upstream):
    with page_before(upstream.url, max_body_bytes=100) as server:
        assert server.client.post(CHAT, content=b"x" * 101).status_code == 413
    assert upstream.asked.empty()


def test_the_page_before_a_server_of_models(model):
    with (
        RunningServer([model], api_keys=("K",)) as server,
        page_before(str(server.client.base_url)) as front,
    ):
        assert front.client.get("/v1/models").status_code == 401
        status, error = error_of(front.post(CHAT, messages=SUM))
        assert (status, error["code"]) == (401, "invalid_api_key")
        front.client.headers["authorization"] = "Bearer K"
        assert front.client.get("/v1/models").json()["data"][0]["id"] == "demo"
        events = front.events(CHAT, messages=SUM, temperature=0)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert text == "12 + 35 = 47"
        answer = front.post("/v1/messages", messages=SUM, max_tokens=1)
        assert answer.headers.get_list("request-id") == [answer.headers["x-request-id"]]
        body = {"model": "demo", "messages": SUM, "stream": True, "ignore_eos": True}
        with paused(model), front.client.stream("POST", CHAT, json=body) as response:
            pieces = response.iter_raw()  # kept: its end would close the connection
            next(pieces)  # a stream begins before its first token
            wait_for_requests(model, 1)
        wait_for_requests(model, 0)


# The command.


@pytest.mark.parametrize(
    "url", ["http://", "https://a:b@host", "http://host?x=1", "http://host/#x", "http://host:x"]
)
def test_urls_that_are_none(url, capsys):
    assert main(["serve", "gradio", url]) == 1
    assert "URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gradio",), "no model is named"),
        (("gradio", "http://h", "--session-len", "9"), "--session-len is for a server of models"),
        (("gradio", "http://h", "--api-keys", "x"), "--api-keys is for a server of models"),
        (("gradio", "http://h", "other"), "other is given beside http://h"),
        (("gradio", "/nowhere/x"), "/nowhere/x"),
    ],
)
def test_what_the_command_does_not_take(arguments, message, capsys):
    assert main(["serve", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_urls_of_servers():
    for text in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert str(server_url(text)).rstrip("/") == "http://h:1"
    assert str(server_url("https://h/a/v1")) == "https://h/a"


@contextlib.contextmanager
def command(*arguments):
    """`allspark serve` in a process, and what it says of the page."""
    base = [sys.executable, "-m", "allspark.cli", "serve", *arguments]
    options = ["--server-name", "127.0.0.1", "--server-port", "0"]
    process = subprocess.Popen([*base, *options], stderr=subprocess.PIPE, text=True)
    try:
        line = ""
        while "page" not in line:
            line = process.stderr.readline()
            assert line, process.wait(30)
        yield re.search(r"http://127\.0\.0\.1:\d+(?=/ui)", line)[0]
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_serve_gradio_with_a_model_and_with_its_url(demo_model):
    with command("gradio", f"{demo_model}=m", "--session-len", "512") as url:
        with command("gradio", url) as front:
            for base in (url, front):
                response = httpx.get(base, follow_redirects=True, timeout=60)
                assert response.url.path == "/ui" and response.text == FILES["index.html"]
                body = {"messages": SUM, "temperature": 0}
                answer = httpx.post(base + CHAT, json=body, timeout=60).json()
                assert answer["model"] == "m"
                assert answer["choices"][0]["message"]["content"] == "12 + 35 = 47"
