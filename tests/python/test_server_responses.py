"""OpenAI's Responses protocol over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sqlite3
import threading
import time

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from allspark.chat_template import TokenizerTemplate  # noqa: E402
from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402
from support.http_server import (  # noqa: E402
    CHAT,
    RunningServer,
    error_of,
    num_requests,
    paused,
    wait_for_requests,
)

RESPONSES = "/v1/responses"
COUNT = "/v1/responses/input_tokens"
SUM = "What is 12+35?"
QUEUE = "What is a ResultQueue?"
ASK = "What is the weather in Paris?"
LOGPROBS = "message.output_text.logprobs"

# The demo model's template has no place for tools and reasoning.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{{- message.content }}{{ message.tool_calls | tojson if message.tool_calls }}
{{- message.name }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}"""


def schema(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }


def tool(name, **properties):
    text = f"The {name}."
    parameters = schema(**properties)
    return {"type": "function", "name": name, "description": text, "parameters": parameters}


WEATHER = tool("weather", city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2]})
CLOCK = tool("clock", zone={"enum": ["CET", "UTC"]})
ARGUMENTS = '{"zone": "CET"}'
CALL = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": ARGUMENTS}
DONE = {"type": "function_call_output", "call_id": "call_1", "output": "12:30"}


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def model(demo_model):
    model = ServedModel.open(str(demo_model), EngineConfig(session_len=2048), name="demo")
    yield model
    model.close()


@pytest.fixture(scope="module")
def server(model):
    with RunningServer([model]) as server:
        yield server


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


@pytest.fixture(scope="module")
def tool_model(model):
    return dataclasses.replace(model, template=TokenizerTemplate(model.tokenizer, TEMPLATE))


@pytest.fixture(scope="module")
def tool_server(tool_model):
    settings = {"tool_call_parser": "qwen", "reasoning_parser": "default"}
    with RunningServer([tool_model], **settings) as server:
        yield server


@pytest.fixture(scope="module")
def call_server(tool_model):
    """Without reasoning, which may come before a call that is required."""
    with RunningServer([tool_model], tool_call_parser="qwen") as server:
        yield server


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


