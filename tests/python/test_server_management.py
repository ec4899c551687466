"""The server's routes that change it: sleep, aborts, adapters."""

from __future__ import annotations

import json
import shutil
import threading

import httpx
import pytest
from allspark import AsStatus

pytest.importorskip("fastapi")

from allspark.pipeline.served_model import ServedModel  # noqa: E402
from support.chats import SUM  # noqa: E402
from support.http_server import CHAT, RunningServer, abort_until, error_of, paused  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402


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


def test_a_model_that_fails_takes_no_other_with_it(model, demo_model, monkeypatch):
    """Those that gave their memory back before it get theirs again, at once or by /wakeup."""
    engine = model.engine
    other = ServedModel.open(str(demo_model), name="other", engine=engine)

    def failing(call, status):
        return lambda name: status if name == "other" else call(name)

    def both_answer():
        assert [answer_of(server, name) for name in ("demo", "other")] == ["12 + 35 = 47"] * 2

    with RunningServer([model, other]) as server:
        post = server.client.post
        with monkeypatch.context() as patch:
            call = failing(engine.unload_device_mem, AsStatus.ALLSPARK_RUNTIME_ERROR)
            patch.setattr(engine, "unload_device_mem", call)
            status, error = error_of(post("/sleep"))
            assert (status, error["message"]) == (500, "other cannot give its memory back")
        assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}
        both_answer()
        for status, expected in (
            (AsStatus.ALLSPARK_MEMORY_ERROR, (503, "there is no memory for other")),
            (AsStatus.ALLSPARK_RUNTIME_ERROR, (500, "other cannot take its memory again")),
        ):
            assert post("/sleep").status_code == 200
            with monkeypatch.context() as patch:
                patch.setattr(engine, "load_device_mem", failing(engine.load_device_mem, status))
                code, error = error_of(post("/wakeup"))
                assert (code, error["message"]) == expected
            assert error_of(server.post(CHAT, messages=SUM))[1]["code"] == "sleeping"
            assert post("/wakeup").status_code == 200
            both_answer()
    other.close()


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
        abort_until(server, 1, request_id="b")
        wait_for_requests(model, 2)
        abort_until(server, 2, abort_all=True)
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


def test_one_of_two_adapters_of_a_name_is_loaded(model, demo_model, repo_root):
    """Though they come at once, for different models."""
    other = ServedModel.open(str(demo_model), name="other", engine=model.engine)
    path = str(repo_root / "examples" / "demo_adapter")
    answers = []
    with RunningServer([model, other], allow_adapter_loading=True) as server:

        def load(name):
            body = {"model": name, "lora_name": "same", "lora_path": path}
            url = f"{server.client.base_url}/v1/load_lora_adapter"
            answers.append(httpx.post(url, json=body, timeout=60))

        threads = [threading.Thread(target=load, args=(name,)) for name in ("demo", "other")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        assert len(model.adapters) + len(other.adapters) == 1
        assert server.post("/v1/unload_lora_adapter", lora_name="same").status_code == 200
    other.close()


def test_the_fingerprint_is_that_of_the_adapter_loaded_now(server, repo_root, tmp_path):
    own = repo_root / "examples" / "demo_adapter"
    changed = tmp_path / "changed"
    shutil.copytree(own, changed)
    settings = json.loads((changed / "adapter_config.json").read_text())
    settings["lora_alpha"] *= 2
    (changed / "adapter_config.json").write_text(json.dumps(settings))
    found = []
    for path in (own, changed, own):
        body = {"lora_name": "threes", "lora_path": str(path)}
        assert server.post("/v1/load_lora_adapter", **body).status_code == 200
        answer = server.client.post(CHAT, json={"model": "threes", "messages": SUM}).json()
        found.append(answer["system_fingerprint"])
        server.post("/v1/unload_lora_adapter", lora_name="threes")
    assert found[0] == found[2] != found[1]


def test_what_is_unknown_is_named(server):
    body = {"request_id": "nobody", "frobnicate": 1}
    answer = server.client.post("/abort_request", json=body)
    assert answer.headers["x-allspark-ignored"] == "frobnicate"
