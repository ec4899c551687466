"""The Responses protocol with OpenAI's own client, which checks every answer."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi")

from support.chats import ASK_TEXT, SUM_TEXT, user  # noqa: E402
from support.http_server import RunningServer, paused  # noqa: E402
from support.responses import (  # noqa: E402
    CLOCK,
    LOGPROBS,
    RESPONSES,
    events_of,
    get,
)


@pytest.fixture(scope="module")
def openai():
    module = pytest.importorskip("openai")
    if not hasattr(module.OpenAI, "responses"):
        pytest.skip("this version of the client has no responses")
    return module


def client_of(kind, server):
    url = f"http://127.0.0.1:{server.port}/v1"
    strict = {"_strict_response_validation": True, "max_retries": 0}
    return kind(base_url=url, api_key="none", **strict)


# OpenAI's own client, which checks every answer against its types.


def test_the_client_of_openai(openai, call_server):
    with client_of(openai.OpenAI, call_server) as client:
        fields = {"model": "demo", "input": ASK_TEXT, "tools": [CLOCK], "tool_choice": "required"}
        fields |= {"temperature": 0, "max_output_tokens": 300, "parallel_tool_calls": False}
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            names = {event.type for event in stream}
            final = stream.get_final_response()
        assert "response.function_call_arguments.delta" in names
        assert final.output[0].arguments == whole.output[0].arguments
        call = whole.output[0]
        done = {"type": "function_call_output", "call_id": call.call_id, "output": "12:30"}
        again = {"model": "demo", "max_output_tokens": 8, "temperature": 0}
        by_id = client.responses.create(input=[done], previous_response_id=whole.id, **again)
        by_hand = client.responses.create(input=[user(ASK_TEXT), call, done], **again)
        assert by_id.output_text == by_hand.output_text
        assert client.responses.retrieve(by_id.id) == by_id
        events = list(client.responses.retrieve(by_id.id, stream=True))
        assert events[-1].response == by_id
        later = client.responses.retrieve(by_id.id, stream=True, starting_after=3)
        assert list(later) == events[4:]
        listed = list(client.responses.input_items.list(by_hand.id, order="asc", limit=2))
        assert [item.type for item in listed] == [
            "message", "function_call", "function_call_output"
        ]  # fmt: skip
        counted = client.responses.input_tokens.count(model="demo", input=ASK_TEXT)
        assert counted.input_tokens > 0
        client.responses.delete(by_id.id)
        with pytest.raises(openai.NotFoundError, match=by_id.id):
            client.responses.retrieve(by_id.id)
        with pytest.raises(openai.BadRequestError, match="web_search"):
            client.responses.create(model="demo", input=ASK_TEXT, tools=[{"type": "web_search"}])


def test_the_client_in_the_background(openai, server, model):
    with client_of(openai.OpenAI, server) as client:
        with paused(model):
            queued = client.responses.create(model="demo", input=SUM_TEXT, background=True)
            assert queued.status == "queued"
            cancelled = client.responses.cancel(queued.id)
            assert cancelled.status == "cancelled"
        fields = {"model": "demo", "input": SUM_TEXT, "background": True, "temperature": 0}
        stream = client.responses.create(stream=True, **fields)
        begun = [next(stream), next(stream)]
        stream.close()
        id = begun[0].response.id
        rest = list(client.responses.retrieve(id, stream=True, starting_after=1))
        assert [e.sequence_number for e in begun + rest] == list(range(2 + len(rest)))
        assert rest[-1].response.output_text == "12 + 35 = 47"
        with client.responses.stream(response_id=id, starting_after=4) as stream:
            assert next(iter(stream)).sequence_number == 5
            assert stream.get_final_response().id == id


def test_the_client_parses_formats(openai, server):
    from typing import Literal

    from pydantic import BaseModel

    class Zone(BaseModel):
        zone: Literal["CET", "UTC"]

    with client_of(openai.OpenAI, server) as client:
        fields = {"model": "demo", "input": SUM_TEXT, "max_output_tokens": 400, "temperature": 0}
        answer = client.responses.parse(text_format=Zone, **fields)
        assert answer.output_parsed.zone in ("CET", "UTC")
        with client.responses.stream(text_format=Zone, **fields) as stream:
            final = stream.get_final_response()
        assert final.output_parsed == answer.output_parsed


def test_the_client_reads_reasoning_and_log_probabilities(openai, tool_server):
    with client_of(openai.OpenAI, tool_server) as client:
        fields = {"model": "demo", "input": SUM_TEXT, "max_output_tokens": 8, "temperature": 0}
        whole = client.responses.create(reasoning={"effort": "high"}, **fields)
        events = list(client.responses.create(reasoning={"effort": "high"}, stream=True, **fields))
        assert "response.reasoning_text.delta" in {event.type for event in events}
        last = events[-1].response
        assert last.output[0].content == whole.output[0].content
        assert last.incomplete_details.reason == "max_output_tokens"
        fields |= {"include": [LOGPROBS], "top_logprobs": 1}
        whole = client.responses.create(**fields)
        events = list(client.responses.create(stream=True, **fields))
        rows = [row for e in events for row in getattr(e, "delta", "") and e.logprobs]
        tokens = [row.token for row in whole.output[0].content[0].logprobs]
        assert [row.token for row in rows] == tokens


def test_the_asynchronous_client(openai, server):
    async def run():
        async with client_of(openai.AsyncOpenAI, server) as client:
            fields = {"model": "demo", "input": SUM_TEXT, "temperature": 0}
            whole = await client.responses.create(**fields)
            async with client.responses.stream(**fields) as stream:
                names = {event.type async for event in stream}
                final = await stream.get_final_response()
            assert "response.output_text.delta" in names
            assert final.output_text == whole.output_text == "12 + 35 = 47"
            go_on = {**fields, "previous_response_id": whole.id}
            answers = await asyncio.gather(*(client.responses.create(**go_on) for _ in range(8)))
            assert {answer.output_text for answer in answers} == {answers[0].output_text}
            items = [item async for item in client.responses.input_items.list(whole.id)]
            assert items[0].content[0].text == SUM_TEXT
            stream = await client.responses.retrieve(whole.id, stream=True)
            events = [event async for event in stream]
            assert events[-1].response == whole

    asyncio.run(run())


def test_an_error_after_the_start_is_an_event(openai, model, monkeypatch):
    from allspark.serve.choice import Choice
    from allspark.serve.errors import ApiError

    monkeypatch.setattr(Choice, "error", property(lambda _: ApiError(500, "it broke")))
    with RunningServer([model]) as server:
        with client_of(openai.OpenAI, server) as client:
            read = list(client.responses.create(model="demo", input=SUM_TEXT, stream=True))
        assert [event.type for event in read[-2:]] == ["error", "response.failed"]
        *events, error, last = events_of(server, input=SUM_TEXT)
        number = error["sequence_number"]
        assert error == {
            "type": "error", "code": "server_error", "message": "it broke", "param": None,
            "sequence_number": number,
        }  # fmt: skip
        assert last["type"] == "response.failed" and last["sequence_number"] == number + 1
        assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
        stored = get(server, last["response"]["id"]).json()
        assert stored == last["response"] and stored["status"] == "failed"
        response = server.post(RESPONSES, input=SUM_TEXT)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "it broke")