def ask(server, **fields):
    response = server.post(RESPONSES, **{"temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def get(server, id, **query):
    return server.client.get(f"{RESPONSES}/{id}", params=query)


def cancel(server, id):
    return server.client.post(f"{RESPONSES}/{id}/cancel")


def read_events(text):
    """The events of a stream's text, which may be cut."""
    events = []
    for part in text.split("\n\n")[:-1]:
        name, _, data = part.partition("\n")
        if not name.startswith(":"):
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    return events


def events_of(server, **fields):
    response = server.post(RESPONSES, **{"temperature": 0, **fields}, stream=True)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.text)


def events_after(server, id, after=None):
    query = {} if after is None else {"starting_after": after}
    response = get(server, id, stream=True, **query)
    assert response.status_code == 200, response.text
    return read_events(response.text)


PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def added_up(events):
    """The response of a stream, made of its deltas; all other events must fit them."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    types = [event["type"] for event in events]
    first = ["response.created", "response.in_progress"]
    if events[0]["response"]["background"]:
        first.insert(1, "response.queued")
    assert types[: len(first)] == first
    for event in events[: len(first)]:
        assert event["response"]["output"] == [] and event["response"]["usage"] is None
        assert event["response"]["status"] in ("queued", "in_progress")
    output = []
    for event in events[len(first) : -1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            item = event["item"]
            assert item["status"] == "in_progress" and not item.get("content")
            output.append(item)
            text, rows, is_open = "", [], True
            continue
        item = output[-1]
        assert is_open and event["output_index"] == len(output) - 1
        if kind == "output_item.done":
            is_open = False
            output[-1] = event["item"]
            if item["type"] == "function_call":
                assert event["item"]["arguments"] == text
            else:
                (part,) = event["item"]["content"]
                assert part["text"] == text and part.get("logprobs", []) == rows
            continue
        assert event["item_id"] == item["id"]
        if item["type"] == "function_call":
            assert "content_index" not in event
            if kind == "function_call_arguments.delta":
                text += event["delta"]
            else:
                assert kind == "function_call_arguments.done" and event["arguments"] == text
            continue
        assert event["content_index"] == 0
        name = PARTS[item["type"]]
        if kind == "content_part.added":
            assert text == "" and event["part"]["type"] == name and event["part"]["text"] == ""
        elif kind == f"{name}.delta":
            assert event["delta"]
            text += event["delta"]
            rows += event.get("logprobs", [])
        elif kind == f"{name}.done":
            assert event["text"] == text and event.get("logprobs", []) == rows
        else:
            assert kind == "content_part.done" and event["part"]["text"] == text
    assert not output or not is_open
    last = events[-1]["response"]
    assert last["output"] == output
    ends = {"completed": "completed", "cancelled": "incomplete"}
    assert types[-1] == f"response.{ends.get(last['status'], last['status'])}"
    return last


def without_ids(response):
    """What two responses to the same request have in common."""
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")}
              for item in response["output"]]  # fmt: skip
    usage = {**response["usage"], "input_tokens_details": None}
    ids = {"id": None, "created_at": None, "completed_at": None}
    return {**response, **ids, "output": output, "usage": usage}


def same_streamed(server, **fields):
    """The response, which is the same one whole and streamed."""
    whole = ask(server, **fields)
    assert without_ids(added_up(events_of(server, **fields))) == without_ids(whole)
    return whole


def text_of(response):
    parts = [p for item in response["output"] for p in item.get("content", ())]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


# Text.


def test_an_input_is_answered(server):
    answer = same_streamed(server, input=SUM)
    assert answer["id"].startswith("resp_") and answer["object"] == "response"
    assert (answer["status"], answer["model"], answer["error"]) == ("completed", "demo", None)
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "text": "12 + 35 = 47", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert answer["completed_at"] >= answer["created_at"]
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (17, 11, 28)
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_items_are_the_same_as_text(server):
    parts = [{"type": "input_text", "text": SUM}]
    for given in (
        [user(SUM)],
        [user(parts)],
        [{"type": "message", "id": "msg_x", "status": "completed", **user(parts)}],
    ):
        answer = ask(server, input=given)
        assert text_of(answer) == "12 + 35 = 47" and answer["usage"]["input_tokens"] == 17


def test_fields_are_shown_as_they_are_in_force(server):
    metadata = {"k" * 64: "v" * 512, **{str(i): "" for i in range(15)}}
    known = {
        "instructions": "Be short.", "metadata": metadata, "max_output_tokens": 30, "top_p": 0.5,
        "parallel_tool_calls": False, "user": "u", "safety_identifier": "s", "truncation": "auto",
        "prompt_cache_key": "k", "max_tool_calls": 3, "top_logprobs": 0, "temperature": 0.5,
        "reasoning": {"effort": "none", "summary": None}, "store": True, "background": False,
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none",
    }  # fmt: skip
    without_effect = {
        "include": ["reasoning.encrypted_content"], "service_tier": "auto", "seed": 1,
        "stream_options": {"include_obfuscation": False}, "prompt_cache_retention": "24h",
        "background_options": {"completion_window": "soonest"}, "priority": 1, "top_k": 0,
        "prompt_cache_options": {"mode": "implicit"}, "min_p": 0.0, "conversation": None,
    }  # fmt: skip
    response = server.post(RESPONSES, input=SUM, **known, **without_effect)
    answer = response.json()
    assert {name: answer[name] for name in known} == known
    assert answer["service_tier"] == "default" and answer["previous_response_id"] is None
    assert "x-allspark-ignored" not in response.headers
    defaults = server.post(RESPONSES, input=SUM).json()
    assert (defaults["temperature"], defaults["top_p"], defaults["metadata"]) == (0.7, 1.0, {})
    assert (defaults["tools"], defaults["tool_choice"]) == ([], "auto")


def test_unknown_fields_are_named(server, model):
    response = server.post(RESPONSES, input=SUM, max_output_tokens=1, zeta=1, frobnicate=1)
    assert response.headers["x-allspark-ignored"] == "frobnicate, zeta"
    response = server.post(RESPONSES, input=SUM, max_output_tokens=1, frobnicate=1, stream=True)
    assert response.headers["x-allspark-ignored"] == "frobnicate"
    assert "x-allspark-ignored" in server.post(COUNT, input=SUM, frobnicate=1).headers
    with RunningServer([model], strict_fields=True) as strict:
        status, error = error_of(strict.post(RESPONSES, input=SUM, frobnicate=1))
        assert (status, error["param"]) == (400, "frobnicate")


def test_deltas_add_up_to_the_response(server):
    for fields in (
        {"seed": 5, "temperature": 1.0, "max_output_tokens": 40},
        {"seed": 6, "temperature": 1.5, "max_output_tokens": 1},
        {"instructions": "Be short.", "seed": 7, "temperature": 1.0, "max_output_tokens": 25},
        {"include": [LOGPROBS], "top_logprobs": 2},
        {"include": [LOGPROBS], "seed": 9, "temperature": 2.0, "max_output_tokens": 50},
        {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 30},
        {"regex": "[a-z]{5} [A-Z]{5}", "seed": 8, "temperature": 1.0},
        {"stop": ["="]},
        {"ignore_eos": True, "max_output_tokens": 300},
    ):
        answer = same_streamed(server, input=QUEUE, **fields)
        assert answer["status"] in ("completed", "incomplete")


def test_a_response_that_is_cut_off_is_incomplete(server):
    for fields in ({"max_output_tokens": 3}, {"ignore_eos": True, "timeout_ms": 40}):
        answer = ask(server, input=SUM, **fields)
        assert answer["status"] == "incomplete" and answer["completed_at"] is None
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        # A deadline may come before the first token.
        assert {item["status"] for item in answer["output"]} <= {"incomplete"}
    answer = same_streamed(server, input=SUM, max_output_tokens=3)
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    assert answer["usage"]["output_tokens"] == 3


def test_an_output_without_text_is_an_empty_message(server):
    answer = same_streamed(server, input=SUM, stop=["1"])
    (item,) = answer["output"]
    assert item["content"][0]["text"] == "" and answer["status"] == "completed"


def test_a_format_is_kept(server):
    given = {"type": "json_schema", "name": "zone", "schema": CLOCK["parameters"], "strict": True}
    answer = same_streamed(server, input=SUM, text={"format": given}, max_output_tokens=99)
    assert json.loads(text_of(answer))["zone"] in ("CET", "UTC")
    assert answer["text"]["format"] == given


def test_tokens_have_log_probabilities(server):
    fields = {"input": QUEUE, "include": [LOGPROBS], "max_output_tokens": 60}
    answer = ask(server, **fields, top_logprobs=2)
    (part,) = answer["output"][0]["content"]
    rows = part["logprobs"]
    assert "".join(row["token"] for row in rows) == part["text"]
    assert all(len(row["top_logprobs"]) == 2 and row["logprob"] <= 0 for row in rows)
    chat = {"messages": [user(QUEUE)], "logprobs": True, "top_logprobs": 2, "max_tokens": 60}
    chosen = server.post(CHAT, **chat, temperature=0).json()["choices"][0]
    assert chosen["logprobs"]["content"][: len(rows)] == rows
    # A stop string cuts the text within a token; the tokens are those that its text needs.
    cut = ask(server, **fields, stop=[part["text"][3:7]])["output"][0]["content"][0]
    assert cut["text"] == part["text"][:3]
    tokens = [row["token"] for row in cut["logprobs"]]
    assert "".join(tokens).startswith(cut["text"]) and "".join(tokens[:-1]) != cut["text"]
    assert ask(server, input=SUM, top_logprobs=2)["output"][0]["content"][0]["logprobs"] == []


def test_counted_tokens_are_those_of_the_answer(server, tool_server):
    before = ask(server, input=SUM)
    tools = [{**CLOCK}, WEATHER]
    for each, fields in (
        (server, {"input": SUM}),
        (server, {"input": "And 2+2?", "previous_response_id": before["id"]}),
        (server, {"input": QUEUE, "instructions": "Be short."}),
        (tool_server, {"input": ASK, "tools": tools}),
        (tool_server, {"input": [user(ASK), CALL, DONE], "reasoning": {"effort": "low"}}),
    ):
        count = each.post(COUNT, **fields).json()
        answer = ask(each, **fields, max_output_tokens=1)
        expected = answer["usage"]["input_tokens"]
        assert count == {"object": "response.input_tokens", "input_tokens": expected}


def test_cached_tokens_are_counted(server):
    fields = {"input": "What is a ResultQueue? " * 8, "max_output_tokens": 1}
    first = ask(server, **fields)["usage"]
    again = ask(server, **fields)["usage"]
    assert again["input_tokens_details"]["cached_tokens"] > 0
    assert again["input_tokens"] == first["input_tokens"]


# Conversations.


def test_a_conversation_goes_on(server):
    first = ask(server, input=SUM, instructions="Be short.")
    second = ask(server, input="And 2+2?", previous_response_id=first["id"])
    third = ask(
        server, input=[user(QUEUE)], previous_response_id=second["id"], instructions="Be long."
    )
    chat = [
        user(SUM), {"role": "assistant", "content": text_of(first)},
        user("And 2+2?"), {"role": "assistant", "content": text_of(second)}, user(QUEUE),
    ]  # fmt: skip
    # Instructions are those of the last request alone.
    for response, messages in (
        (second, chat[:3]),
        (third, [{"role": "system", "content": "Be long."}, *chat]),
    ):
        answer = server.post(CHAT, messages=messages, temperature=0, max_tokens=400).json()
        assert answer["choices"][0]["message"]["content"] == text_of(response)
        assert answer["usage"]["prompt_tokens"] == response["usage"]["input_tokens"]
    assert third["previous_response_id"] == second["id"]
    # Two may go on from one.
    other = ask(server, input="And 3+3?", previous_response_id=first["id"])
    assert other["usage"]["input_tokens"] == second["usage"]["input_tokens"]


def test_items_by_hand_are_the_same_conversation(server):
    first = ask(server, input=SUM)
    second = ask(server, input=QUEUE, previous_response_id=first["id"])
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    given = get(server, f"{first['id']}/input_items").json()["data"][0]["id"]
    for items in (
        [user(SUM), *first["output"], user(QUEUE)],
        [user(SUM), {"role": "assistant", "content": text_of(first)}, user(QUEUE)],
        [user(SUM), reference, user(QUEUE)],
        [{"id": given}, {"id": reference["id"]}, user(QUEUE)],
    ):
        answer = ask(server, input=items)
        assert without_ids({**answer, "previous_response_id": first["id"]}) == without_ids(second)
    missing = server.post(RESPONSES, input=[{"type": "item_reference", "id": "msg_7"}])
    status, error = error_of(missing)
    assert (status, error["param"], error["code"]) == (404, "input[0].id", "item_not_found")
    missing = server.post(RESPONSES, input=[user("x"), {"id": reference["id"][:-1] + "9"}])
    assert error_of(missing)[0] == 404 and reference["id"][:-1] in missing.text


def test_a_response_that_was_cut_off_may_be_gone_on_from(call_server):
    fields = {"tools": [CLOCK], "tool_choice": "required", "max_output_tokens": 30}
    first = ask(call_server, input=ASK, **fields)
    assert first["status"] == "incomplete"
    (item,) = first["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    # What was cut off of a call is none, so no output of it is missing.
    second = ask(call_server, input=SUM, previous_response_id=first["id"], max_output_tokens=1)
    plain = ask(call_server, input=[user(ASK), user(SUM)], max_output_tokens=1)
    assert second["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_what_cannot_be_gone_on_from_is_named(server, model):
    def refused(id):
        status, error = error_of(server.post(RESPONSES, input=SUM, previous_response_id=id))
        assert error["param"] == "previous_response_id" and id in error["message"]
        return status, error["code"]

    assert refused("resp_7") == (404, "previous_response_not_found")
    unstored = ask(server, input=SUM, store=False)["id"]
    assert refused(unstored) == (404, "previous_response_not_found")
    first = ask(server, input=SUM)
    second = ask(server, input=SUM, previous_response_id=first["id"])
    assert server.client.delete(f"{RESPONSES}/{first['id']}").status_code == 200
    assert refused(first["id"]) == (404, "previous_response_not_found")
    status, error = error_of(
        server.post(RESPONSES, input=SUM, previous_response_id=second["id"])
    )
    assert status == 404 and first["id"] in error["message"] and second["id"] in error["message"]
    with paused(model):
        id = ask(server, input=SUM, background=True)["id"]
        assert refused(id) == (400, "previous_response_not_completed")
        cancel(server, id)
        assert refused(id) == (400, "previous_response_not_completed")


# Tools and reasoning.


@pytest.mark.parametrize("parser", ["qwen", "qwen3coder", "llama3", "mistral", "glm47"])
def test_a_function_is_called(tool_model, parser):
    with RunningServer([tool_model], tool_call_parser=parser) as server:
        fields = {"input": ASK, "tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
        fields["max_output_tokens"] = 300
        for choice in (
            {"type": "function", "name": "clock"},
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "function", "name": "clock"}]},
        ):  # fmt: skip
            answer = same_streamed(server, **fields, tool_choice=choice)
            (item,) = answer["output"]
            assert (item["type"], item["name"], item["status"]) == (
                "function_call", "clock", "completed"
            )  # fmt: skip
            assert json.loads(item["arguments"])["zone"] in ("CET", "UTC") and item["call_id"]
            assert answer["tool_choice"] == choice and answer["status"] == "completed"
        (item,) = same_streamed(server, **fields, tool_choice="required")["output"]
        assert item["type"] == "function_call" and item["name"] in ("weather", "clock")
        # Its result goes back, by itself or with the whole conversation.
        done = {**DONE, "call_id": item["call_id"]}
        again = {"tools": fields["tools"], "max_output_tokens": 5}
        by_hand = ask(server, input=[user(ASK), item, done], **again)
        parts = {**done, "output": [{"type": "input_text", "text": "12:30"}]}
        id = ask(server, **fields, tool_choice="required")["id"]
        before = get(server, id).json()["output"][0]
        parts["call_id"] = before["call_id"]
        by_id = ask(server, input=[parts], previous_response_id=id, **again)
        assert abs(by_id["usage"]["input_tokens"] - by_hand["usage"]["input_tokens"]) < 20
        assert text_of(by_id) == text_of(by_hand)


def test_tools_are_shown_as_they_are_in_force(call_server):
    answer = ask(call_server, input=ASK, tools=[CLOCK], tool_choice="none", max_output_tokens=1)
    assert answer["tools"] == [{**CLOCK, "strict": False}] and answer["tool_choice"] == "none"
    plain = ask(call_server, input=ASK, max_output_tokens=1)
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_items_are_the_messages_of_chat(tool_server, tool_model):
    def thought(text, name="summary"):
        kind = {"summary": "summary_text", "content": "reasoning_text"}[name]
        return {"type": "reasoning", "id": "rs_1", "summary": [], name: [
            {"type": kind, "text": text}
        ]}  # fmt: skip

    items = [
        {"role": "developer", "content": "Be kind."},
        user(ASK),
        thought("Hm.", "content"),
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        thought("Well.", "summary"),
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "A moment."},
            {"type": "refusal", "refusal": "No more."},
        ]},
        CALL,
        {**CALL, "call_id": "call_2", "name": "weather", "arguments": ""},
        {**DONE, "output": [{"type": "input_text", "text": text} for text in ("12", "30")]},
        {**DONE, "call_id": "call_2", "output": "rain"},
        user([{"type": "input_text", "text": "And"}, {"type": "input_text", "text": "now?"}]),
    ]  # fmt: skip
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in (
            ("call_1", "clock", {"zone": "CET"}),
            ("call_2", "weather", {}),
        )
    ]
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": "Be kind."},
        user(ASK),
        {
            "role": "assistant",
            "content": "A moment.\nNo more.",
            "reasoning_content": "Hm.\nWell.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "clock", "content": "12\n30"},
        {"role": "tool", "tool_call_id": "call_2", "name": "weather", "content": "rain"},
        user("And\nnow?"),
    ]
    answer = ask(tool_server, input=items, instructions="Be short.", max_output_tokens=40)
    found = tool_server.post(CHAT, messages=chat, temperature=0, max_tokens=40).json()
    assert answer["usage"]["input_tokens"] == found["usage"]["prompt_tokens"]
    assert text_of(answer) == found["choices"][0]["message"]["content"]


def test_reasoning_is_an_item_of_its_own(tool_server):
    """The prompt opens it where it is asked for, so that all of this model's output is in it."""
    fields = {"input": SUM, "max_output_tokens": 8}
    answer = same_streamed(tool_server, **fields, reasoning={"effort": "low", "summary": "auto"})
    (item,) = answer["output"]
    assert (item["type"], item["summary"], item["status"]) == ("reasoning", [], "incomplete")
    assert [part["type"] for part in item["content"]] == ["reasoning_text"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    for off in ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}):
        answer = same_streamed(tool_server, **fields, **off)
        assert [item["type"] for item in answer["output"]] == ["message"]
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_items_follow_each_other():
    """Whatever the pieces are, the items are the same, and the events add up to them."""
    from allspark.serve.parsers import MessageParser, choose_reasoning_parser, choose_tool_parser
    from allspark.serve.responses.builder import OutputBuilder
    from allspark.serve.responses.events import Events
    from allspark.serve.responses.record import Record

    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
    text = f"<think>a thought</think>the answer{call}and more{call}{call}"
    kinds = ["reasoning", "message", "function_call", "message", "function_call", "function_call"]
    head = {"id": "resp_0", "background": False, "previous_response_id": None}
    for end in (len(text), len(text) - 30, len(text) - 60, 60, 30, 10):
        seen = []
        for size in (1, 2, 3, 7, len(text)):
            record = Record(head, [])
            parsers = choose_tool_parser(None, "qwen"), choose_reasoning_parser(None, "default")
            ids = iter(range(9))
            parser = MessageParser(*parsers, make_id=lambda ids=ids: f"call_{next(ids)}")
            builder = OutputBuilder(record, parser)
            live, late = Events(record), []
            for begin in range(0, end, size):
                builder.put(text[begin : min(end, begin + size)])
                late += live.take()
                assert not live.is_ended
            builder.end(is_whole=end == len(text))
            record.status = "completed" if end == len(text) else "incomplete"
            late += live.take()
            assert live.is_ended and added_up(late)["output"] == record.response()["output"]
            again = Events(Record.from_bytes(record.to_bytes())).take()
            assert again == late
            for after in range(-1, len(late)):
                assert Events(record, after).take() == late[after + 1 :]
            seen.append(record.response())
        assert all(each == seen[0] for each in seen)
        output = seen[0]["output"]
        assert [item["type"] for item in output] == kinds[: len(output)]
        if end == len(text):
            assert len(output) == len(kinds)
            assert [item["status"] for item in output] == ["completed"] * len(kinds)
            assert output[5]["arguments"] == '{"zone": "CET"}'
        else:
            assert output[-1]["status"] in ("incomplete", "completed")


