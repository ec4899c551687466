"""/v1/chat/interactive: conversations that the server keeps."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

pytest.importorskip("fastapi")

from allspark.lmdeploy_compat.api_client import APIClient  # noqa: E402
from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve.errors import ApiError  # noqa: E402
from allspark.serve.sessions import Sessions  # noqa: E402
from support.held_masks import held_masks  # noqa: E402
from support.http_server import CHAT, RunningServer, error_of, paused  # noqa: E402
from support.raw_http import Raw, post  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402

TURN = "/v1/chat/interactive"
FIRST, SECOND = "What is 3+4?", "What is 5+5?"
BLOCK = 16


@pytest.fixture(scope="module")
def model(demo_model, repo_root):
    adapters = {"threes": str(repo_root / "examples" / "demo_adapter")}
    config = EngineConfig(block_size=BLOCK, adapters=adapters)
    model = ServedModel.open(str(demo_model), config, "demo")
    yield model
    model.close()


@pytest.fixture
def server(model):
    with RunningServer([model]) as server:
        yield server


def turn(server, prompt, session_id=7, **fields):
    body = {"session_id": session_id, "interactive_mode": True, "temperature": 0, **fields}
    response = server.post(TURN, prompt=prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()


def lines(server, prompt, **fields):
    body = {"session_id": 7, "interactive_mode": True, "temperature": 0, "stream": True, **fields}
    response = server.post(TURN, prompt=prompt, **body)
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines() if line]


def sessions_of(server):
    return server.server.state.sessions


def test_a_turn_computes_what_it_adds(server, model):
    first = turn(server, FIRST)
    assert first["text"] == "3 + 4 = 7" and first["finish_reason"] == "stop"
    assert first["history_tokens"] == 0 and first["session_id"] == 7
    second = turn(server, SECOND)
    assert second["text"] == "5 + 5 = 10"
    # The end of an output is not among its tokens; the next turn's prompt has it.
    history = first["input_tokens"] + first["tokens"]
    assert second["history_tokens"] == history
    assert (history - 1) // BLOCK * BLOCK <= second["cached_tokens"] <= history
    # The same as the whole conversation at once.
    messages = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": SECOND},
    ]
    whole = server.post(CHAT, messages=messages, temperature=0).json()
    assert whole["choices"][0]["message"]["content"] == second["text"]
    assert whole["usage"]["prompt_tokens"] == history + second["input_tokens"]
    third = turn(server, [{"role": "system", "content": "Be brief."},
                          {"role": "user", "content": FIRST}])  # fmt: skip
    assert third["history_tokens"] == history + second["input_tokens"] + second["tokens"]


def test_lines_add_up_to_the_answer(server):
    fields = {"ignore_eos": True, "request_output_len": 400}
    whole = turn(server, FIRST, 1, **fields)
    pieces = lines(server, FIRST, session_id=2, **fields)
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    counts = [piece["tokens"] for piece in pieces]
    assert counts == sorted(counts) and counts[-1] == 400
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    last = {**pieces[-1], "text": whole["text"], "session_id": 1, "cached_tokens": 0}
    assert last == {**whole, "cached_tokens": 0}
    # Both sessions remember the same.
    second = turn(server, SECOND, 1)
    streamed = lines(server, SECOND, session_id=2)
    assert "".join(piece["text"] for piece in streamed) == second["text"]
    assert streamed[-1]["history_tokens"] == second["history_tokens"] > 400
    # Lines come while the output goes on.
    body = {"prompt": FIRST, "model": "demo", "stream": True, "guided_regex": "[a-z]{99}"}
    with held_masks() as masks, server.client.stream("POST", TURN, json=body) as response:
        coming = (json.loads(line) for line in response.iter_lines() if line)
        for count in (1, 2, 3):
            masks.release()
            piece = next(coming)
            assert (piece["tokens"], piece["finish_reason"]) == (count, None)
        masks.release(100)
        assert list(coming)[-1]["finish_reason"] == "stop"


def test_without_interactive_mode_nothing_is_kept(server):
    assert turn(server, FIRST, interactive_mode=False)["text"] == "3 + 4 = 7"
    assert len(sessions_of(server)) == 0
    kept = turn(server, FIRST)
    last = turn(server, SECOND, interactive_mode=False)
    assert last["history_tokens"] == kept["input_tokens"] + kept["tokens"]
    assert len(sessions_of(server)) == 0 and sessions_of(server).num_bytes == 0
    assert turn(server, FIRST)["history_tokens"] == 0
    ended = turn(server, "", interactive_mode=False, request_output_len=0)
    assert (ended["text"], ended["finish_reason"]) == ("", "stop") and ended["history_tokens"] > 0
    assert len(sessions_of(server)) == 0


def test_the_server_makes_ids(server):
    ids = [turn(server, FIRST, -1)["session_id"] for _ in range(2)]
    assert ids[0] != ids[1] and all(2**52 <= i < 2**53 for i in ids)
    assert turn(server, SECOND, ids[0])["history_tokens"] > 0
    assert len(sessions_of(server)) == 2
    turn(server, FIRST, -1, interactive_mode=False)
    assert len(sessions_of(server)) == 2


def in_thread(server, answers, **fields):
    """Asks on a thread with a connection of its own."""

    def ask():
        body = {"model": "demo", "prompt": FIRST, "session_id": 7, "interactive_mode": True}
        with httpx.Client(base_url=server.client.base_url, timeout=60) as client:
            answers.append(client.post(TURN, json={**body, "temperature": 0, **fields}).json())

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_a_turn_is_cancelled_and_excludes_others(server, model):
    answers = []
    with paused(model):
        thread = in_thread(server, answers)
        wait_for_requests(model, 1)
        status, error = error_of(server.post(TURN, prompt=SECOND, session_id=7))
        assert (status, error["code"], error["param"]) == (409, "session_busy", "session_id")
        assert server.post(TURN, session_id=8, cancel=True).json()["finish_reason"] == "stop"
        wait_for_requests(model, 1)
        cancelled = server.post(TURN, session_id=7, cancel=True)
        assert (cancelled.status_code, cancelled.json()["text"]) == (200, "")
        thread.join()
    assert answers[0]["finish_reason"] == "abort" and answers[0]["text"] == ""
    assert server.post(TURN, session_id=7, cancel=True).status_code == 200  # nothing runs
    assert turn(server, SECOND)["text"] == "5 + 5 = 10"


def test_a_turn_whose_client_goes_away_is_forgotten(server, model):
    kept = turn(server, FIRST)
    body = {"prompt": SECOND, "session_id": 7, "interactive_mode": True}
    with paused(model):
        with Raw(server.port).send(post(TURN, **body)):
            wait_for_requests(model, 1)
        wait_for_requests(model, 0)
        streamed = {"model": "demo", **body, "stream": True}
        with server.client.stream("POST", TURN, json=streamed):
            wait_for_requests(model, 1)
        wait_for_requests(model, 0)
    again = turn(server, SECOND)
    assert again["history_tokens"] == kept["input_tokens"] + kept["tokens"]


def test_a_turn_that_fails_is_forgotten(server):
    for fields in (
        {"prompt": [{"role": "user", "content": 7}]},
        {"prompt": FIRST, "stop_token_ids": [99999]},
        {"prompt": FIRST, "guided_regex": "("},
    ):
        body = {"session_id": 7, "interactive_mode": True, **fields}
        assert server.post(TURN, **body).status_code == 400
        assert len(sessions_of(server)) == 0
    kept = turn(server, FIRST)
    assert server.post(TURN, prompt=FIRST, session_id=7, guided_regex="(").status_code == 400
    assert turn(server, SECOND)["history_tokens"] == kept["input_tokens"] + kept["tokens"]


def test_a_full_session_has_no_room(server, model):
    long = "x " * model.session_len
    kept = turn(server, FIRST)
    full = turn(server, long)
    assert (full["text"], full["tokens"], full["finish_reason"]) == ("", 0, "length")
    assert full["input_tokens"] > model.session_len
    assert lines(server, long) == [full]
    assert turn(server, SECOND)["history_tokens"] == kept["input_tokens"] + kept["tokens"]


def test_an_adapter_answers(server):
    assert turn(server, "What is 12+35?", adapter_name="threes")["text"].endswith("48")
    assert turn(server, "What is 12+35?")["text"].endswith("47")


@pytest.mark.parametrize(
    "fields, status, param, message",
    [
        ({}, 400, "prompt", "prompt is empty"),
        ({"prompt": []}, 400, "prompt", "prompt is empty"),
        ({"prompt": "", "interactive_mode": True, "session_id": 3}, 400, "prompt", "is empty"),
        ({"prompt": 7}, 400, "prompt", "it is 7"),
        ({"prompt": "x", "image_url": "http://x/y.png"}, 400, "image_url", "is not served"),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "prompt",
         "image_url"),
        ({"prompt": "x", "session_id": -2}, 400, "session_id", "it is -2"),
        ({"prompt": "x", "session_id": 2**53}, 400, "session_id", str(2**53 - 1)),
        ({"prompt": "x", "request_output_len": 0}, 400, "request_output_len", "at least 1"),
        ({"prompt": "x", "request_output_len": -1}, 400, "request_output_len", "-1"),
        ({"prompt": "x", "n": 2}, 400, "n", "must be 1"),
        ({"prompt": "x", "top_p": 2}, 400, "top_p", "it is 2"),
        ({"cancel": True}, 400, "session_id", "cancel needs"),
        ({"prompt": "x", "adapter_name": "y"}, 404, "adapter_name", "'y'; the adapters are threes"),
        ({"prompt": "x", "model": "y"}, 404, "model", "'y'"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(server, fields, status, param, message):
    found, error = error_of(server.post(TURN, **fields))
    assert (found, error["param"]) == (status, param), error
    assert message in error["message"], error


def test_a_session_stays_with_its_model(model):
    with RunningServer([model]) as server:
        turn(server, FIRST)
        sessions = sessions_of(server)
        with pytest.raises(ApiError, match="a session of the model 'demo'; model is 'other'"):
            sessions.begin_turn(b"", 7, "other", True)


def test_keys_do_not_reach_the_sessions_of_others(model):
    with RunningServer([model], api_keys=("k1", "k2")) as server:
        for key in ("k1", "k2"):
            server.client.headers["authorization"] = f"Bearer {key}"
            assert turn(server, FIRST)["history_tokens"] == 0
        assert turn(server, FIRST)["history_tokens"] > 0


# Bounds.


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_sessions_expire(model):
    with RunningServer([model]) as server:
        clock = Clock()
        server.server.state.sessions = Sessions(10, 0, 60.0, clock)
        turn(server, FIRST, 1)
        clock.now += 50
        turn(server, FIRST, 2)
        clock.now += 20
        assert turn(server, FIRST, 2)["history_tokens"] > 0
        assert len(sessions_of(server)) == 1
        assert turn(server, FIRST, 1)["history_tokens"] == 0


def test_the_session_that_was_not_used_for_longest_goes(model):
    with RunningServer([model], max_sessions=2) as server:
        for session_id in (1, 2, 1, 3):
            turn(server, FIRST, session_id)
        assert [turn(server, FIRST, i)["history_tokens"] > 0 for i in (1, 3)] == [True, True]
        assert turn(server, FIRST, 2)["history_tokens"] == 0


def test_the_end_of_a_session_that_is_not_there_takes_no_other(model):
    with RunningServer([model], max_sessions=1) as server:
        turn(server, FIRST, 1)
        ended = turn(server, "", 2, interactive_mode=False)
        assert (ended["session_id"], ended["history_tokens"]) == (2, 0)
        assert turn(server, FIRST, 1)["history_tokens"] > 0


def test_sessions_whose_turns_run_stay(model):
    with RunningServer([model], max_sessions=1) as server:
        answers = []
        with paused(model):
            thread = in_thread(server, answers)
            wait_for_requests(model, 1)
            body = {"prompt": FIRST, "session_id": 8}
            status, error = error_of(server.post(TURN, **body, interactive_mode=True))
            assert (status, error["code"]) == (429, "too_many_sessions")
            assert "the bound is 1" in error["message"]
        thread.join()
        assert answers[0]["text"] == "3 + 4 = 7"
        assert turn(server, FIRST, 8)["text"] == "3 + 4 = 7"


def test_sessions_are_bounded_in_bytes():
    sessions = Sessions(0, 1000, 0)

    def use(session_id, num_bytes):
        session = sessions.begin_turn(b"", session_id, "m", True)
        sessions.end_turn(session, num_bytes, True)

    def known():
        return [i for i in range(9) if sessions.find(b"", i) is not None]

    for session_id in (1, 2, 3):
        use(session_id, 300)
    use(1, 500)
    assert known() == [1, 3] and sessions.num_bytes == 800
    use(4, 1001)  # by itself too large: no other goes for it
    assert known() == [1, 3] and sessions.num_bytes == 800
    busy = sessions.begin_turn(b"", 1, "m", True)
    use(5, 900)
    assert known() == [1] and sessions.num_bytes == 500
    sessions.end_turn(busy, 1000, True)
    assert known() == [1] and sessions.num_bytes == 1000


def test_the_size_of_a_session_counts_all_of_it(server):
    turn(server, FIRST)
    small = sessions_of(server).num_bytes
    junk = {"role": "user", "content": SECOND, "name": "x" * 10_000}
    turn(server, [junk])
    assert small > 200 and sessions_of(server).num_bytes > small + 10_000


# LMDeploy's client.


def test_lmdeploys_client(server):
    client = APIClient(f"http://127.0.0.1:{server.port}")
    (item,) = client.chat_interactive_v1(FIRST, session_id=5, interactive_mode=True, top_k=1)
    assert item["text"] == "3 + 4 = 7"
    pieces = list(client.chat(SECOND, 5, stream=True, temperature=0))
    assert "".join(text for text, _, _ in pieces) == "5 + 5 = 10"
    assert pieces[-1][1:] == (8, "stop")
    ((text, tokens, reason),) = client.chat(FIRST, 5, request_output_len=2)
    assert (tokens, reason) == (2, "length") and text
    assert len(sessions_of(server)) == 1
    client.end_session(5)
    assert len(sessions_of(server)) == 0
    (refused,) = client.chat_interactive_v1(FIRST, image_url="http://x/y.png")
    assert (refused["object"], refused["code"]) == ("error", 400)
    with pytest.raises(ValueError, match="session_id is -1"):
        next(client.chat(FIRST, -1))
    with pytest.raises(RuntimeError, match="session_id"):
        next(client.chat(FIRST, -2))
