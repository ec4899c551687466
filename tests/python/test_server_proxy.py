"""The server behind nginx, by the configuration of examples/nginx.conf."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import time

import httpx
import pytest

pytest.importorskip("fastapi")

from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from support import oracles  # noqa: E402
from support.chats import SUM  # noqa: E402
from support.http_server import CHAT, RunningServer, paused  # noqa: E402
from support.ports import kept_port  # noqa: E402
from support.raw_http import Raw, post  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402

HTTP = """
daemon off; user {user} {group}; error_log stderr warn; pid {folder}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    {site}
}}
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(demo_model):
    model = ServedModel.open(str(demo_model), EngineConfig(max_batch_size=8), "demo")
    yield model
    model.close()


@pytest.fixture(scope="module")
def server(model):
    with RunningServer([model], keep_alive_interval=0.2) as server:
        yield server


@pytest.fixture
def port():
    with kept_port() as port:
        yield port


@pytest.fixture(params=["as in the example", "by the header alone"])
def proxy(request, server, repo_root, tmp_path, port):
    """The port of an nginx before the server."""
    program = shutil.which("nginx") or oracles.environment("nginx") / "usr" / "sbin" / "nginx"
    site = (repo_root / "examples" / "nginx.conf").read_text()
    changes = {"127.0.0.1:23333": f"127.0.0.1:{server.port}", "8080": f"127.0.0.1:{port}"}
    if request.param == "by the header alone":
        changes["proxy_buffering off;"] = ""
    for old, new in changes.items():
        assert old in site
        site = site.replace(old, new)
    config = tmp_path / "nginx.conf"
    # Else nginx of root runs as another user, who may not write there.
    user = pwd.getpwuid(os.getuid()).pw_name
    group = grp.getgrgid(os.getgid()).gr_name
    config.write_text(HTTP.format(folder=tmp_path, site=site, user=user, group=group))
    process = subprocess.Popen([str(program), "-p", str(tmp_path), "-c", str(config)])
    try:
        end = time.monotonic() + 30
        while True:
            assert process.poll() is None and time.monotonic() < end
            try:
                Raw(port).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def test_streams_pass_in_pieces(proxy, model):
    with Raw(proxy) as raw:
        with paused(model):  # nothing but the beginning can come
            head = raw.send(post(CHAT, messages=SUM, temperature=0, stream=True)).head()
            assert head.status == 200 and head.headers["content-type"].startswith("text/event-")
            data = raw.chunk()
            assert b'"role":"assistant"' in data
            while b": keep-alive\n\n" not in data:
                data += raw.chunk()
        data = b"".join(iter(raw.chunk, b""))
        assert data.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"stop"' in data
        # The same connection serves on.
        whole = raw.send(post(CHAT, messages=SUM, temperature=0)).answer().json()
        assert whole["choices"][0]["message"]["content"] == "12 + 35 = 47"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(proxy, model, stream):
    with paused(model):
        raw = Raw(proxy).send(post(CHAT, messages=SUM, ignore_eos=True, stream=stream))
        wait_for_requests(model, 1)
        raw.close()
        wait_for_requests(model, 0)


def test_errors_and_limits_pass(proxy, model):
    with Raw(proxy) as raw:
        answer = raw.send(post(CHAT, messages=SUM, n=129)).answer()
        assert answer.status == 400 and answer.json()["error"]["param"] == "n"
        assert len(answer.headers["x-request-id"]) == 32  # nginx's
        assert raw.send(post("/nowhere")).answer().status == 404
        assert raw.send(post(CHAT, messages="x" * 10_000_000)).answer().status == 400
        own = post("/nowhere", headers={"x-request-id": "own-1"})
        assert raw.send(own).answer().headers["x-request-id"] == "own-1"


def test_files_of_any_size_pass(proxy):
    """More than the body of another request may have."""
    data = b"x" * (40 << 20)
    url = f"http://127.0.0.1:{proxy}/v1/files"
    answer = httpx.post(url, files={"file": data}, data={"purpose": "batch"}, timeout=60)
    assert answer.status_code == 200 and answer.json()["bytes"] == len(data), answer.text