def test_many_events_leave_others_their_turn():
    """They are written in several goes, each when the client takes more."""
    from allspark.serve.responses.record import OutputItem, Record
    from allspark.serve.responses.stream import ResponseStream

    class Client:
        """What a stream writes to; it takes data at once, or later."""

        def __init__(self):
            self.is_free, self.data, self.is_open = True, [], True

        def write(self, data, more=True):
            assert self.is_free and self.is_open
            self.data.append(data)
            self.is_open = more
            if len(self.data) % 2:
                self.is_free = False
                loop.call_later(0.001, self.free)

        def free(self):
            self.is_free = True
            if self.is_open:
                self.on_free()
            else:
                closed.set_result(None)

    head = {"id": "resp_0", "background": False, "previous_response_id": None}
    item = OutputItem("message", "msg_0", pieces=[f"{i}," for i in range(2_245)], is_done=True)
    record = Record(head, [], [item], "completed")

    async def read(after):
        nonlocal loop, closed
        loop = asyncio.get_running_loop()
        closed, client = loop.create_future(), Client()
        ResponseStream(record, None, after, False).start(client)
        await closed
        return client.data

    loop = closed = None
    data = asyncio.run(read(-1))
    events = read_events(b"".join(data).decode())
    assert added_up(events)["output"] == record.response()["output"] and len(data) == 5
    rest = asyncio.run(read(1_999))
    assert read_events(b"".join(rest).decode()) == events[2_000:] and len(rest) == 1


