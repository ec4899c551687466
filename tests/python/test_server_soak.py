"""The soak of the server: random requests of every kind from many clients at once, with clients
that go away, requests that are wrong, models that sleep, adapters that come and go, and requests
that are aborted. Answers with a seed must be those of the request alone, or their beginning. After
each round nothing runs and no descriptor is left; memory does not grow after the first rounds. Each
kind and each end must occur, or the soak fails.

ALLSPARK_SERVER_SOAK_SECONDS is its time (60; half an hour in scripts/test.sh), ALLSPARK_SOAK_SEED
the seed.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from support.chats import TEMPLATE  # noqa: E402
from support.http_server import CHAT, COMPLETIONS  # noqa: E402
from support.raw_http import Raw, post  # noqa: E402
from support.server_process import ServerProcess  # noqa: E402
from support.waiting import wait_until  # noqa: E402
from test_server_clients import TOOL  # noqa: E402

SECONDS = float(os.environ.get("ALLSPARK_SERVER_SOAK_SECONDS", "60"))
ROUND, CLIENTS = 240, 12
FEWEST_ROUNDS, MOST_ROUNDS = 6, 60  # the latter if something has not occurred yet
# What allocators keep of the largest requests that happen to meet.
GROWTH_BYTES = 64 << 20
QUESTIONS = ["What is 12+35?", "What is a ResultQueue?", "Name a colour."]
SEEDS = range(6)
FORMAT = {"type": "regex", "regex": "[a-z]{2,20}( [0-9]+){1,3}"}
WRONG = [
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "x", "n": 129}),
    (CHAT, {"messages": "x " * 300_000}),
    (CHAT, {"messages": "x", "json_schema": {"type": "nothing"}}),
    (COMPLETIONS, {"prompt": [[1], []]}),
    ("/v1/embeddings", {"input": ["a"] * 3000}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
]


def seeded(question, seed):
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "seed": seed, "temperature": 1.5, "max_tokens": 40}


class Client:
    """One thread's client. Each method is a kind of request and returns how it ended."""

    def __init__(self, soak, seed):
        self.soak = soak
        self.rng = random.Random(seed)
        self.http = httpx.Client(base_url=soak.server.client.base_url, timeout=120)

    def post(self, path, **body):
        answer = self.http.post(path, json={"model": "demo", **body})
        aborted = answer.status_code == 409 and answer.json()["error"]["code"] == "request_aborted"
        wrong = (path, body, answer.status_code, answer.text)
        assert aborted or answer.status_code in (200, 503), wrong
        if answer.status_code == 503:
            assert "the models sleep" in answer.json()["error"]["message"], answer.text
            return None
        return answer

    def check(self, key, text, reason):
        expected, ended = self.soak.alone[key]
        if reason == "abort":
            assert expected.startswith(text.rstrip("\ufffd")), (key, text)
            return "aborted"
        assert (text, reason) == (expected, ended), key
        return "whole"

    def key(self):
        return self.rng.choice(QUESTIONS), self.rng.choice(SEEDS)

    def whole_chat(self):
        key = self.key()
        answer = self.post(CHAT, **seeded(*key))
        if answer is None:
            return "asleep"
        (choice,) = answer.json()["choices"]
        return self.check(key, choice["message"]["content"], choice["finish_reason"])

    def streamed_chat(self):
        key = self.key()
        answer = self.post(CHAT, **seeded(*key), stream=True)
        if answer is None:
            return "asleep"
        parts = answer.text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        events = [json.loads(part[6:]) for part in parts[:-2] if part.startswith("data: ")]
        choices = [event["choices"][0] for event in events]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        return self.check(key, text, choices[-1]["finish_reason"])

    def gone(self):
        question, seed = self.key()
        path, fields = self.rng.choice(
            [
                (CHAT, {**seeded(question, seed), "n": self.rng.randint(1, 4)}),
                (COMPLETIONS, {"prompt": question, "logprobs": 5, "echo": True}),
                ("/generate", {"prompt": question}),
                ("/v1/messages", {"messages": seeded(question, seed)["messages"]}),
            ]
        )
        fields = {**fields, "max_tokens": 500, "stream": self.rng.random() < 0.7}
        data = post(path, **fields)
        raw = Raw(self.soak.server.port)
        if self.rng.random() < 0.2:
            raw.send(data[: self.rng.randrange(len(data))])
        else:
            raw.send(data * self.rng.choice((1, 1, 2)))
            if fields["stream"] and self.rng.random() < 0.7 and raw.head().status == 200:
                left = self.rng.randint(1, 5)
                while left and raw.chunk():
                    left -= 1
        raw.close() if self.rng.random() < 0.5 else raw.reset()
        return "gone"

    def wrong(self):
        path, fields = self.rng.choice(WRONG)
        answer = self.http.post(path, json={"model": "demo", "max_tokens": 4, **fields})
        assert answer.status_code in (400, 503), (path, answer.status_code, answer.text)
        assert answer.json()["error"]["message"]
        return "refused" if answer.status_code == 400 else "asleep"

    def nonsense(self):
        with Raw(self.soak.server.port) as raw:
            raw.send(bytes(self.rng.randrange(256) for _ in range(40)) + b"\r\n\r\n")
            assert raw.answer().status == 400
            return "refused"

    def tools(self):
        fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        question, seed = self.key()
        answer = self.post(CHAT, **{**seeded(question, seed), **fields, "max_tokens": 300},
                           chat_template=TEMPLATE)  # fmt: skip
        if answer is None:
            return "asleep"
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "abort":
            return "aborted"
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["zone"] in ("CET", "UTC")
        return "whole"

    def texts(self):
        question, seed = self.key()
        path, fields = self.rng.choice(
            [
                ("/v1/embeddings", {"input": [question] * 4}),
                ("/tokenize", {"prompt": question * self.rng.choice((1, 1, 30_000))}),
                ("/get_ppl", {"input": question}),
                ("/v1/messages/count_tokens", {"messages": seeded(question, seed)["messages"]}),
                (COMPLETIONS, {"prompt": question, "echo": True, "logprobs": 3, "max_tokens": 0}),
                (CHAT, {**seeded(question, seed), "response_format": FORMAT, "n": 3}),
            ]
        )
        return "asleep" if self.post(path, **fields) is None else "whole"

    def adapter(self):
        name = f"a{self.rng.randrange(3)}"
        path = str(self.soak.adapter)
        load = {"model": "demo", "lora_name": name, "lora_path": path}
        loaded = self.http.post("/v1/load_lora_adapter", json=load)
        asked = self.http.post(CHAT, json={**seeded("What is 12+35?", 1), "model": name})
        gone = self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        for answer in (loaded, asked, gone):  # others may have the same name, or all places
            assert answer.status_code in (200, 400, 404, 409, 503), answer.text
        return "whole" if asked.status_code == 200 else "refused"

    def sleep(self):
        assert self.http.post("/sleep").status_code == 200
        time.sleep(self.rng.random() / 20)
        assert self.http.post("/wakeup").status_code == 200
        return "slept"

    def abort(self):
        answer = self.http.post("/abort_request", json={"abort_all": True})
        return "aborting" if answer.json()["aborted"] else "nothing to abort"

    def look(self):
        for path in ("/health", "/metrics", "/v1/models", "/openapi.json"):
            assert self.http.get(path).status_code == 200
        return "whole"


