"""OpenAI's Responses protocol over HTTP: inputs, conversations, tools, errors."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

pytest.importorskip("fastapi")

from support.chats import ASK_TEXT, QUEUE_TEXT, SUM_TEXT, user  # noqa: E402
from support.http_server import CHAT, RunningServer, error_of, paused  # noqa: E402
from support.responses import (  # noqa: E402
    CALL,
    CLOCK,
    COUNT,
    DONE,
    LOGPROBS,
    RESPONSES,
    WEATHER,
    added_up,
    ask,
    cancel,
    events_of,
    get,
    read_events,
    same_streamed,
    text_of,
    tool,
    without_ids,
)
from support.waiting import wait_for_requests  # noqa: E402

# Text.


def test_an_input_is_answered(server):
    answer = same_streamed(server, input=SUM_TEXT)
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
    parts = [{"type": "input_text", "text": SUM_TEXT}]
    for given in (
        [user(SUM_TEXT)],
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
    response = server.post(RESPONSES, input=SUM_TEXT, **known, **without_effect)
    answer = response.json()
    assert {name: answer[name] for name in known} == known
    assert answer["service_tier"] == "default" and answer["previous_response_id"] is None
    assert "x-allspark-ignored" not in response.headers
    defaults = server.post(RESPONSES, input=SUM_TEXT).json()
    assert (defaults["temperature"], defaults["top_p"], defaults["metadata"]) == (0.7, 1.0, {})
    assert (defaults["tools"], defaults["tool_choice"]) == ([], "auto")


def test_unknown_fields_are_named(server, model):
    response = server.post(RESPONSES, input=SUM_TEXT, max_output_tokens=1, zeta=1, frobnicate=1)
    assert response.headers["x-allspark-ignored"] == "frobnicate, zeta"
    response = server.post(
        RESPONSES, input=SUM_TEXT, max_output_tokens=1, frobnicate=1, stream=True
    )
    assert response.headers["x-allspark-ignored"] == "frobnicate"
    assert "x-allspark-ignored" in server.post(COUNT, input=SUM_TEXT, frobnicate=1).headers
    with RunningServer([model], strict_fields=True) as strict:
        status, error = error_of(strict.post(RESPONSES, input=SUM_TEXT, frobnicate=1))
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
        answer = same_streamed(server, input=QUEUE_TEXT, **fields)
        assert answer["status"] in ("completed", "incomplete")


def test_a_response_that_is_cut_off_is_incomplete(server):
    for fields in ({"max_output_tokens": 3}, {"ignore_eos": True, "timeout_ms": 40}):
        answer = ask(server, input=SUM_TEXT, **fields)
        assert answer["status"] == "incomplete" and answer["completed_at"] is None
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        # A deadline may come before the first token.
        assert {item["status"] for item in answer["output"]} <= {"incomplete"}
    answer = same_streamed(server, input=SUM_TEXT, max_output_tokens=3)
    assert [item["status"] for item in answer["output"]] == ["incomplete"]
    assert answer["usage"]["output_tokens"] == 3


def test_an_output_without_text_is_an_empty_message(server):
    answer = same_streamed(server, input=SUM_TEXT, stop=["1"])
    (item,) = answer["output"]
    assert item["content"][0]["text"] == "" and answer["status"] == "completed"


def test_a_format_is_kept(server):
    given = {"type": "json_schema", "name": "zone", "schema": CLOCK["parameters"], "strict": True}
    answer = same_streamed(server, input=SUM_TEXT, text={"format": given}, max_output_tokens=99)
    assert json.loads(text_of(answer))["zone"] in ("CET", "UTC")
    assert answer["text"]["format"] == given


def test_tokens_have_log_probabilities(server):
    fields = {"input": QUEUE_TEXT, "include": [LOGPROBS], "max_output_tokens": 60}
    answer = ask(server, **fields, top_logprobs=2)
    (part,) = answer["output"][0]["content"]
    rows = part["logprobs"]
    assert "".join(row["token"] for row in rows) == part["text"]
    assert all(len(row["top_logprobs"]) == 2 and row["logprob"] <= 0 for row in rows)
    chat = {"messages": [user(QUEUE_TEXT)], "logprobs": True, "top_logprobs": 2, "max_tokens": 60}
    chosen = server.post(CHAT, **chat, temperature=0).json()["choices"][0]
    assert chosen["logprobs"]["content"][: len(rows)] == rows
    # A stop string cuts the text within a token; the tokens are those that its text needs.
    cut = ask(server, **fields, stop=[part["text"][3:7]])["output"][0]["content"][0]
    assert cut["text"] == part["text"][:3]
    tokens = [row["token"] for row in cut["logprobs"]]
    assert "".join(tokens).startswith(cut["text"]) and "".join(tokens[:-1]) != cut["text"]
    assert ask(server, input=SUM_TEXT, top_logprobs=2)["output"][0]["content"][0]["logprobs"] == []


def test_counted_tokens_are_those_of_the_answer(server, tool_server):
    before = ask(server, input=SUM_TEXT)
    tools = [{**CLOCK}, WEATHER]
    for each, fields in (
        (server, {"input": SUM_TEXT}),
        (server, {"input": "And 2+2?", "previous_response_id": before["id"]}),
        (server, {"input": QUEUE_TEXT, "instructions": "Be short."}),
        (tool_server, {"input": ASK_TEXT, "tools": tools}),
        (tool_server, {"input": [user(ASK_TEXT), CALL, DONE], "reasoning": {"effort": "low"}}),
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
    first = ask(server, input=SUM_TEXT, instructions="Be short.")
    second = ask(server, input="And 2+2?", previous_response_id=first["id"])
    third = ask(
        server, input=[user(QUEUE_TEXT)], previous_response_id=second["id"], instructions="Be long."
    )
    chat = [
        user(SUM_TEXT), {"role": "assistant", "content": text_of(first)},
        user("And 2+2?"), {"role": "assistant", "content": text_of(second)}, user(QUEUE_TEXT),
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
    first = ask(server, input=SUM_TEXT)
    second = ask(server, input=QUEUE_TEXT, previous_response_id=first["id"])
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    given = get(server, f"{first['id']}/input_items").json()["data"][0]["id"]
    for items in (
        [user(SUM_TEXT), *first["output"], user(QUEUE_TEXT)],
        [user(SUM_TEXT), {"role": "assistant", "content": text_of(first)}, user(QUEUE_TEXT)],
        [user(SUM_TEXT), reference, user(QUEUE_TEXT)],
        [{"id": given}, {"id": reference["id"]}, user(QUEUE_TEXT)],
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
    first = ask(call_server, input=ASK_TEXT, **fields)
    assert first["status"] == "incomplete"
    (item,) = first["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    # What was cut off of a call is none, so no output of it is missing.
    second = ask(call_server, input=SUM_TEXT, previous_response_id=first["id"], max_output_tokens=1)
    plain = ask(call_server, input=[user(ASK_TEXT), user(SUM_TEXT)], max_output_tokens=1)
    assert second["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_what_cannot_be_gone_on_from_is_named(server, model):
    def refused(id):
        status, error = error_of(server.post(RESPONSES, input=SUM_TEXT, previous_response_id=id))
        assert error["param"] == "previous_response_id" and id in error["message"]
        return status, error["code"]

    assert refused("resp_7") == (404, "previous_response_not_found")
    unstored = ask(server, input=SUM_TEXT, store=False)["id"]
    assert refused(unstored) == (404, "previous_response_not_found")
    first = ask(server, input=SUM_TEXT)
    second = ask(server, input=SUM_TEXT, previous_response_id=first["id"])
    assert server.client.delete(f"{RESPONSES}/{first['id']}").status_code == 200
    assert refused(first["id"]) == (404, "previous_response_not_found")
    status, error = error_of(
        server.post(RESPONSES, input=SUM_TEXT, previous_response_id=second["id"])
    )
    assert status == 404 and first["id"] in error["message"] and second["id"] in error["message"]
    with paused(model):
        id = ask(server, input=SUM_TEXT, background=True)["id"]
        assert refused(id) == (400, "previous_response_not_completed")
        cancel(server, id)
        assert refused(id) == (400, "previous_response_not_completed")


# Tools and reasoning.


@pytest.mark.parametrize("parser", ["qwen", "qwen3coder", "llama3", "mistral", "glm47"])
def test_a_function_is_called(tool_model, parser):
    with RunningServer([tool_model], tool_call_parser=parser) as server:
        fields = {"input": ASK_TEXT, "tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
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
        by_hand = ask(server, input=[user(ASK_TEXT), item, done], **again)
        parts = {**done, "output": [{"type": "input_text", "text": "12:30"}]}
        id = ask(server, **fields, tool_choice="required")["id"]
        before = get(server, id).json()["output"][0]
        parts["call_id"] = before["call_id"]
        by_id = ask(server, input=[parts], previous_response_id=id, **again)
        assert abs(by_id["usage"]["input_tokens"] - by_hand["usage"]["input_tokens"]) < 20
        assert text_of(by_id) == text_of(by_hand)


def test_tools_are_shown_as_they_are_in_force(call_server):
    answer = ask(
        call_server, input=ASK_TEXT, tools=[CLOCK], tool_choice="none", max_output_tokens=1
    )
    assert answer["tools"] == [{**CLOCK, "strict": False}] and answer["tool_choice"] == "none"
    plain = ask(call_server, input=ASK_TEXT, max_output_tokens=1)
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_items_are_the_messages_of_chat(tool_server, tool_model):
    def thought(text, name="summary"):
        kind = {"summary": "summary_text", "content": "reasoning_text"}[name]
        return {"type": "reasoning", "id": "rs_1", "summary": [], name: [
            {"type": kind, "text": text}
        ]}  # fmt: skip

    items = [
        {"role": "developer", "content": "Be kind."},
        user(ASK_TEXT),
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
        user(ASK_TEXT),
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
    fields = {"input": SUM_TEXT, "max_output_tokens": 8}
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


def of_many_events():
    """A response that has ended, with thousands of events."""
    from allspark.serve.responses.record import OutputItem, Record

    head = {"id": "resp_0", "background": False, "previous_response_id": None}
    item = OutputItem("message", "msg_0", pieces=[f"{i}," for i in range(2_245)], is_done=True)
    return Record(head, [], [item], "completed")


async def written(record, after=-1):
    """What its stream writes to a client that takes data at once, or later."""
    from allspark.serve.responses.stream import ResponseStream
    from allspark.serve.sse import Writer

    data = []

    async def send(message):
        data.append(message["body"])
        if len(data) % 2:
            await asyncio.sleep(0.001)

    writer = Writer(send)
    ResponseStream(record, None, after, False).start(writer)
    await asyncio.wait_for(writer.end, 60)
    return data


def test_many_events_leave_others_their_turn():
    """They are written in several goes, each when the client takes more."""
    record = of_many_events()
    data = asyncio.run(written(record))
    events = read_events(b"".join(data).decode())
    assert added_up(events)["output"] == record.response()["output"] and len(data) == 5
    rest = asyncio.run(written(record, 1_999))
    assert read_events(b"".join(rest).decode()) == events[2_000:] and len(rest) == 1


def test_a_fault_between_many_events_ends_the_stream(monkeypatch):
    from allspark.serve.responses.events import Events

    take = Events.take

    def take_once(self):
        if self._next > 0:
            raise ValueError("a fault")
        return take(self)

    monkeypatch.setattr(Events, "take", take_once)
    with pytest.raises(ValueError, match="a fault"):
        asyncio.run(written(of_many_events()))


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
    fields = {"input": SUM_TEXT, "tools": [CLOCK], "include": [LOGPROBS], "max_output_tokens": 30}
    part = same_streamed(call_server, **fields)["output"][0]["content"][0]
    assert part["logprobs"]
    assert "".join(row["token"] for row in part["logprobs"]).strip() == part["text"].strip()


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
        ({"tools": [{"type": "web_search"}]}, "tools[0].type",
         "is 'web_search'; only 'function' is served"),
        ({"tools": [CLOCK, {"type": "mcp", "server_label": "x"}]}, "tools[1].type", "is 'mcp'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] has the name None"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "two tools have the name 'clock'"),
        ({"tools": [tool(f"t{i}") for i in range(257)]}, "tools", "257 entries; the bound is 256"),
        ({"tools": [tool("t", x={"description": "x" * 1_000_000})]}, "tools[0].parameters",
         "tools[0].parameters has 1000"),
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
    status, error = error_of(tool_server.post(RESPONSES, **{"input": SUM_TEXT, **fields}))
    assert (status, error["param"]) == (400, param), error
    assert text in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_errors_have_statuses(server, model):
    post = server.client.post
    status, error = error_of(server.post(RESPONSES, model="x", input=SUM_TEXT))
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error_of(post(RESPONSES, content=b"{"))[0] == 400
    assert error_of(server.client.get(RESPONSES))[0] == 405
    settings = {"api_keys": ("k",), "max_body_bytes": 500}
    with RunningServer([model], **settings) as guarded:
        assert error_of(guarded.post(RESPONSES, input=SUM_TEXT))[0] == 401
        assert error_of(get(guarded, "resp_1"))[0] == 401
        guarded.client.headers["authorization"] = "Bearer k"
        assert guarded.post(RESPONSES, input=SUM_TEXT).status_code == 200
        assert error_of(guarded.post(RESPONSES, input="x" * 600))[0] == 413


def test_a_template_s_error_has_the_place_of_the_item(server):
    """The demo model's template has no form for calls; the second message stands for two items."""
    items = [user(ASK_TEXT), {"role": "assistant", "content": "Hm."}, CALL, DONE]
    status, error = error_of(server.post(RESPONSES, input=items, instructions="x"))
    assert (status, error["param"]) == (400, "input")
    assert error["message"].startswith("input[1].tool_calls")