def test_tokens_of_markers_are_no_text(model):
    """Each token's log-probability is with the text it is of, however the output is cut."""
    from allspark.serve.parsers import MessageParser, choose_reasoning_parser, choose_tool_parser
    from allspark.serve.responses.builder import OutputBuilder
    from allspark.serve.responses.record import Record
    from allspark.serve.responses.token_texts import TokenTexts

    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    text = f"<think>a thought</think>\n\nthe answer\u20ac <b>{call} and more"
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text)
    rows = [{"token": tokenizer.decode([id]), "place": place} for place, id in enumerate(ids)]
    seen = []
    for size in (1, 2, 5, len(ids)):
        for behind in (0, 1, 9):  # characters that are held back
            record = Record({"id": "resp_0"}, [])
            parsers = choose_tool_parser(None, "qwen"), choose_reasoning_parser(None, "default")
            builder = OutputBuilder(record, MessageParser(*parsers), has_rows=True)
            tokens = TokenTexts(tokenizer, True)
            given = 0
            for begin in range(0, len(ids), size):
                end = begin + size
                so_far = tokenizer.decode(ids[:end]).rstrip("\ufffd")
                piece = so_far[given : max(given, len(so_far) - behind)]
                given += len(piece)
                builder.put_tokens(tokens.put(piece, ids[begin:end], rows[begin:end]))
            builder.put_tokens(tokens.put(text[given:], [], []))
            builder.put_tokens(tokens.flush())
            builder.end(is_whole=True)
            messages = [item for item in record.items if item.kind == "message"]
            assert [item.text for item in messages] == ["the answer\u20ac <b>", " and more"]
            for item in messages:
                assert len(item.pieces) == len(item.rows)
                places = [row["place"] for row in item.all_rows()]
                own = tokenizer.decode([ids[place] for place in places])
                assert own.strip() == item.text.strip() and places == sorted(places)
            assert all(item.rows is None for item in record.items if item.kind != "message")
            seen.append([item.all_rows() for item in messages])
    assert all(each == seen[0] for each in seen)