KINDS = {
    Client.whole_chat: 20, Client.streamed_chat: 20, Client.gone: 25, Client.wrong: 8,
    Client.nonsense: 2, Client.tools: 6, Client.texts: 10, Client.adapter: 3, Client.sleep: 1,
    Client.abort: 1, Client.look: 4,
}  # fmt: skip
ENDS = {"whole", "gone", "refused", "asleep", "aborted", "slept", "aborting"}


class Soak:
    def __init__(self, server, adapter, seed):
        self.server, self.adapter = server, adapter
        self.rng = random.Random(seed)
        self.met = Counter()
        self.alone = {}
        for question in QUESTIONS:
            for number in SEEDS:
                (choice,) = server.post(CHAT, **seeded(question, number)).json()["choices"]
                found = choice["message"]["content"], choice["finish_reason"]
                self.alone[question, number] = found

    def round(self):
        names = self.rng.choices(list(KINDS), list(KINDS.values()), k=ROUND)
        left, lock, errors = iter(names), threading.Lock(), []

        def work(seed):
            client = Client(self, seed)
            while not errors:
                with lock:
                    kind = next(left, None)
                if kind is None:
                    break
                try:
                    end = kind(client)
                except BaseException as error:
                    errors.append((kind.__name__, error))
                    break
                with lock:
                    self.met.update((f"kind: {kind.__name__}", f"end: {end}"))
            client.http.close()

        threads = [threading.Thread(target=work, args=(self.rng.random(),)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise AssertionError(errors[0][0]) from errors[0][1]

    def held(self):
        """Descriptors and threads that the server has, once nothing runs."""
        process = Path(f"/proc/{self.server.process.pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        memory = 1024 * int(status["VmRSS"].split()[0])
        return len(list((process / "fd").iterdir())), memory

    def settle(self, descriptors=None):
        """What is held after a round; waits until descriptors are those given."""
        wait_until(lambda: not self.server.num_requests())
        if descriptors is not None:
            most = f"it must hold at most {descriptors} descriptors"
            wait_until(lambda: self.held()[0] <= descriptors, what=most)
        return self.held()

    def missing(self):
        expected = {f"kind: {kind.__name__}" for kind in KINDS} | {f"end: {end}" for end in ENDS}
        return expected - set(self.met)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_soak(demo_model, repo_root):
    seed = int(os.environ.get("ALLSPARK_SOAK_SEED", str(random.randrange(10**6))))
    print(f"seed {seed}")
    flags = ("--allow-adapter-loading", "--allow-request-templates", "--tool-call-parser", "qwen",
             "--max-batch-size", "8", "--session-len", "1024")  # fmt: skip
    with ServerProcess(demo_model, *flags) as server:
        soak = Soak(server, repo_root / "examples" / "demo_adapter", seed)
        descriptors, _ = soak.settle()
        end, curve = time.monotonic() + SECONDS, []
        while time.monotonic() < end or len(curve) < FEWEST_ROUNDS or soak.missing():
            assert len(curve) < MOST_ROUNDS or time.monotonic() < end, soak.missing()
            soak.round()
            # Threads of the loop begin late, but a connection is closed once its client is gone.
            found, memory = soak.settle(descriptors + 4)
            curve.append(memory)
            assert len(curve) < FEWEST_ROUNDS or found <= descriptors + 4
        print(dict(soak.met))
        print("MiB after each round:", [memory >> 20 for memory in curve])
        warm = max(curve[: max(3, len(curve) // 4)])
        assert max(curve[-3:]) <= warm + GROWTH_BYTES, curve
        health = server.client.send(httpx.Request("GET", f"{server.client.base_url}/health"))
        assert health.json() == {"status": "healthy"} and not soak.missing()
        server.terminate()
        status, log = server.wait()
        assert status == 0
        assert "Traceback" not in log, log[-4000:]