def test_settings_of_the_store_are_checked(model):
    for name in ("max_stored_responses", "max_stored_response_bytes", "response_lifetime"):
        with pytest.raises(ValueError, match="it must be at least 0"):
            RunningServer([model], **{name: -1})


def test_an_output_that_cannot_be_read_fails_alone(model, monkeypatch):
    from allspark.serve.responses.builder import OutputBuilder

    def broken(self, text):
        raise RuntimeError("broken")

    with RunningServer([model]) as server:
        with monkeypatch.context() as patch:
            patch.setattr(OutputBuilder, "put", broken)
            last = events_of(server, input=SUM_TEXT)[-1]
            assert last["type"] == "response.failed"
            assert "its log says why" in last["response"]["error"]["message"]
        wait_for_requests(model, 0)
        assert text_of(ask(server, input=SUM_TEXT)) == "12 + 35 = 47"


def test_a_stream_that_cannot_be_written_is_cut_off(model, monkeypatch):
    """Its client would wait for ever; its request ends, too, and other requests go on."""
    from allspark.serve.responses.events import Events

    take = Events.take

    def take_once(self):
        if self._next > 0:
            raise RuntimeError("broken")
        return take(self)

    with RunningServer([model]) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Events, "take", take_once)
            with pytest.raises(httpx.TransportError):
                events_of(server, input=SUM_TEXT)
        wait_for_requests(model, 0)
        assert text_of(ask(server, input=SUM_TEXT)) == "12 + 35 = 47"


def test_a_format_that_fails_late_is_the_requests_fault(server):
    body = {"input": SUM_TEXT, "ebnf": 'root ::= "a" root'}
    status, error = error_of(server.post(RESPONSES, **body))
    assert (status, error["param"], error["code"]) == (400, "ebnf", "invalid_value")
    assert error["message"].startswith("ebnf: the grammar failed")
    last = events_of(server, **body)[-1]["response"]
    assert last["error"] == {"code": "invalid_prompt", "message": error["message"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}}
    status, error = error_of(server.post(RESPONSES, input=SUM_TEXT, text=form, min_tokens=20))
    assert (status, error["param"]) == (400, "text.format")


def test_a_long_conversation_is_truncated(server, model):
    turns = [user(f"What is {i}+{i}? " * 20) for i in range(20)]
    items = [{"role": "system", "content": "Be short."}, *turns, user(SUM_TEXT)]
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
