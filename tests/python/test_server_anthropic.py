"""Anthropic's Messages protocol over HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from support.chats import ASK, QUEUE, SUM, strict_schema  # noqa: E402
from support.http_server import RunningServer, paused  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


def tool(name, **properties):
    schema = strict_schema(**properties)
    return {"name": name, "description": f"The {name}.", "input_schema": schema}


WEATHER = tool("weather", city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2]})
CLOCK = tool("clock", zone={"enum": ["CET", "UTC"]})
CALL = {"type": "tool_use", "id": "call_1", "name": "clock", "input": {"zone": "CET"}}
CALLING = {"role": "assistant", "content": [CALL]}


def ask(server, **fields):
    response = server.post(MESSAGES, **{"max_tokens": 40, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(server, **fields):
    response = server.post(MESSAGES, **{"max_tokens": 40, **fields}, stream=True)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in response.text.split("\n\n")[:-1]:
        name, _, data = part.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def added_up(events):
    """The message of a stream; each block is opened and closed once, in order."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[-2]["type"] == "message_delta"
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    is_open, json_text = False, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            is_open, json_text = True, ""
            message["content"].append(dict(event["content_block"]))
            continue
        block = message["content"][-1]
        assert is_open and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(json_text)
            continue
        assert event["type"] == "content_block_delta"
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            assert block["type"] == "tool_use"
            json_text += delta["partial_json"]
        else:
            name = delta["type"].removesuffix("_delta")
            assert block["type"] == ("thinking" if name == "signature" else name)
            block[name] += delta[name]
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_ids(message):
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = message["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    counts = {"input": total, "output": usage["output_tokens"]}
    return {**message, "id": None, "content": content, "usage": counts}


def same_streamed(server, **fields):
    """The message, which is the same one whole and streamed."""
    whole = ask(server, **fields)
    assert without_ids(added_up(events_of(server, **fields))) == without_ids(whole)
    return whole


# Text.


def test_a_conversation_is_answered(server):
    answer = same_streamed(server, messages=SUM, temperature=0)
    assert answer["id"].startswith("msg_") and answer["model"] == "demo"
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"] == [{"type": "text", "text": "12 + 35 = 47"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 17
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (11, 0)


def test_blocks_are_the_same_as_text(server):
    blocks = [{"type": "text", "text": "What is 12+35?", "cache_control": {"type": "ephemeral"}}]
    changing = {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b;"}
    known = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "system": [changing],
        "thinking": {"type": "adaptive", "display": "omitted"}, "tools": [], "top_k": 0,
        "top_p": 1.0, "cache_control": {"type": "ephemeral"}, "speed": "fast",
        "diagnostics": {"previous_message_id": None},
    }  # fmt: skip
    messages = [{"role": "user", "content": blocks}]
    for fields in ({}, known):
        response = server.post(MESSAGES, messages=messages, max_tokens=40, temperature=0, **fields)
        answer = response.json()
        assert answer["content"][0]["text"] == "12 + 35 = 47"
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 17
        assert "x-allspark-ignored" not in response.headers
        assert response.headers["request-id"] == response.headers["x-request-id"]
    response = server.post(MESSAGES, messages=SUM, max_tokens=1, frobnicate=1)
    assert response.headers["x-allspark-ignored"] == "frobnicate"


def test_a_read_prefix_is_no_input(server):
    messages = [{"role": "user", "content": "What is a ResultQueue? " * 8}]
    first = ask(server, messages=messages, max_tokens=1)["usage"]
    again = ask(server, messages=messages, max_tokens=1)["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert sum(again.values()) == sum(first.values())


def test_the_end_has_its_reason(server):
    fields = {"messages": QUEUE, "temperature": 0}
    (block,) = ask(server, **fields)["content"]
    text = block["text"]
    answer = same_streamed(server, stop_sequences=["zzz", text[6:20]], **fields)
    assert answer["content"] == [{"type": "text", "text": text[:6]}]
    assert answer["stop_reason"] == "stop_sequence"
    assert answer["stop_sequence"] == text[6:20]
    answer = same_streamed(server, **{**fields, "max_tokens": 3})
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 3)


def test_a_last_message_of_the_assistant_is_continued(server):
    begun = {"role": "assistant", "content": "12 + 35 = "}
    answer = ask(server, messages=[*SUM, begun], temperature=0)
    assert answer["content"] == [{"type": "text", "text": "47"}]
    nothing = {"role": "assistant", "content": []}
    answer = ask(server, messages=[*SUM, nothing], temperature=0)
    assert answer["content"][0]["text"] == "12 + 35 = 47"


def test_messages_of_one_role_are_one(server):
    parts = [{"role": "user", "content": [{"type": "text", "text": t}]} for t in ("1", "2")]
    one = [{"role": "user", "content": "1\n2"}]
    counts = [server.post(COUNT, messages=m).json()["input_tokens"] for m in (parts, one)]
    assert counts[0] == counts[1]


def test_a_format_is_kept(server):
    schema = CLOCK["input_schema"]
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    response = server.post(MESSAGES, messages=SUM, max_tokens=99, output_config=config)
    assert json.loads(response.json()["content"][0]["text"])["zone"] in ("CET", "UTC")
    assert "x-allspark-ignored" not in response.headers
    none = {"tools": [CLOCK], "tool_choice": {"type": "none"}, "output_config": config}
    answer = server.post(MESSAGES, messages=SUM, max_tokens=99, **none).json()
    assert json.loads(answer["content"][-1]["text"])["zone"] in ("CET", "UTC")
    earlier = server.post(MESSAGES, messages=SUM, max_tokens=99, output_format=config["format"])
    assert json.loads(earlier.json()["content"][0]["text"])["zone"] in ("CET", "UTC")
    assert "x-allspark-ignored" not in earlier.headers
    both = {"output_config": config, "output_format": config["format"]}
    response = server.post(MESSAGES, messages=SUM, max_tokens=99, **both)
    assert response.status_code == 400
    assert "output_format and output_config.format are both given" in response.text


def test_the_system_speaks_between(server, model):
    late = {"role": "system", "content": [{"type": "text", "text": "Be short."}]}
    messages = [*SUM, {"role": "assistant", "content": "47"}, late, *QUEUE]
    chat = [*messages[:2], {"role": "system", "content": "Be short."}, *QUEUE]
    expected = len(model.tokenizer.encode(model.template.render(chat)))
    assert server.post(COUNT, messages=messages).json() == {"input_tokens": expected}
    assert ask(server, messages=messages, max_tokens=1)["content"]


@pytest.mark.parametrize("thinking", ["disabled", "adaptive"])
def test_a_prompt_is_computed_without_an_answer(tool_server, thinking):
    """As clients ask for it to fill the prefix cache."""
    messages = [{"role": "user", "content": f"{thinking}: what is a ResultQueue? " * 8}]
    fields = {"messages": messages, "thinking": {"type": thinking}, "tools": [CLOCK]}
    fields["output_config"] = {"format": {"type": "json_schema", "schema": CLOCK["input_schema"]}}
    answer = same_streamed(tool_server, **fields, max_tokens=0)
    assert answer["content"] == [] and answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] == 0
    assert ask(tool_server, **fields, max_tokens=1)["usage"]["cache_read_input_tokens"] > 0