def test_log_probabilities_beside_tools(call_server):
    fields = {"input": SUM, "tools": [CLOCK], "include": [LOGPROBS], "max_output_tokens": 30}
    part = same_streamed(call_server, **fields)["output"][0]["content"][0]
    assert part["logprobs"]
    assert "".join(row["token"] for row in part["logprobs"]).strip() == part["text"].strip()


# Stored responses.


def test_responses_are_stored(server):
    answer = ask(server, input=SUM, metadata={"a": "b"})
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
    kept = ask(server, input=SUM, store=False)
    assert kept["store"] is False and get(server, kept["id"]).status_code == 404
    streamed = added_up(events_of(server, input=SUM, store=False))
    assert get(server, streamed["id"]).status_code == 404


def test_input_items_are_listed(server):
    items = [user(f"{i}") for i in range(5)]
    first = ask(server, input=items, instructions="Be short.", max_output_tokens=1)
    id = ask(server, input=SUM, previous_response_id=first["id"], max_output_tokens=1)["id"]
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
        ({"after": "x"}, "after is 'x'; no item of the input has it"),
    ):
        status, error = error_of(get(server, path, **query))
        assert status == 400 and place in error["message"]


def test_the_store_is_bounded(model):
    with RunningServer([model], max_stored_responses=3) as server:
        ids = [ask(server, input=SUM, max_output_tokens=1)["id"] for _ in range(2)]
        # Going on from a response uses it.
        go_on = {"input": SUM, "max_output_tokens": 1}
        ids.append(ask(server, **go_on, previous_response_id=ids[0])["id"])
        ids.append(ask(server, **go_on)["id"])
        found = [get(server, id).status_code for id in ids]
        assert found == [200, 404, 200, 200]
    with RunningServer([model], max_stored_responses=0) as server:
        answer = ask(server, input=SUM)
        assert answer["store"] is False
        assert get(server, answer["id"]).status_code == 404
        status, error = error_of(server.post(RESPONSES, input=SUM, background=True))
        assert status == 400 and "this server stores no responses" in error["message"]
    with RunningServer([model], max_stored_response_bytes=100) as server:
        answer = ask(server, input=SUM)
        assert get(server, answer["id"]).status_code == 404
        status, error = error_of(server.post(RESPONSES, input=SUM, background=True))
        assert (status, error["code"]) == (429, "response_store_full")


def test_a_store_that_cannot_be_written_harms_no_answer(model, tmp_path, monkeypatch):
    from allspark.serve.responses.shelf import FileShelf

    def full(self, id, data, used):
        raise sqlite3.OperationalError("database or disk is full")

    with RunningServer([model], response_store=str(tmp_path / "responses.db")) as server:
        before = ask(server, input=SUM)
        with monkeypatch.context() as patch:
            patch.setattr(FileShelf, "write", full)
            answer = ask(server, input=SUM)
            assert text_of(answer) == "12 + 35 = 47"
            streamed = added_up(events_of(server, input=SUM))
            status, error = error_of(server.post(RESPONSES, input=SUM, background=True))
            assert (status, error["code"]) == (503, "response_store_failed")
            wait_for_requests(model, 0)
            for id in (answer["id"], streamed["id"]):
                assert get(server, id).status_code in (200, 404)  # 200 until it was tried
            assert get(server, before["id"]).json() == before
        assert get(server, answer["id"]).status_code == 404
        after = ask(server, input=SUM, previous_response_id=before["id"])
        assert get(server, after["id"]).json() == after


