"""Clients of a server whose network fails, so that no packet of either side arrives. To be run in a
network namespace of its own, since it takes down its loopback device.

usage: vanishing_client.py MODEL
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import httpx
from support.chats import SUM
from support.raw_http import Raw, post, request
from support.server_process import ServerProcess
from support.waiting import wait_until

CHAT = "/v1/chat/completions"


def link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def num_sockets(server: ServerProcess) -> int:
    """Those that the server holds."""
    count = 0
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed since the folder was read
            count += str(each.readlink()).startswith("socket:")
    return count


link("up")
with ServerProcess(sys.argv[1], "--client-timeout", "10") as server:
    before = num_sockets(server)
    rich = {"messages": SUM, "ignore_eos": True, "n": 8, "logprobs": True, "top_logprobs": 20}
    streamed = Raw(server.port).send(post(CHAT, **rich, stream=True))
    assert streamed.head().status == 200
    whole = Raw(server.port).send(post(CHAT, **rich))
    idle = Raw(server.port).send(request("GET", "/health"))
    assert idle.answer().status == 200
    wait_until(lambda: num_sockets(server) == before + 3)
    link("down")
    wait_until(lambda: num_sockets(server) == before, 120)
    link("up")
    server.client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60)
    wait_until(lambda: server.num_requests() == 0)
    answer = server.post(CHAT, messages=SUM, temperature=0).json()
    assert answer["choices"][0]["message"]["content"] == "12 + 35 = 47"
print("ok")
