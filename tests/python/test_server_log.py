"""What `allspark serve` logs: nothing of prompts, answers and keys, unless it is asked to."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from support.http_server import CHAT, COMPLETIONS  # noqa: E402
from support.server_process import ServerProcess  # noqa: E402

SECRET = "zanzibar"
KEY = "sesame-key"


def log_of(demo_model, *flags):
    """What is on stderr of a server that was asked in many ways."""
    with ServerProcess(demo_model, "--api-keys", KEY, *flags) as server:
        post = server.post
        for key in ("wrong-" + KEY, KEY):
            server.client.headers["authorization"] = f"Bearer {key}"
            post(CHAT, messages=[{"role": "user", "content": SECRET}], max_tokens=2)
            post(COMPLETIONS, prompt=[SECRET, SECRET * 2], max_tokens=2)
            post("/generate", prompt=SECRET, max_tokens=2)
            post("/v1/chat/interactive", prompt=SECRET, request_output_len=2)
            post("/v1/embeddings", input=SECRET)
            post(CHAT, messages=SECRET, temperature="hot", frobnicate=1)
            post(CHAT, messages=[{"role": SECRET}], guided_regex="(" + SECRET)
            server.client.get(f"/nowhere/{SECRET}?key={SECRET}")
        server.client.post(CHAT, content="{" + SECRET, headers={"content-type": "x/" + SECRET})
        server.terminate()
        status, log = server.wait()
        assert status == 0
        return log


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_prompts_and_keys_are_not_logged(demo_model, level):
    log = log_of(demo_model, "--log-level", level)
    assert SECRET not in log and KEY not in log, log


def test_prompts_are_logged_where_that_is_asked_for(demo_model):
    log = log_of(demo_model, "--max-log-len", "5")
    assert KEY not in log and SECRET not in log
    lines = [line for line in log.splitlines() if " INFO allspark.serve.prompts: " in line]
    assert len(lines) == 5 and all(" demo: '" in line for line in lines), log
    assert sum(line.endswith(f": {SECRET[:5]!r}") for line in lines) == 3
    assert SECRET in log_of(demo_model, "--max-log-len", "100")