def test_what_has_expired_is_gone(model):
    with RunningServer([model], response_lifetime=1e-9) as server:
        answer = ask(server, input=SUM)
        assert get(server, answer["id"]).status_code == 404


def test_a_background_response_that_grows_too_large_says_so(model):
    """Its input has room, its output has not."""
    with RunningServer([model], max_stored_response_bytes=2500) as server:
        fields = {"input": SUM, "ignore_eos": True, "background": True}
        id = ask(server, **fields, max_output_tokens=1500)["id"]
        answer = when_ended(server, id)
        while answer["status"] == "incomplete":  # it has ended, and is being stored
            answer = get(server, id).json()
        assert answer["status"] == "failed" and answer["output"] == []
        assert "the bound is 2500" in answer["error"]["message"]


def test_a_full_store_takes_no_more_background_responses(model):
    with RunningServer([model], max_stored_responses=2) as server, paused(model):
        ids = [ask(server, input=SUM, background=True)["id"] for _ in range(2)]
        response = server.post(RESPONSES, input=SUM, background=True)
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
        first = ask(server, input=SUM)
        streamed = events_of(server, input=QUEUE)
        gone = ask(server, input=SUM)["id"]
        server.client.delete(f"{RESPONSES}/{gone}")
        with pytest.raises(ValueError, match="locked"):
            RunningServer([model], **settings)
        with paused(model):
            lost = ask(server, input=SUM, background=True)
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
        id = ask(server, input=SUM)["id"]
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


def when_ended(server, id):
    end = time.monotonic() + 60
    while True:
        answer = get(server, id).json()
        if answer["status"] not in ("queued", "in_progress"):
            return answer
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_background_response_is_polled(server, model):
    with paused(model):
        begun = ask(server, input=SUM, background=True)
        assert (begun["status"], begun["background"]) == ("queued", True)
        assert begun["output"] == [] and begun["usage"] is None
        assert get(server, begun["id"]).json() == begun
    answer = when_ended(server, begun["id"])
    assert answer["status"] == "completed" and text_of(answer) == "12 + 35 = 47"
    assert cancel(server, begun["id"]).json() == answer
    follow = ask(server, input=QUEUE, previous_response_id=begun["id"])
    assert follow["status"] == "completed"
    status, error = error_of(server.post(RESPONSES, input=SUM, background=True, store=False))
    assert status == 400 and "background is true; it needs store" in error["message"]


def test_background_and_stream(server):
    events = events_of(server, input=SUM, background=True)
    answer = added_up(events)
    assert text_of(answer) == "12 + 35 = 47" and answer["background"]
    assert [event["type"] for event in events[:3]] == [
        "response.created", "response.queued", "response.in_progress"
    ]  # fmt: skip
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "queued"
    assert get(server, answer["id"]).json() == answer
    # Also where nothing but the end of the output comes.
    empty = added_up(events_of(server, input=SUM, background=True, stop=["1"]))
    assert text_of(empty) == "" and empty["status"] == "completed"


def test_a_stored_stream_goes_on_after_every_event(tool_server):
    fields = {"tools": [CLOCK], "tool_choice": "required", "max_output_tokens": 300}
    events = events_of(tool_server, input=ASK, **fields)
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


def first_events(server, count, method="POST", path=RESPONSES, **fields):
    """The first events of a stream, which is then left."""
    data = ""
    with server.client.stream(method, path, **fields) as response:
        assert response.status_code == 200
        for part in response.iter_text():
            data += part
            events = read_events(data[: data.rfind("\n\n") + 2])
            if len(events) >= count:
                return events[:count]
    raise AssertionError(f"{len(events)} events came")


class RunningClient:
    """Another client of a server."""

    def __init__(self, server):
        self.client = httpx.Client(base_url=server.client.base_url, timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()


def body(**fields):
    fields = {"model": "demo", "input": SUM, "temperature": 0, "stream": True, **fields}
    return {"json": fields}


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
    assert text_of(ask(long_server, input=SUM, **fields)) == text_of(answer)


def test_several_clients_read_one_stream(server, model):
    with paused(model):
        id = ask(server, input=QUEUE, background=True)["id"]
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
        begun = ask(server, input=SUM, background=True)
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
    answer = ask(server, input=SUM)
    status, error = error_of(cancel(server, answer["id"]))
    assert (status, error["param"]) == (400, "response_id")
    assert "does not run in the background" in error["message"]


def test_responses_are_cancelled_while_the_models_sleep(long_server, long_model):
    post = long_server.client.post
    fields = {"ignore_eos": True, "max_output_tokens": 60_000}
    id = ask(long_server, input=SUM, background=True, **fields)["id"]
    assert post("/sleep").status_code == 200
    try:
        assert error_of(long_server.post(RESPONSES, input=SUM))[0] == 503
        assert get(long_server, id).status_code == 200
        assert cancel(long_server, id).json()["status"] == "cancelled"
    finally:
        assert post("/wakeup").status_code == 200
    wait_for_requests(long_model, 0)


def test_a_running_response_is_deleted(server, model):
    with paused(model):
        id = ask(server, input=SUM, background=True)["id"]
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
                server.client.post(RESPONSES, headers=headers, json={"input": SUM})
            )
        )
        thread.start()
        wait_for_requests(model, 1)
        with httpx.Client(base_url=server.client.base_url) as other:
            assert other.post("/abort_request", json={"request_id": "mine"}).json()["aborted"] == 1
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
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(RESPONSES, json={"input": SUM}, timeout=0.3)
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
            id = ask(server, input=SUM, background=True)["id"]
            wait_for_requests(model, 1)
            server.server.stop()
            end = time.monotonic() + 10
            while server.client.get("/health").status_code == 200 and time.monotonic() < end:
                time.sleep(0.005)
            assert get(server, id).json()["status"] == "queued"
            assert error_of(server.post(RESPONSES, input=SUM))[0] == 503
        server._thread.join(40)
    with RunningServer([model], response_store=path) as server:
        assert text_of(get(server, id).json()) == "12 + 35 = 47"