def test_counted_tokens_are_those_of_the_answer(server, tool_server):
    rounds = [*ASK, CALLING, result("12:00")]
    for each, fields in (
        (server, {"messages": SUM}),
        (server, {"messages": QUEUE, "system": "Be short."}),
        (tool_server, {"messages": ASK, "tools": [WEATHER, CLOCK]}),
        (tool_server, {"messages": ASK, "tools": [CLOCK], "tool_choice": {"type": "none"}}),
        (tool_server, {"messages": rounds, "tools": [CLOCK], "thinking": {"type": "adaptive"}}),
    ):
        count = each.post(COUNT, **fields).json()
        usage = ask(each, **fields, max_tokens=1)["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert count == {"input_tokens": total}
    assert server.post(COUNT, messages=SUM, frobnicate=1).headers["x-allspark-ignored"]


# Tools.


def result(content, call_id="call_1", **fields):
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}
    return {"role": "user", "content": [block]}


@pytest.mark.parametrize("parser", ["qwen", "qwen3coder", "llama3", "mistral", "glm47"])
def test_a_tool_is_used(tool_model, parser):
    with RunningServer([tool_model], tool_call_parser=parser) as server:
        fields = {"messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 300}
        choice = {"type": "tool", "name": "clock", "disable_parallel_tool_use": True}
        answer = same_streamed(server, **fields, tool_choice=choice, temperature=0)
        (block,) = answer["content"]
        assert (block["type"], block["name"]) == ("tool_use", "clock") and block["id"]
        assert block["input"]["zone"] in ("CET", "UTC")
        assert answer["stop_reason"] == "tool_use"
        choice = {"type": "any", "disable_parallel_tool_use": True}
        (block,) = same_streamed(server, **fields, tool_choice=choice, temperature=0)["content"]
        assert block["type"] == "tool_use" and block["name"] in ("weather", "clock")


def test_tools_may_be_left_alone(tool_server):
    for choice in ({"type": "auto"}, {"type": "none"}, None):
        fields = {"messages": SUM, "tools": [CLOCK], "tool_choice": choice, "temperature": 0}
        answer = ask(tool_server, **fields)
        assert [block["type"] for block in answer["content"]] == ["text"]
        assert answer["stop_reason"] in ("end_turn", "max_tokens")


def test_an_input_that_is_cut_off_is_its_beginning(call_server):
    fields = {"messages": ASK, "tools": [CLOCK], "tool_choice": {"type": "any"}, "temperature": 0}
    whole = ask(call_server, **fields, max_tokens=300)
    for most in range(1, 40, 3):
        answer = ask(call_server, **fields, max_tokens=most)
        if answer["stop_reason"] == "tool_use":
            break
        assert answer["stop_reason"] == "max_tokens"
        for block in answer["content"]:
            assert set(block.get("input", {})) <= set(whole["content"][0]["input"])


def test_a_result_of_a_tool_is_read(tool_server, tool_model):
    rounds = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "A moment."},
                CALL,
                {**CALL, "id": "call_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                *result([{"type": "text", "text": "12"}, {"type": "text", "text": "30"}])[
                    "content"
                ],
                *result("rain", "call_2", is_error=True)["content"],
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in (
            ("call_1", "clock", {"zone": "CET"}),
            ("call_2", "weather", {}),
        )
    ]
    chat = [
        {"role": "system", "content": "Be short."},
        *ASK,
        {
            "role": "assistant",
            "content": "A moment.",
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "clock", "content": "12\n30"},
        {"role": "tool", "tool_call_id": "call_2", "name": "weather", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    expected = len(tool_model.tokenizer.encode(tool_model.template.render(chat)))
    count = tool_server.post(COUNT, messages=rounds, system="Be short.").json()
    assert count == {"input_tokens": expected}
    answer = ask(tool_server, messages=rounds, system="Be short.", temperature=0)
    chat_fields = {"messages": chat, "temperature": 0, "max_tokens": 40}
    found = tool_server.post("/v1/chat/completions", **chat_fields).json()
    assert answer["content"][0]["text"] == found["choices"][0]["message"]["content"]


def test_a_strict_tool_must_be_enforceable(tool_server):
    strict = tool("t", x={"not": {"type": "string"}})
    fields = {"messages": ASK, "tool_choice": {"type": "any"}, "max_tokens": 200}
    assert tool_server.post(MESSAGES, tools=[strict], **fields).status_code == 200
    response = tool_server.post(MESSAGES, tools=[{**strict, "strict": True}], **fields)
    assert response.status_code == 400 and "the tool 't' is strict" in response.text


# Thinking.


def test_blocks_follow_each_other():
    """Whatever the pieces are, the events are those of the whole message."""
    from allspark.serve.blocks import BlockBuilder
    from allspark.serve.parsers import MessageParser, choose_reasoning_parser, choose_tool_parser

    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
    text = f"<think>a thought</think>the answer{call}and more{call}{call}"
    expected = ["thinking", "text", "tool_use", "text", "tool_use", "tool_use"]
    for size in (1, 2, 3, 7, len(text)):
        parsers = choose_tool_parser(None, "qwen"), choose_reasoning_parser(None, "default")
        builder = BlockBuilder(MessageParser(*parsers))
        events = [{"type": "message_start", "message": {"content": [], "stop_reason": None}}]
        for begin in range(0, len(text), size):
            events += builder.put(text[begin : begin + size], is_end=False)
        events += builder.put("", is_end=True)
        events += [{"type": "message_delta", "delta": {}, "usage": {}}, {"type": "message_stop"}]
        content = builder.content()
        assert added_up(events)["content"] == content
        assert [block["type"] for block in content] == expected
        assert content[0] == {"type": "thinking", "thinking": "a thought", "signature": ""}
        assert content[3] == {"type": "text", "text": "and more"}
        assert content[2]["input"] == content[5]["input"] == {"zone": "CET"}


def test_thinking_is_a_block_of_its_own(tool_server):
    """The prompt opens it where it is enabled, so that all of this model's output is in it."""
    fields = {"messages": SUM, "temperature": 0, "max_tokens": 8}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    (block,) = same_streamed(tool_server, **fields, thinking=thinking)["content"]
    assert block["type"] == "thinking" and block["thinking"] and block["signature"] == ""
    for kind in ("disabled", "between_tools"):
        (block,) = same_streamed(tool_server, **fields, thinking={"type": kind})["content"]
        assert block["type"] == "text" and block["text"]


# Errors.


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0; it is -1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "system", "content": [CALL]}]},
         "messages[0].content[0].type is 'tool_use'; it must be 'text'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (user(), "messages[0].content is empty"),
        (user("x"), "messages[0].content[0] must be an object; it is 'x'"),
        (user({"type": "text"}), "messages[0].content[0].text is missing"),
        (user({"type": "text", "text": 1}), "[0].text must be a string; it is 1"),
        (user({"type": "text", "text": "a"}, {"type": "image"}),
         "messages[0].content[1].type is 'image'; it must be 'text' or 'tool_result'"),
        (user({"type": "document"}), "messages[0].content[0].type is 'document'"),
        (user(CALL), "messages[0].content[0].type is 'tool_use'"),
        (user({"type": "tool_result", "tool_use_id": "x"}), "tool_use_id is 'x'; no 'tool_use'"),
        ({"messages": [*SUM, CALLING, result([{"type": "image"}])]},
         "messages[2].content[0].content[0].type is 'image'"),
        ({"messages": [*SUM, CALLING]},
         "messages[1] has a 'tool_use' whose 'tool_result' is missing"),
        ({"messages": [*SUM, {"role": "assistant", "content": [{**CALL, "input": "x"}]}]},
         "messages[1].content[0].input must be an object; it is 'x'"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages has no block"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "2048"),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'; it must be 'text'"),
        ({"system": 7}, "system"),
        ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1; it is 1.5"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k: Input should be greater than or equal to 0; it is -1"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences has 65 strings; the bound is 64"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences[1] is empty"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "x", "type": "web_search_20250305"}]},
         "tools[0].type is 'web_search_20250305'; only 'custom' is served"),
        ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]},
         "tools[0].input_schema.type is 'array'; it must be 'object'"),
        ({"tools": [tool("a b")]}, "tools[0] has the name 'a b'"),
        ({"tools": [CLOCK, CLOCK]}, "two tools have the name 'clock'"),
        ({"tools": [tool(f"t{i}") for i in range(257)]}, "tools has 257 entries; the bound is 256"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any', but there are no tools"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}},
         "names the tool 'x'; the tools are 'clock'"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not served"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(tool_server, fields, message):
    response = tool_server.post(MESSAGES, **{"messages": SUM, "max_tokens": 4, **fields})
    answer = response.json()
    assert response.status_code == 400 and answer["type"] == "error", answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"], answer
    assert answer["request_id"] == response.headers["x-request-id"]
    assert answer["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    "fields, message",
    [
        # The demo model's template has no form for calls; a system text is a message of chat.
        ({"system": "x", "messages": [*SUM, CALLING, result("1")]}, "messages[1].tool_calls: "),
        ({"messages": [*SUM, *SUM, CALLING, result("1")]}, "messages[2].tool_calls: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}},
         "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": {"type": 7}}}, "output_format.schema"),
        ({"tools": [tool("t", x={"description": "x" * 1_000_000})]}, "tools[0].input_schema has "),
    ],
)  # fmt: skip
def test_errors_of_chat_have_the_names_of_the_request(server, fields, message):
    for path in (MESSAGES, COUNT)[: 2 if "system" in fields else 1]:
        response = server.post(path, **{"messages": SUM, "max_tokens": 4, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"].startswith(message), response.text


def test_errors_have_types(server, model):
    def kind(response):
        return response.status_code, response.json()["error"]["type"]

    post = server.client.post
    no_length = server.post(MESSAGES, messages=SUM)
    assert kind(no_length)[0] == 400 and "max_tokens is missing" in no_length.text
    assert kind(server.post(MESSAGES, model="x", messages=SUM, max_tokens=1)) == (
        404, "not_found_error"
    )  # fmt: skip
    assert kind(post(MESSAGES, content=b"{")) == (400, "invalid_request_error")
    assert kind(server.client.get(MESSAGES))[0] == 405
    settings = {"api_keys": ("k",), "max_body_bytes": 500, "strict_fields": True}
    with RunningServer([model], **settings) as guarded:
        fields = {"messages": SUM, "max_tokens": 1}
        assert kind(guarded.post(MESSAGES, **fields)) == (401, "authentication_error")
        guarded.client.headers["x-api-key"] = "k"
        assert guarded.post(MESSAGES, **fields).status_code == 200
        assert kind(guarded.post(MESSAGES, system="x" * 500, **fields)) == (
            413, "request_too_large"
        )  # fmt: skip
        unknown = guarded.post(MESSAGES, **fields, frobnicate=1)
        assert kind(unknown)[0] == 400 and "frobnicate is not a field" in unknown.text


def test_a_client_that_goes_away_ends_its_request(server, model):
    body = {"model": "demo", "messages": SUM, "max_tokens": 100, "stream": True}
    with paused(model):
        with server.client.stream("POST", MESSAGES, json=body) as response:
            parts = response.iter_bytes()
            assert next(parts).startswith(b"event: message_start\n")
            wait_for_requests(model, 1)
        wait_for_requests(model, 0)


def test_a_quiet_stream_is_pinged(model):
    body = {"model": "demo", "messages": SUM, "max_tokens": 100, "stream": True}
    with RunningServer([model], keep_alive_interval=0.2) as server, paused(model):
        with server.client.stream("POST", MESSAGES, json=body) as response:
            data = b""
            for part in response.iter_raw():
                data += part
                if b'event: ping\ndata: {"type":"ping"}\n\n' in data:
                    break


def test_an_error_after_the_start_is_an_event(model, monkeypatch):
    from allspark.serve.choice import Choice
    from allspark.serve.errors import ApiError

    monkeypatch.setattr(Choice, "error", property(lambda _: ApiError(500, "it broke")))
    with RunningServer([model]) as server:
        events = events_of(server, messages=SUM)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"] == {"type": "api_error", "message": "it broke"}
        response = server.post(MESSAGES, messages=SUM, max_tokens=4)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "it broke")


# Models and the document.


@pytest.mark.parametrize("prefix", ["", "/anthropic"])
def test_models_in_both_forms(server, prefix):
    version = {"anthropic-version": "2023-06-01"}
    get = server.client.get
    assert get(f"{prefix}/v1/models").json()["object"] == "list"
    listed = get(f"{prefix}/v1/models", headers=version).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("demo", "demo", False)
    (info,) = listed["data"]
    assert info["type"] == "model" and info["display_name"] == "demo"
    assert info["created_at"].endswith("Z")
    assert get(f"{prefix}/v1/models/demo", headers=version).json() == info
    assert get(f"{prefix}/v1/models/demo").json()["object"] == "model"
    missing = get(f"{prefix}/v1/models/x", headers=version)
    assert missing.status_code == 404 and missing.json()["type"] == "error"
    assert missing.json()["request_id"] == missing.headers["request-id"]
    assert "request-id" not in get(f"{prefix}/v1/models/x").headers


def test_the_document_names_the_routes(server):
    document = server.client.get("/openapi.json")
    paths = document.json()["paths"]
    for path, field in ((MESSAGES, "max_tokens"), (COUNT, "system")):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]
        properties = body["schema"]["properties"]
        assert field in properties
        assert "role" in properties["messages"]["items"]["properties"]


