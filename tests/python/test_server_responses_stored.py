"""Responses that are stored, streamed in parts, and run in the background."""

from __future__ import annotations

import argparse
import random
import sqlite3
import threading
import time

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402
from support.chats import ASK_TEXT, QUEUE_TEXT, SUM_TEXT, user  # noqa: E402
from support.http_server import RunningServer, abort_until, error_of, paused  # noqa: E402
from support.raw_http import Raw, post  # noqa: E402
from support.responses import (  # noqa: E402
    CLOCK,
    RESPONSES,
    RunningClient,
    added_up,
    ask,
    body,
    cancel,
    events_after,
    events_of,
    first_events,
    get,
    read_events,
    text_of,
    when_ended,
)
from support.waiting import num_requests, wait_for_requests, wait_until  # noqa: E402


@pytest.fixture(scope="module")
def long_model(demo_model):
    """Its outputs may be so long that a test comes before their end."""
    model = ServedModel.open(str(demo_model), EngineConfig(session_len=1 << 16), name="demo")
    yield model
    model.close()


@pytest.fixture(scope="module")
def long_server(long_model):
    with RunningServer([long_model]) as server:
        yield server


# Stored responses.


def test_responses_are_stored(server):
    answer = ask(server, input=SUM_TEXT, metadata={"a": "b"})
    assert get(server, answer["id"]).json() == answer
    deleted = server.client.delete(f"{RESPONSES}/{answer['id']}")
    assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
    for method, path in (
        ("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("DELETE", ""),
        ("POST", "/cancel"),
    ):  # fmt: skip
        response = server.client.request(method, f"{RESPONSES}/{answer['id']}{path}")
        status, error = error_of(response)
        assert (status, error["code"], error["param"]) == (
            404, "response_not_found", "response_id"
        )  # fmt: skip
        assert answer["id"] in error["message"]
    kept = ask(server, input=SUM_TEXT, store=False)
    assert kept["store"] is False and get(server, kept["id"]).status_code == 404
    streamed = added_up(events_of(server, input=SUM_TEXT, store=False))
    assert get(server, streamed["id"]).status_code == 404


def test_input_items_are_listed(server):
    items = [user(f"{i}") for i in range(5)]
    first = ask(server, input=items, instructions="Be short.", max_output_tokens=1)
    id = ask(server, input=SUM_TEXT, previous_response_id=first["id"], max_output_tokens=1)["id"]
    path = f"{first['id']}/input_items"

    def listed(**query):
        page = get(server, path, **query).json()
        texts = [item["content"][0]["text"] for item in page["data"]]
        assert page["object"] == "list"
        assert page["first_id"] == page["data"][0]["id"]
        assert page["last_id"] == page["data"][-1]["id"]
        return "".join(texts), page["has_more"], page["last_id"]

    assert listed()[:2] == ("43210", False)
    assert listed(order="asc")[:2] == ("01234", False)
    text, has_more, last = listed(order="asc", limit=2)
    assert (text, has_more) == ("01", True)
    text, has_more, last = listed(order="asc", limit=2, after=last)
    assert (text, has_more) == ("23", True)
    assert listed(order="asc", limit=2, after=last)[:2] == ("4", False)
    assert listed(after=last, **{"include[]": "reasoning.encrypted_content"})[0] == "210"
    # The items of the response before are not among them.
    assert len(get(server, f"{id}/input_items").json()["data"]) == 1
    for query, place in (
        ({"limit": 0}, "limit is '0'; it must be a whole number, 1 to 100"),
        ({"limit": 101}, "limit is '101'"),
        ({"limit": "x"}, "limit is 'x'"),
        ({"order": "up"}, "order is 'up'; it must be 'asc' or 'desc'"),
        ({"after": "x"}, "after is 'x'; no item of the list has it"),
    ):
        status, error = error_of(get(server, path, **query))
        assert status == 400 and place in error["message"]


def stored_library(server):
    """The server's responses, once all that ended are stored: until then it reads none of them."""
    library = server.server.state.responses
    wait_until(lambda: not library.running, 30)
    return library


def references_to(answer, count):
    return [{"type": "item_reference", "id": answer["output"][0]["id"]}] * count


def test_a_response_that_items_refer_to_is_read_once(server, monkeypatch):
    answers = [ask(server, input=SUM_TEXT) for _ in range(2)]
    library = stored_library(server)
    read, load = [], library._load
    monkeypatch.setattr(library, "_load", lambda id: read.append(id) or load(id))
    items = [user(SUM_TEXT)]
    for answer in answers * 2:
        items += [*references_to(answer, 10), user(QUEUE_TEXT)]
    assert ask(server, input=items)["status"] == "completed"
    assert read == [answer["id"] for answer in answers]


def test_items_that_are_referred_to_are_bounded(model):
    with RunningServer([model], max_body_bytes=2000) as server:
        answer = ask(server, input="x" * 700, max_output_tokens=1)
        (given,) = get(server, f"{answer['id']}/input_items").json()["data"]
        assert server.post(RESPONSES, input=[{"id": given["id"]}] * 2).status_code == 200
        status, error = error_of(server.post(RESPONSES, input=[{"id": given["id"]}] * 3))
        assert (status, error["param"]) == (400, "input")
        assert "refers to items that have more than 2000 characters together" in error["message"]


def test_who_refers_to_stored_responses_may_go(server, monkeypatch):
    answer = ask(server, input=SUM_TEXT)
    library = stored_library(server)
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        reading, free = threading.Event(), threading.Event()

        def load(id, reading=reading, free=free):
            reading.set()
            assert free.wait(30)

        monkeypatch.setattr(library, "_load", load)
        raw = Raw(server.port).send(post(path, input=references_to(answer, 1)))
        try:
            assert reading.wait(30) and server.server.state.num_running == 1
            raw.reset()
            wait_until(lambda: not server.server.state.num_running, 20)
        finally:
            free.set()


def test_the_store_is_bounded(model):
    with RunningServer([model], max_stored_responses=3) as server:
        ids = [ask(server, input=SUM_TEXT, max_output_tokens=1)["id"] for _ in range(2)]
        stored_library(server)
        # Going on from a response uses it.
        go_on = {"input": SUM_TEXT, "max_output_tokens": 1}
        ids.append(ask(server, **go_on, previous_response_id=ids[0])["id"])
        ids.append(ask(server, **go_on)["id"])
        stored_library(server)
        found = [get(server, id).status_code for id in ids]
        assert found == [200, 404, 200, 200]
    with RunningServer([model], max_stored_responses=0) as server:
        answer = ask(server, input=SUM_TEXT)
        assert answer["store"] is False
        assert get(server, answer["id"]).status_code == 404
        status, error = error_of(server.post(RESPONSES, input=SUM_TEXT, background=True))
        assert status == 400 and "this server stores no responses" in error["message"]
    with RunningServer([model], max_stored_response_bytes=100) as server:
        answer = ask(server, input=SUM_TEXT)
        stored_library(server)
        assert get(server, answer["id"]).status_code == 404
        status, error = error_of(server.post(RESPONSES, input=SUM_TEXT, background=True))
        assert (status, error["code"]) == (429, "response_store_full")


def test_a_store_that_cannot_be_written_harms_no_answer(model, tmp_path, monkeypatch):
    from allspark.serve.responses.shelf import FileShelf

    def full(self, id, data, used):
        raise sqlite3.OperationalError("database or disk is full")

    with RunningServer([model], response_store=str(tmp_path / "responses.db")) as server:
        before = ask(server, input=SUM_TEXT)
        with monkeypatch.context() as patch:
            patch.setattr(FileShelf, "write", full)
            answer = ask(server, input=SUM_TEXT)
            assert text_of(answer) == "12 + 35 = 47"
            streamed = added_up(events_of(server, input=SUM_TEXT))
            status, error = error_of(server.post(RESPONSES, input=SUM_TEXT, background=True))
            assert (status, error["code"]) == (503, "response_store_failed")
            wait_for_requests(model, 0)
            for id in (answer["id"], streamed["id"]):
                assert get(server, id).status_code in (200, 404)  # 200 until it was tried
            assert get(server, before["id"]).json() == before
        assert get(server, answer["id"]).status_code == 404
        after = ask(server, input=SUM_TEXT, previous_response_id=before["id"])
        assert get(server, after["id"]).json() == after


def test_what_has_expired_is_gone(model):
    with RunningServer([model], response_lifetime=1e-9) as server:
        answer = ask(server, input=SUM_TEXT)
        stored_library(server)
        assert get(server, answer["id"]).status_code == 404


def test_a_background_response_that_grows_too_large_says_so(model):
    """Its input has room, its output has not."""
    with RunningServer([model], max_stored_response_bytes=2500) as server:
        fields = {"input": SUM_TEXT, "ignore_eos": True, "background": True}
        id = ask(server, **fields, max_output_tokens=1500)["id"]
        answer = when_ended(server, id)
        while answer["status"] == "incomplete":  # it has ended, and is being stored
            answer = get(server, id).json()
        assert answer["status"] == "failed" and answer["output"] == []
        assert "the bound is 2500" in answer["error"]["message"]


def test_a_full_store_takes_no_more_background_responses(model):
    with RunningServer([model], max_stored_responses=2) as server, paused(model):
        ids = [ask(server, input=SUM_TEXT, background=True)["id"] for _ in range(2)]
        response = server.post(RESPONSES, input=SUM_TEXT, background=True)
        status, error = error_of(response)
        assert (status, error["code"]) == (429, "response_store_full")
        assert "2 responses run; the bound is 2" in error["message"]
        assert response.headers["retry-after"] == "1"
        wait_for_requests(model, 2)  # the refused one is not left running
        assert [get(server, id).json()["status"] for id in ids] == ["queued", "queued"]
    wait_for_requests(model, 0)


def test_a_file_outlives_the_server(model, tmp_path):
    settings = {"response_store": str(tmp_path / "responses.db"), "shutdown_timeout": 0.1}
    with RunningServer([model], **settings) as server:
        first = ask(server, input=SUM_TEXT)
        streamed = events_of(server, input=QUEUE_TEXT)
        gone = ask(server, input=SUM_TEXT)["id"]
        server.client.delete(f"{RESPONSES}/{gone}")
        with pytest.raises(ValueError, match="locked"):
            RunningServer([model], **settings)
        with paused(model):
            lost = ask(server, input=SUM_TEXT, background=True)
            server.server.stop()
            server._thread.join(40)
            wait_for_requests(model, 0)
    with RunningServer([model], **settings) as server:
        assert get(server, first["id"]).json() == first
        assert events_after(server, streamed[0]["response"]["id"], 3) == streamed[4:]
        second = ask(server, input="And 2+2?", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert get(server, gone).status_code == 404
        answer = get(server, lost["id"]).json()
        assert answer["status"] == "failed" and answer["error"]["code"] == "server_error"
        assert "the server ended" in answer["error"]["message"]


def test_a_server_that_was_killed_lost_what_ran(model, tmp_path):
    """Its record in the file says that it runs."""
    from allspark.serve.responses.record import Record
    from allspark.serve.responses.shelf import FileShelf

    path = str(tmp_path / "responses.db")
    with RunningServer([model], response_store=path) as server:
        id = ask(server, input=SUM_TEXT)["id"]
    shelf = FileShelf(path)
    record = Record.from_bytes(shelf.read(id))
    record.status = "in_progress"
    shelf.write(id, record.to_bytes(), time.time())
    shelf.write("resp_broken", b"{}", time.time())
    shelf.close()
    with RunningServer([model], response_store=path) as server:
        answer = get(server, id).json()
        assert answer["status"] == "failed" and text_of(answer) == "12 + 35 = 47"
        assert events_after(server, id)[-1]["type"] == "response.failed"
        assert cancel(server, id).status_code == 400  # it did not run in the background
        assert get(server, "resp_broken").status_code == 404


# Streams that go on, the background, and clients that go away.


def test_a_background_response_is_polled(server, model):
    with paused(model):
        begun = ask(server, input=SUM_TEXT, background=True)
        assert (begun["status"], begun["background"]) == ("queued", True)
        assert begun["output"] == [] and begun["usage"] is None
        assert get(server, begun["id"]).json() == begun
    answer = when_ended(server, begun["id"])
    assert answer["status"] == "completed" and text_of(answer) == "12 + 35 = 47"
    assert cancel(server, begun["id"]).json() == answer
    follow = ask(server, input=QUEUE_TEXT, previous_response_id=begun["id"])
    assert follow["status"] == "completed"
    status, error = error_of(server.post(RESPONSES, input=SUM_TEXT, background=True, store=False))
    assert status == 400 and "background is true; it needs store" in error["message"]


def test_background_and_stream(server):
    events = events_of(server, input=SUM_TEXT, background=True)
    answer = added_up(events)
    assert text_of(answer) == "12 + 35 = 47" and answer["background"]
    assert [event["type"] for event in events[:3]] == [
        "response.created", "response.queued", "response.in_progress"
    ]  # fmt: skip
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "queued"
    assert get(server, answer["id"]).json() == answer
    # Also where nothing but the end of the output comes.
    empty = added_up(events_of(server, input=SUM_TEXT, background=True, stop=["1"]))
    assert text_of(empty) == "" and empty["status"] == "completed"


def test_a_stored_stream_goes_on_after_every_event(tool_server):
    fields = {"tools": [CLOCK], "tool_choice": "required", "max_output_tokens": 300}
    events = events_of(tool_server, input=ASK_TEXT, **fields)
    id = events[0]["response"]["id"]
    assert events_after(tool_server, id) == events
    for after in range(len(events)):
        assert events_after(tool_server, id, after) == events[after + 1 :]
    assert events_after(tool_server, id, 10**6) == []
    for after, stream, message in (
        (-1, "true", "starting_after is '-1'; it must be a whole number, at least 0"),
        ("x", "true", "starting_after is 'x'"),
        (0, "false", "starting_after is 0; it needs stream to be true"),
        (0, "maybe", "stream is 'maybe'; it must be true or false"),
    ):
        status, error = error_of(get(tool_server, id, stream=stream, starting_after=after))
        assert status == 400 and message in error["message"]


def test_a_cut_stream_goes_on_where_it_was(server, model):
    with paused(model):
        begun = first_events(server, 2, **body(background=True))
        id = begun[0]["response"]["id"]
        wait_for_requests(model, 1)
        # It is cut again, twice at the same place.
        path = f"{RESPONSES}/{id}?stream=true&starting_after=0"
        assert first_events(server, 1, "GET", path) == begun[1:]
        assert first_events(server, 1, "GET", path) == begun[1:]
        wait_for_requests(model, 1)
    events = begun + events_after(server, id, 1)
    answer = added_up(events)
    assert text_of(answer) == "12 + 35 = 47" and answer["status"] == "completed"
    assert events_after(server, id) == events


def test_a_stream_is_cut_while_its_tokens_come(long_server, long_model):
    fields = {"background": True, "ignore_eos": True, "max_output_tokens": 3000}
    events = first_events(long_server, 6, **body(**fields))
    id = events[0]["response"]["id"]
    for _ in range(3):
        path = f"{RESPONSES}/{id}?stream=true&starting_after={len(events) - 1}"
        events += first_events(long_server, 1, "GET", path)
    events += events_after(long_server, id, len(events) - 1)
    answer = added_up(events)
    assert answer["usage"]["output_tokens"] == 3000 and answer["status"] == "incomplete"
    fields = {"ignore_eos": True, "max_output_tokens": 3000}
    assert text_of(ask(long_server, input=SUM_TEXT, **fields)) == text_of(answer)


def test_several_clients_read_one_stream(server, model):
    with paused(model):
        id = ask(server, input=QUEUE_TEXT, background=True)["id"]
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(events_after(server, id)))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        wait_for_requests(model, 1)
    for thread in threads:
        thread.join()
    assert len(found) == 5 and all(each == found[0] for each in found)
    added_up(found[0])


def test_a_queued_response_is_cancelled(server, model):
    with paused(model):
        begun = ask(server, input=SUM_TEXT, background=True)
        wait_for_requests(model, 1)
        answer = cancel(server, begun["id"]).json()
        assert (answer["status"], answer["output"]) == ("cancelled", [])
        wait_for_requests(model, 0)
        assert cancel(server, begun["id"]).json() == answer
    assert get(server, begun["id"]).json() == answer
    types = [event["type"] for event in events_after(server, begun["id"])]
    assert types == ["response.created", "response.queued", "response.incomplete"]


def test_a_response_is_cancelled_while_its_tokens_come(long_server, long_model):
    fields = body(background=True, ignore_eos=True, max_output_tokens=60_000)
    with long_server.client.stream("POST", RESPONSES, **fields) as response:
        data, parts = "", response.iter_text()
        while "output_text.delta" not in data:
            data += next(parts)
        id = read_events(data)[0]["response"]["id"]
        with RunningClient(long_server) as other:
            running = get(other, id).json()
            answer = cancel(other, id).json()
        data += "".join(parts)
    wait_for_requests(long_model, 0)
    assert running["status"] == "in_progress" and running["usage"] is None
    assert [item["status"] for item in running["output"]] == ["in_progress"]
    assert answer["status"] == "cancelled" and text_of(answer).startswith(text_of(running))
    assert text_of(running) and answer["usage"]["output_tokens"] > 0
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    assert added_up(read_events(data)) == answer
    assert get(long_server, id).json() == answer


def test_only_background_responses_are_cancelled(server):
    answer = ask(server, input=SUM_TEXT)
    status, error = error_of(cancel(server, answer["id"]))
    assert (status, error["param"]) == (400, "response_id")
    assert "does not run in the background" in error["message"]


def test_responses_are_cancelled_while_the_models_sleep(long_server, long_model):
    post = long_server.client.post
    fields = {"ignore_eos": True, "max_output_tokens": 60_000}
    id = ask(long_server, input=SUM_TEXT, background=True, **fields)["id"]
    assert post("/sleep").status_code == 200
    try:
        assert error_of(long_server.post(RESPONSES, input=SUM_TEXT))[0] == 503
        assert get(long_server, id).status_code == 200
        assert cancel(long_server, id).json()["status"] == "cancelled"
    finally:
        assert post("/wakeup").status_code == 200
    wait_for_requests(long_model, 0)


def test_a_running_response_is_deleted(server, model):
    with paused(model):
        id = ask(server, input=SUM_TEXT, background=True)["id"]
        wait_for_requests(model, 1)
        assert server.client.delete(f"{RESPONSES}/{id}").json()["deleted"]
        wait_for_requests(model, 0)
        assert get(server, id).status_code == 404
        begun = []
        with server.client.stream("POST", RESPONSES, **body()) as response:
            parts = response.iter_text()
            begun = read_events(next(parts))
            with RunningClient(server) as other:
                id = begun[0]["response"]["id"]
                assert other.client.delete(f"{RESPONSES}/{id}").json()["deleted"]
            last = read_events("".join(parts))[-1]
        assert last["response"]["status"] == "cancelled"
        wait_for_requests(model, 0)
    assert get(server, id).status_code == 404


def test_an_aborted_response_is_cancelled(server, model):
    headers = {"x-request-id": "mine"}
    found = []
    with paused(model):
        thread = threading.Thread(
            target=lambda: found.append(
                server.client.post(RESPONSES, headers=headers, json={"input": SUM_TEXT})
            )
        )
        thread.start()
        wait_for_requests(model, 1)
        abort_until(server, 1, request_id="mine")
    thread.join()
    assert found[0].json()["status"] == "cancelled"


def test_a_client_that_goes_away_ends_its_request(server, model, long_server, long_model):
    for fields in ({}, {"store": False}):
        with paused(model):
            begun = first_events(server, 2, **body(**fields))
            wait_for_requests(model, 0)
    # What had come of the stored one stays, under the numbers that it had.
    with paused(model):
        begun = first_events(server, 2, **body())
        wait_for_requests(model, 0)
    id = begun[0]["response"]["id"]
    assert when_ended(server, id)["status"] == "cancelled"
    assert events_after(server, id)[:2] == begun
    with paused(model):
        with Raw(server.port).send(post(RESPONSES, input=SUM_TEXT)):
            wait_for_requests(model, 1)
        wait_for_requests(model, 0)
    # While its tokens come, too.
    events = first_events(long_server, 8, **body(ignore_eos=True, max_output_tokens=60_000))
    wait_for_requests(long_model, 0)
    answer = when_ended(long_server, events[0]["response"]["id"])
    assert answer["status"] == "cancelled"
    assert text_of(answer).startswith("".join(event["delta"] for event in events[4:]))


def test_a_client_that_goes_away_leaves_a_background_response(server, model):
    with paused(model):
        begun = first_events(server, 2, **body(background=True))
        id = begun[0]["response"]["id"]
        # The connection's end is known once a request on another was answered.
        assert get(server, id).json()["status"] == "queued"
        assert num_requests(model) == 1
    assert text_of(when_ended(server, id)) == "12 + 35 = 47"


def test_readers_that_go_away_end_nothing(server, model):
    """Only the client that asked for a response ends it."""
    with paused(model):
        with server.client.stream("POST", RESPONSES, **body()) as response:
            parts = response.iter_text()
            id = read_events(next(parts))[0]["response"]["id"]
            with RunningClient(server) as other:
                first_events(other, 1, "GET", f"{RESPONSES}/{id}?stream=true")
                assert get(other, id).json()["status"] == "in_progress"
            assert num_requests(model) == 1
    wait_for_requests(model, 0)


# The end of the server.


def test_a_shutdown_waits_for_background_responses(model, tmp_path):
    path = str(tmp_path / "responses.db")
    with RunningServer([model], response_store=path) as server:
        with paused(model):
            id = ask(server, input=SUM_TEXT, background=True)["id"]
            wait_for_requests(model, 1)
            server.server.stop()
            wait_until(lambda: server.client.get("/health").status_code == 503)
            assert get(server, id).json()["status"] == "queued"
            assert error_of(server.post(RESPONSES, input=SUM_TEXT))[0] == 503
        server._thread.join(40)
    with RunningServer([model], response_store=path) as server:
        assert text_of(get(server, id).json()) == "12 + 35 = 47"


def test_background_responses_count_as_running(model):
    with RunningServer([model], max_concurrent_requests=1) as server:
        with paused(model):
            id = ask(server, input=SUM_TEXT, background=True)["id"]
            assert error_of(server.post(RESPONSES, input=SUM_TEXT))[0] == 429
            assert cancel(server, id).json()["status"] == "cancelled"
            # A cancelled one makes room.
            assert ask(server, input=SUM_TEXT, background=True)["status"] == "queued"
    wait_for_requests(model, 0)


def test_many_at_once_leave_nothing_behind(model):
    """Ordinary ones and ones in the background, streamed and not, read, left and cancelled."""
    random.seed(7)
    plans = [[random.randrange(6) for _ in range(12)] for _ in range(8)]
    failures = []

    def use(server, actions):
        try:
            with RunningClient(server) as client:
                id = None
                for action in actions:
                    fields = {"input": QUEUE_TEXT, "max_output_tokens": 60, "temperature": 0}
                    fields |= {"previous_response_id": id, "model": "demo"}
                    if action == 0:
                        id = client.client.post(RESPONSES, json=fields).json()["id"]
                    elif action == 1:
                        first_events(client, 1, **body(**fields))
                    elif action == 2:
                        first_events(client, 1, **body(**fields, background=True))
                    else:
                        fields["background"] = True
                        begun = client.client.post(RESPONSES, json=fields).json()
                        if action == 3:
                            assert cancel(client, begun["id"]).status_code == 200
                        elif action == 4:
                            url = f"{RESPONSES}/{begun['id']}"
                            assert client.client.delete(url).status_code == 200
                        else:
                            added_up(events_after(client, begun["id"]))
        except BaseException as error:
            failures.append(error)
            raise

    with RunningServer([model]) as server:
        threads = [threading.Thread(target=use, args=(server, plan)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        state = server.server.state
        wait_until(lambda: not (state.num_running or state.responses.running), 30)
        wait_for_requests(model, 0)


def test_the_command_has_flags_for_the_store():
    from allspark.cli import serve
    from allspark.cli.server_flags import to_server_settings

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = {
        "response_store": "x.db", "max_stored_responses": 2, "max_stored_response_bytes": 3,
        "response_lifetime": 4.5,
    }  # fmt: skip
    given = [str(text) for name, value in flags.items()
             for text in ("--" + name.replace("_", "-"), value)]  # fmt: skip
    settings = to_server_settings(parser.parse_args(["m", *given]))
    assert {name: getattr(settings, name) for name in flags} == flags
    assert to_server_settings(parser.parse_args(["m"])) == ServerSettings()
