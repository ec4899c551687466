"""The server as a process: its end, its clients' ends, a network that fails, and load."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import httpx
import pytest

pytest.importorskip("fastapi")

from allspark.serve.catalog import Catalog  # noqa: E402
from allspark.serve.server import Server  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402
from support.chats import QUEUE, SUM  # noqa: E402
from support.http_server import CHAT, COMPLETIONS  # noqa: E402
from support.ports import kept_port  # noqa: E402
from support.raw_http import Raw, post, request  # noqa: E402
from support.server_process import ServerProcess  # noqa: E402
from support.waiting import wait_until  # noqa: E402

ENDLESS = {"messages": SUM, "ignore_eos": True, "stream": True}
# Megabytes: more than all buffers between a server and a client that does not read.
RICH = {**ENDLESS, "n": 8, "logprobs": True, "top_logprobs": 20}
SEEDED = {"messages": QUEUE, "seed": 7, "temperature": 1.3, "max_tokens": 40}


def is_answering(server):
    answer = server.post(CHAT, messages=SUM, temperature=0).json()
    return answer["choices"][0]["message"]["content"] == "12 + 35 = 47"


# The end.


def test_streams_end_whole_before_the_process_does(demo_model):
    with ServerProcess(demo_model) as server:
        raws = [Raw(server.port).send(post(CHAT, **ENDLESS, max_tokens=300)) for _ in range(4)]
        for raw in raws:
            assert raw.head().status == 200
        # This one runs for as long as its body does not come, and so does the server.
        ask = post(CHAT, messages=SUM, headers={"expect": "100-continue"})
        head, _, body = ask.partition(b"\r\n\r\n")
        slow = Raw(server.port).send(head + b"\r\n\r\n")
        assert slow.answer().status == 100
        server.terminate()
        with Raw(server.port) as late:
            wait_until(lambda: late.send(request("GET", "/health")).answer().status == 503)
            refused = late.send(post(CHAT, messages=SUM)).answer()
            assert refused.status == 503 and refused.headers["retry-after"] == "1"
        assert slow.send(body).answer().status == 200
        for raw in raws:
            assert b"".join(iter(raw.chunk, b"")).endswith(b"data: [DONE]\n\n")
        assert server.wait()[0] == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(demo_model, second):
    """Also where a text is read that takes minutes."""
    with ServerProcess(demo_model) as server:
        huge = Raw(server.port).send(post("/tokenize", prompt="x" * 20_000_000))
        raw = Raw(server.port).send(post(CHAT, **ENDLESS, n=8))
        assert raw.head().status == 200
        server.terminate()
        with Raw(server.port) as late:
            wait_until(lambda: late.send(request("GET", "/health")).answer().status == 503)
        begin = time.monotonic()
        server.process.send_signal(second)
        server.wait()
        # The text alone takes longer.
        assert time.monotonic() - begin < 25
        huge.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_event_loop_takes_it(model, monkeypatch, number):
    started = []
    server = Server(Catalog([model]), ServerSettings("127.0.0.1", 0), started.append)
    take_signals = server._take_signals

    def late():
        signal.raise_signal(number)
        take_signals()

    monkeypatch.setattr(server, "_take_signals", late)
    before = signal.getsignal(number)
    server.run()
    assert not started
    assert signal.getsignal(number) is before


def test_a_killed_server_comes_back_on_its_port(demo_model):
    with kept_port() as port:
        with ServerProcess(demo_model, port=port) as server:
            raws = [Raw(port, receive_buffer=4096).send(post(CHAT, **RICH)) for _ in range(3)]
            for raw in raws:
                assert raw.head().status == 200
            os.kill(server.process.pid, signal.SIGKILL)
            for raw in raws:
                with pytest.raises((ValueError, OSError)):  # no client takes the stream for whole
                    list(iter(raw.chunk, b""))
        with ServerProcess(demo_model, port=port) as server:
            assert server.port == port and is_answering(server)


def test_a_port_that_is_taken_is_named(demo_model):
    with ServerProcess(demo_model) as server:
        said = "cannot listen on 127.0.0.1:\\d+: Address already in use"
        with pytest.raises(AssertionError, match=said):
            ServerProcess(demo_model, port=server.port)
        assert is_answering(server)


def test_a_seed_gives_one_text_alone_beside_others_and_after_a_restart(demo_model):
    found = set()

    def answer_of(server, **fields):
        answer = server.post(CHAT, **{**SEEDED, **fields}).json()
        return answer["system_fingerprint"], answer["choices"][0]["message"]["content"]

    def ask(server):
        found.add(answer_of(server))

    def ask_streamed(server):
        text, fingerprint = "", None
        lines = server.post(CHAT, **SEEDED, stream=True).text.split("\n\n")
        for line in lines[:-2]:
            event = json.loads(line.removeprefix("data: "))
            fingerprint = event["system_fingerprint"]
            text += event["choices"][0]["delta"].get("content", "")
        found.add((fingerprint, text))

    def other(server, index):
        server.post(CHAT, messages=QUEUE, seed=index, temperature=2, max_tokens=20 + index)

    for _ in range(2):
        with ServerProcess(demo_model) as server:
            ask(server)
            ask_streamed(server)
            assert answer_of(server, seed=8) not in found
            threads = [threading.Thread(target=other, args=(server, i)) for i in range(30)]
            threads += [threading.Thread(target=ask, args=(server,)) for _ in range(6)]
            threads += [threading.Thread(target=ask_streamed, args=(server,)) for _ in range(6)]
            for thread in threads[::-1]:
                thread.start()
            for thread in threads:
                thread.join()
    ((fingerprint, text),) = found
    assert fingerprint.startswith("fp_") and text


# Clients.


def test_connections_beyond_the_usual_bound_of_files(demo_model):
    bound = ["bash", "-c", 'ulimit -Sn 256; exec "$@"', "bash"]
    with ServerProcess(demo_model, prefix=bound) as server:
        raws = [Raw(server.port) for _ in range(400)]
        for raw in raws:
            assert raw.send(request("GET", "/health")).answer().status == 200
        for raw in raws:
            raw.close()


STREAMS = """
import httpx, sys, threading
def read():
    with httpx.stream("POST", sys.argv[1], content=sys.argv[2], timeout=60,
                      headers={"content-type": "application/json"}) as answer:
        for part in answer.iter_bytes():
            print(len(part), flush=True)
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
"""


def test_clients_that_are_killed_leave_nothing(demo_model):
    with ServerProcess(demo_model) as server:
        body = json.dumps({"model": "demo", **ENDLESS, "n": 2})
        url = f"http://127.0.0.1:{server.port}{CHAT}"
        for _ in range(3):
            client = subprocess.Popen(
                [sys.executable, "-c", STREAMS, url, body], stdout=subprocess.PIPE
            )
            assert client.stdout.readline()
            client.kill()
            client.communicate()
            wait_until(lambda: server.num_requests() == 0)
        assert is_answering(server)


@pytest.mark.slow
def test_a_machine_that_vanishes_holds_nothing(demo_model, repo_root):
    """Without a farewell: its packets stop, in a network of their own."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("no network namespaces here: ip or unshare is missing")
    names = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*names, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("no network namespaces here: they are not permitted")
    script = repo_root / "tests" / "python" / "support" / "vanishing_client.py"
    command = [*names, sys.executable, str(script), str(demo_model)]
    paths = [str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.endswith("ok\n")


# Load.


@pytest.mark.slow
def test_ten_thousand_requests_are_answered_or_sent_away(demo_model):
    """Through 500 connections, beyond what may run."""
    count, connections = 10_000, 500
    flags = ("--max-concurrent-requests", "400", "--max-batch-size", "64")
    with ServerProcess(demo_model, *flags) as server:
        statuses, texts = Counter(), set()
        body = {"model": "demo", "prompt": "2+2=", "max_tokens": 4, "temperature": 0}

        async def rush():
            limits = httpx.Limits(max_connections=connections)
            url = f"http://127.0.0.1:{server.port}"
            left = iter(range(count))
            async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:

                async def ask():
                    for index in left:
                        answer = await client.post(COMPLETIONS, json={**body, "seed": index})
                        statuses[answer.status_code] += 1
                        if answer.status_code == 200:
                            texts.add(answer.json()["choices"][0]["text"])
                        else:
                            assert int(answer.headers["retry-after"]) >= 1

                await asyncio.gather(*(ask() for _ in range(connections)))

        asyncio.run(rush())
        print(statuses)
        assert set(statuses) == {200, 429} and statuses.total() == count
        assert texts == {"4"}
        wait_until(lambda: server.num_requests() == 0)
        assert is_answering(server)
        server.terminate()
        assert server.wait()[0] == 0
