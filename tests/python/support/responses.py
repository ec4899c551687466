"""Requests of the Responses protocol, and what its streams must add up to."""

from __future__ import annotations

import json

import httpx
from support.chats import SUM_TEXT, strict_schema
from support.waiting import wait_until

RESPONSES = "/v1/responses"
COUNT = "/v1/responses/input_tokens"
LOGPROBS = "message.output_text.logprobs"


def tool(name, **properties):
    text = f"The {name}."
    parameters = strict_schema(**properties)
    return {"type": "function", "name": name, "description": text, "parameters": parameters}


WEATHER = tool("weather", city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2]})
CLOCK = tool("clock", zone={"enum": ["CET", "UTC"]})
ARGUMENTS = '{"zone": "CET"}'
CALL = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": ARGUMENTS}
DONE = {"type": "function_call_output", "call_id": "call_1", "output": "12:30"}


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


def when_ended(server, id):
    """The response, once it has."""

    def ended():
        answer = get(server, id).json()
        return answer if answer["status"] not in ("queued", "in_progress") else None

    return wait_until(ended)


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
    fields = {"model": "demo", "input": SUM_TEXT, "temperature": 0, "stream": True, **fields}
    return {"json": fields}