# Anthropic's own client.


@pytest.fixture(scope="module")
def anthropic():
    return pytest.importorskip("anthropic")


GREEDY = {"temperature": 0}  # of which not every version of the client has an argument


def test_the_client_of_anthropic(anthropic, call_server):
    url = f"http://127.0.0.1:{call_server.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        fields = {"model": "demo", "max_tokens": 300, "messages": ASK, "tools": [CLOCK]}
        fields |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        whole = client.messages.create(**fields, extra_body=GREEDY)
        with client.messages.stream(**fields, extra_body=GREEDY) as stream:
            names = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"message_start", "input_json", "content_block_stop"} <= names, names
        assert final.content[0].input == whole.content[0].input
        assert final.stop_reason == whole.stop_reason == "tool_use"
        assert final.usage.output_tokens == whole.usage.output_tokens
        call = whole.content[0]
        done = {"type": "tool_result", "tool_use_id": call.id, "content": "12:30"}
        rounds = [
            *ASK,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [done]},
        ]
        answer = client.messages.create(
            model="demo", max_tokens=8, messages=rounds, tools=[CLOCK], extra_body=GREEDY
        )
        assert answer.content[0].type == "text"
        counted = client.messages.count_tokens(model="demo", messages=ASK, tools=[CLOCK])
        assert counted.input_tokens > 0
        assert [each.id for each in client.models.list()] == ["demo"]
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            hot = {"temperature": 3}
            client.messages.create(model="demo", max_tokens=1, messages=SUM, extra_body=hot)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="x", max_tokens=1, messages=SUM)


def test_the_client_reads_thinking(anthropic, tool_server):
    url = f"http://127.0.0.1:{tool_server.port}"
    with anthropic.Anthropic(base_url=url, api_key="none") as client:
        fields = {"model": "demo", "max_tokens": 8, "messages": SUM, "extra_body": GREEDY}
        with client.messages.stream(**fields, thinking={"type": "adaptive"}) as stream:
            (block,) = stream.get_final_message().content
        whole = client.messages.create(**fields, thinking={"type": "adaptive"})
        assert block.type == "thinking" and block.thinking == whole.content[0].thinking


def test_the_asynchronous_client(anthropic, server):
    async def run():
        url = f"http://127.0.0.1:{server.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            fields = {"model": "demo", "max_tokens": 40, "messages": SUM}
            fields["extra_body"] = GREEDY
            whole = await client.messages.create(**fields)
            async with client.messages.stream(**fields) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            assert text == whole.content[0].text == "12 + 35 = 47"

    asyncio.run(run())