def test_background_responses_count_as_running(model):
    with RunningServer([model], max_concurrent_requests=1) as server:
        with paused(model):
            id = ask(server, input=SUM, background=True)["id"]
            assert error_of(server.post(RESPONSES, input=SUM))[0] == 429
            assert cancel(server, id).json()["status"] == "cancelled"
            # A cancelled one makes room.
            assert ask(server, input=SUM, background=True)["status"] == "queued"
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
                    fields = {"input": QUEUE, "max_output_tokens": 60, "temperature": 0}
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
        end = time.monotonic() + 30
        while state.num_running or state.responses.running:
            assert time.monotonic() < end
            time.sleep(0.002)
        wait_for_requests(model, 0)


def test_the_command_has_flags_for_the_store():
    from allspark.cli import serve

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = {
        "response_store": "x.db", "max_stored_responses": 2, "max_stored_response_bytes": 3,
        "response_lifetime": 4.5,
    }  # fmt: skip
    given = [str(text) for name, value in flags.items()
             for text in ("--" + name.replace("_", "-"), value)]  # fmt: skip
    settings = serve._settings(parser.parse_args(["m", *given]))
    assert {name: getattr(settings, name) for name in flags} == flags
    assert serve._settings(parser.parse_args(["m"])) == ServerSettings()


# Errors.


def message(*parts, role="user"):
    return {"input": [{"role": role, "content": list(parts)}]}


