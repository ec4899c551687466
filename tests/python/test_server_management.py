"""The server's routes that change it: sleep, aborts, adapters."""

from __future__ import annotations

import threading

import httpx
import pytest

pytest.importorskip("fastapi")

from support.http_server import CHAT, RunningServer, error_of, paused, wait_for_requests  # noqa: E402

SUM = [{"role": "user", "content": "What is 12+35?"}]


@pytest.fixture(scope="module")
def server(model):
    with RunningServer([model], allow_adapter_loading=True) as server:
        yield server


def answer_of(server, model="demo"):
    body = {"model": model, "messages": SUM, "temperature": 0}
    response = server.client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_sleeping_models_give_their_memory_back(server, model):
    client = server.client
    before = model.engine.get_as_engine_stat("demo").used_device_memory_pool_size
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    for _ in range(2):
        assert client.post("/sleep").status_code == 200
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.get("/health").json() == {"status": "sleeping"}
    assert model.engine.get_as_engine_stat("demo").used_device_memory_pool_size < before
    status, error = error_of(server.post(CHAT, messages=SUM))
    assert (status, error["code"]) == (503, "sleeping")
    for _ in range(2):
        assert client.post("/wakeup").status_code == 200
    assert answer_of(server) == "12 + 35 = 47"


def test_requests_are_aborted_by_their_id(server, model):
    answers = {}

    def ask(name):
        body = {"model": "demo", "messages": SUM}
        with httpx.Client(base_url=server.client.base_url, timeout=60) as client:
            response = client.post(CHAT, json=body, headers={"x-request-id": name})
            answers[name] = response.json()["choices"][0]["finish_reason"]

    with paused(model):
        threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        wait_for_requests(model, 3)
        assert server.post("/abort_request", request_id="nobody").json() == {"aborted": 0}
        assert server.post("/abort_request", request_id="b").json() == {"aborted": 1}
        wait_for_requests(model, 2)
        assert server.post("/abort_request", abort_all=True).json() == {"aborted": 2}
        for thread in threads:
            thread.join()
    assert answers == {"a": "abort", "b": "abort", "c": "abort"}
    status, error = error_of(server.post("/abort_request"))
    assert (status, error["param"]) == (400, "request_id")


def test_adapters_come_and_go(server, repo_root, tmp_path):
    path = str(repo_root / "examples" / "demo_adapter")
    response = server.post("/v1/load_lora_adapter", lora_name="threes", lora_path=path)
    assert response.json() == {"status": "loaded", "model": "threes"}
    assert answer_of(server, "threes").endswith("48") and answer_of(server).endswith("47")
    again = server.post("/v1/load_lora_adapter", lora_name="threes", lora_path=path)
    assert error_of(again)[1]["param"] == "lora_name"
    missing = server.post("/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path / "no"))
    status, error = error_of(missing)
    assert (status, error["param"]) == (400, "lora_path") and "no" in error["message"]
    assert error_of(server.post("/v1/unload_lora_adapter", lora_name="demo"))[0] == 400
    gone = server.post("/v1/unload_lora_adapter", lora_name="threes")
    assert gone.json() == {"status": "unloaded", "model": "threes"}
    assert error_of(server.post("/v1/unload_lora_adapter", lora_name="threes"))[0] == 404


def test_adapters_need_a_flag(model):
    with RunningServer([model]) as server:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            status, error = error_of(server.post(path, lora_name="x", lora_path="y"))
            assert status == 403 and "--allow-adapter-loading" in error["message"]