@pytest.mark.parametrize(
    "fields, param, text",
    [
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "input is empty"),
        ({"input": 7}, "input", "input"),
        ({"input": ["x"]}, "input[0]", "must be an object; it is 'x'"),
        ({"input": [{}]}, "input[0].role", "input[0].role is missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "is 'tool'; it must be"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content", "it is 7"),
        (message("x"), "input[0].content[0]", "must be an object; it is 'x'"),
        (message({"type": "input_text"}), "input[0].content[0].text", "is missing"),
        (message({"type": "input_text", "text": 1}), "input[0].content[0].text", "it is 1"),
        (message({"type": "input_image", "image_url": "x"}), "input[0].content[0].type",
         "is 'input_image'; it must be 'input_text'"),
        (message({"type": "output_text", "text": "x"}), "input[0].content[0].type", "'input_text'"),
        (message({"type": "input_text", "text": "x"}, role="assistant"),
         "input[0].content[0].type", "must be 'output_text' or 'refusal'"),
        ({"input": [{**user("x"), "id": 7}]}, "input[0].id", "must be a string; it is 7"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "is 'web_search_call'; it"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "is missing"),
        ({"input": [user("x"), {**CALL, "arguments": "{"}]}, "input[1].arguments", "JSON object"),
        ({"input": [user("x"), {**CALL, "arguments": 7}]}, "input[1].arguments", "it is 7"),
        ({"input": [user("x"), {**CALL, "name": None}]}, "input[1].name", "is missing"),
        ({"input": [user("x"), CALL]}, "input", "input[1] has the function_call 'call_1', whose"),
        ({"input": [DONE]}, "input[0].call_id", "is 'call_1'; no 'function_call' has it"),
        ({"input": [CALL, {**DONE, "output": [{"type": "input_file"}]}]},
         "input[1].output[0].type", "is 'input_file'"),
        ({"input": [CALL, {**DONE, "output": None}]}, "input[1].output", "is missing"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]},
         "input[0].summary[0].type", "is 'x'; it must be 'summary_text'"),
        ({"input": [user("x")] * 10_001}, "input", "10001 items and parts"),
        (message(*[{"type": "input_text", "text": "x"}] * 10_000), "input", "the bound is 10000"),
        ({"input": "x " * 4000}, "input", "input has 8008 tokens; the model's length"),
        ({"instructions": 7}, "instructions", "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens", "it is 0"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2; it is 2.5"),
        ({"top_p": -1}, "top_p", "it is -1"),
        ({"top_logprobs": 21}, "top_logprobs", "it is 21"),
        ({"include": ["x"]}, "include[0]", "it is 'x'"),
        ({"truncation": "x"}, "truncation", "it is 'x'"),
        ({"n": 2}, "n", "n is 2; it must be 1"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"k" * 65: ""}}, "metadata." + "k" * 65, "at most 64 characters"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512 characters"),
        ({"metadata": {"k": 1}}, "metadata.k", "it is 1"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "it is 'huge'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "it is 'xml'"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name",
         "is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema",
         "is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
         "text.format.name", "it is 'a b'"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "x"}, "text.format",
         "text.format and regex are both given"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [CLOCK]}, "text.format",
         "text.format is given beside tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type",
         "is 'web_search'; only 'function' is served"),
        ({"tools": [CLOCK, {"type": "mcp", "server_label": "x"}]}, "tools[1].type", "is 'mcp'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] has the name None"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "two tools have the name 'clock'"),
        ({"tools": [tool(f"t{i}") for i in range(257)]}, "tools", "257 entries; the bound is 256"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice",
         "names the tool 'x'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not served"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt is not served"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "not served"),
        ({"stop": ["x", ""]}, "stop[1]", "empty"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(tool_server, fields, param, text):
    status, error = error_of(tool_server.post(RESPONSES, **{"input": SUM, **fields}))
    assert (status, error["param"]) == (400, param), error
    assert text in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_errors_have_statuses(server, model):
    post = server.client.post
    status, error = error_of(server.post(RESPONSES, model="x", input=SUM))
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error_of(post(RESPONSES, content=b"{"))[0] == 400
    assert error_of(server.client.get(RESPONSES))[0] == 405
    settings = {"api_keys": ("k",), "max_body_bytes": 500}
    with RunningServer([model], **settings) as guarded:
        assert error_of(guarded.post(RESPONSES, input=SUM))[0] == 401
        assert error_of(get(guarded, "resp_1"))[0] == 401
        guarded.client.headers["authorization"] = "Bearer k"
        assert guarded.post(RESPONSES, input=SUM).status_code == 200
        assert error_of(guarded.post(RESPONSES, input="x" * 600))[0] == 413


def test_a_template_s_error_has_the_place_of_the_item(server):
    """The demo model's template has no form for calls; the second message stands for two items."""
    items = [user(ASK), {"role": "assistant", "content": "Hm."}, CALL, DONE]
    status, error = error_of(server.post(RESPONSES, input=items, instructions="x"))
    assert (status, error["param"]) == (400, "input")
    assert error["message"].startswith("input[1].tool_calls")


def test_settings_of_the_store_are_checked(model):
    for name in ("max_stored_responses", "max_stored_response_bytes", "response_lifetime"):
        with pytest.raises(ValueError, match="it must be at least 0"):
            RunningServer([model], **{name: -1})


def test_an_error_after_the_start_is_an_event(openai, model, monkeypatch):
    from allspark.serve.choice import Choice
    from allspark.serve.errors import ApiError

    monkeypatch.setattr(Choice, "error", property(lambda _: ApiError(500, "it broke")))
    with RunningServer([model]) as server:
        with client_of(openai.OpenAI, server) as client:
            read = list(client.responses.create(model="demo", input=SUM, stream=True))
        assert [event.type for event in read[-2:]] == ["error", "response.failed"]
        *events, error, last = events_of(server, input=SUM)
        number = error["sequence_number"]
        assert error == {
            "type": "error", "code": "server_error", "message": "it broke", "param": None,
            "sequence_number": number,
        }  # fmt: skip
        assert last["type"] == "response.failed" and last["sequence_number"] == number + 1
        assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
        stored = get(server, last["response"]["id"]).json()
        assert stored == last["response"] and stored["status"] == "failed"
        response = server.post(RESPONSES, input=SUM)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "it broke")


def test_an_output_that_cannot_be_read_fails_alone(model, monkeypatch):
    from allspark.serve.responses.builder import OutputBuilder

    def broken(self, text):
        raise RuntimeError("broken")

    with RunningServer([model]) as server:
        with monkeypatch.context() as patch:
            patch.setattr(OutputBuilder, "put", broken)
            last = events_of(server, input=SUM)[-1]
            assert last["type"] == "response.failed"
            assert "its log says why" in last["response"]["error"]["message"]
        wait_for_requests(model, 0)
        assert text_of(ask(server, input=SUM)) == "12 + 35 = 47"


def test_a_long_conversation_is_truncated(server, model):
    turns = [user(f"What is {i}+{i}? " * 20) for i in range(20)]
    items = [{"role": "system", "content": "Be short."}, *turns, user(SUM)]
    status, error = error_of(server.post(RESPONSES, input=items))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    answer = ask(server, input=items, truncation="auto", max_output_tokens=40)
    count = answer["usage"]["input_tokens"]
    # As many of the last turns as leave room for the output.
    bound = model.session_len - 40
    for first in range(len(turns)):
        shorter = [items[0], *items[1 + first :]]
        number = server.post(COUNT, input=shorter).json()["input_tokens"]
        if number <= bound:
            break
    assert first > 0 and count == number
    listed = get(server, f"{answer['id']}/input_items", limit=100).json()
    assert len(listed["data"]) == len(items)
    status, error = error_of(server.post(RESPONSES, input="x " * 4000, truncation="auto"))
    assert (status, error["param"]) == (400, "input")


def test_the_document_names_the_routes(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    one = f"{RESPONSES}/{{response_id}}"
    assert set(paths[one]) == {"get", "delete"}
    assert {RESPONSES, COUNT, f"{one}/cancel", f"{one}/input_items"} <= set(paths)
    content = paths[RESPONSES]["post"]["requestBody"]["content"]["application/json"]
    assert "previous_response_id" in content["schema"]["properties"]


# OpenAI's own client, which checks every answer against its types.


def test_the_client_of_openai(openai, call_server):
    with client_of(openai.OpenAI, call_server) as client:
        fields = {"model": "demo", "input": ASK, "tools": [CLOCK], "tool_choice": "required"}
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
        by_hand = client.responses.create(input=[user(ASK), call, done], **again)
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
        counted = client.responses.input_tokens.count(model="demo", input=ASK)
        assert counted.input_tokens > 0
        client.responses.delete(by_id.id)
        with pytest.raises(openai.NotFoundError, match=by_id.id):
            client.responses.retrieve(by_id.id)
        with pytest.raises(openai.BadRequestError, match="web_search"):
            client.responses.create(model="demo", input=ASK, tools=[{"type": "web_search"}])


def test_the_client_in_the_background(openai, server, model):
    with client_of(openai.OpenAI, server) as client:
        with paused(model):
            queued = client.responses.create(model="demo", input=SUM, background=True)
            assert queued.status == "queued"
            cancelled = client.responses.cancel(queued.id)
            assert cancelled.status == "cancelled"
        fields = {"model": "demo", "input": SUM, "background": True, "temperature": 0}
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
        fields = {"model": "demo", "input": SUM, "max_output_tokens": 400, "temperature": 0}
        answer = client.responses.parse(text_format=Zone, **fields)
        assert answer.output_parsed.zone in ("CET", "UTC")
        with client.responses.stream(text_format=Zone, **fields) as stream:
            final = stream.get_final_response()
        assert final.output_parsed == answer.output_parsed


def test_the_client_reads_reasoning_and_log_probabilities(openai, tool_server):
    with client_of(openai.OpenAI, tool_server) as client:
        fields = {"model": "demo", "input": SUM, "max_output_tokens": 8, "temperature": 0}
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
            fields = {"model": "demo", "input": SUM, "temperature": 0}
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
            assert items[0].content[0].text == SUM
            stream = await client.responses.retrieve(whole.id, stream=True)
            events = [event async for event in stream]
            assert events[-1].response == whole

    asyncio.run(run())
