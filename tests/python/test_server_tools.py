"""Tool calls and reasoning over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("fastapi")

from allspark.chat_template import ChatTemplateConfig, TokenizerTemplate  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve import call_checks  # noqa: E402
from allspark.serve.call_checks import CallCheck  # noqa: E402
from allspark.serve.message import MessageBuilder  # noqa: E402
from allspark.serve.parsers import (  # noqa: E402
    MessageParser,
    ReasoningParser,
    Tool,
    choose_reasoning_parser,
)
from allspark.serve.protocol.common import ChatBody  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402
from allspark.serve.tool_choice import plan_tools  # noqa: E402
from allspark.serve.usage import ReasoningTokens  # noqa: E402
from support.chats import ASK, SUM, strict_schema  # noqa: E402
from support.http_server import CHAT, RunningServer, error_of  # noqa: E402
from support.waiting import wait_for_requests  # noqa: E402


def tool(name, **properties):
    parameters = strict_schema(**properties)
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", city={"enum": ["Paris", "Rome"]}, days={"enum": [1, 2]})
CLOCK = tool("clock", zone={"enum": ["CET", "UTC"]})


# The demo model's template has no place for tools.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def plain_model(demo_model):
    model = ServedModel.open(str(demo_model), name="demo")
    yield model
    model.close()


@pytest.fixture(scope="module")
def model(plain_model):
    template = TokenizerTemplate(plain_model.tokenizer, TEMPLATE)
    return dataclasses.replace(plain_model, template=template)


@pytest.fixture(scope="module", params=["qwen", "qwen3coder", "llama3", "mistral", "glm47"])
def server(model, request):
    with RunningServer([model], tool_call_parser=request.param) as server:
        yield server


def arguments_of(call):
    assert call["type"] == "function" and call["id"]
    return json.loads(call["function"]["arguments"])


def test_a_required_call_is_valid_whole_and_streamed(server):
    body = {"messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": "required", "seed": 3,
            "parallel_tool_calls": False, "max_tokens": 300}  # fmt: skip
    (choice,) = server.post(CHAT, **body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    arguments = arguments_of(call)
    if call["function"]["name"] == "weather":
        assert arguments["city"] in ("Paris", "Rome") and arguments["days"] in (1, 2)
    else:
        assert arguments["zone"] in ("CET", "UTC")

    deltas = [event["choices"][0]["delta"] for event in server.events(CHAT, **body)]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [piece["index"] for piece in pieces] == [0] * len(pieces)
    assert [piece["function"]["name"] for piece in pieces if "name" in piece["function"]] == [
        call["function"]["name"]
    ]
    assert len([piece for piece in pieces if "id" in piece]) == 1
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert joined == call["function"]["arguments"]
    assert not any("content" in delta for delta in deltas)  # the message has none either


def test_a_named_function_is_called(server):
    choice = {"type": "function", "function": {"name": "clock"}}
    body = {"messages": ASK, "tools": [WEATHER, CLOCK], "tool_choice": choice, "max_tokens": 300}
    (found,) = server.post(CHAT, **body, parallel_tool_calls=False).json()["choices"]
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "clock" and arguments_of(call)["zone"] in ("CET", "UTC")


def test_text_is_free_under_auto_and_none(server):
    for choice in ("auto", "none", None):
        body = {"messages": [{"role": "user", "content": "What is 12+35?"}], "tools": [CLOCK]}
        body |= {"tool_choice": choice, "temperature": 0, "max_tokens": 12}
        (found,) = server.post(CHAT, **body).json()["choices"]
        assert "tool_calls" not in found["message"] and found["message"]["content"]
        assert found["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"tools": [{"type": "web"}]}, "tools", "tools[0] is no function"),
        ({"tools": [tool("a b")]}, "tools", "'a b'"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "two tools have the name 'clock'"),
        ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice", "'maybe'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "names the tool 'x'; the tools are 'clock'",
        ),
        ({"tools": [CLOCK], "guided_regex": "("}, "guided_regex", ""),
        ({"tools": [tool("t", x={"type": "nothing"})]}, "tools", "'t'"),
    ],
)
def test_wrong_tools_are_named(server, fields, param, message):
    status, error = error_of(server.post(CHAT, messages=ASK, **fields))
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"], error


def test_a_strict_tool_must_be_enforceable(model):
    strict = tool("t", x={"not": {"type": "string"}})
    with RunningServer([model], tool_call_parser="qwen") as server:
        body = {"messages": ASK, "tool_choice": "required", "max_tokens": 200, "seed": 1}
        assert server.post(CHAT, tools=[strict], **body).status_code == 200
        strict["function"]["strict"] = True
        status, error = error_of(server.post(CHAT, tools=[strict], **body))
        assert status == 400 and "the tool 't' is strict" in error["message"]


def test_a_template_without_tools_takes_none(plain_model):
    with RunningServer([plain_model]) as server:
        status, error = error_of(server.post(CHAT, messages=ASK, tools=[CLOCK]))
        assert status == 400 and "--tool-call-parser" in error["message"]
    settings = {"tool_call_parser": "qwen", "allow_request_templates": True}
    with RunningServer([plain_model], **settings) as server:
        status, error = error_of(server.post(CHAT, messages=ASK, tools=[CLOCK]))
        assert (status, error["param"]) == (400, "tools"), error
        body = {"messages": ASK, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 200}
        answer = server.post(CHAT, **body, chat_template=TEMPLATE).json()
        assert answer["choices"][0]["message"]["tool_calls"]


def test_what_a_template_cannot_write_is_named(plain_model):
    generator = "{% if tools %}{{ tools | map('upper') | tojson }}{% endif %}x"
    for text, message in (
        ("x", "tools: the chat template has no place for tools"),
        (generator, "tools cannot be written: the chat template failed: TypeError"),
    ):
        template = TokenizerTemplate(plain_model.tokenizer, text)
        model = dataclasses.replace(plain_model, template=template)
        with RunningServer([model], tool_call_parser="qwen") as server:
            for path, fields in ((CHAT, {}), (CHAT, {"stream": True}), ("/tokenize", {})):
                answer = server.post(path, messages=ASK, tools=[CLOCK], **fields)
                status, error = error_of(answer)
                assert (status, error["param"]) == (400, "tools"), (path, error)
                assert error["message"].startswith(message)
            documents = {"messages": ASK, "documents": [{"text": "a"}]}
            assert error_of(server.post(CHAT, **documents))[1]["param"] == "documents"


def test_an_empty_answer_adds_up_to_an_empty_text(server):
    body = {"messages": [{"role": "user", "content": "What is 12+35?"}], "tools": [CLOCK]}
    body |= {"temperature": 0, "max_tokens": 20, "stop": ["12"]}
    (choice,) = server.post(CHAT, **body).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": ""}
    deltas = [event["choices"][0]["delta"] for event in server.events(CHAT, **body)]
    assert [delta["content"] for delta in deltas if "content" in delta] == [""]


def test_a_call_that_a_stop_string_cuts_off(server):
    """It is delivered, and nobody is told to call a tool."""
    body = {"messages": ASK, "tools": [WEATHER], "tool_choice": "required", "seed": 3,
            "parallel_tool_calls": False, "max_tokens": 300, "stop": ["days"]}  # fmt: skip
    (choice,) = server.post(CHAT, **body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "days"), choice
    with pytest.raises(ValueError):
        json.loads(call["function"]["arguments"])
    end = server.events(CHAT, **body)[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "days")
    response = server.post("/v1/responses", **{
        **body, "input": ASK, "max_output_tokens": 300,
        "tools": [{"type": "function", **WEATHER["function"]}],
    }).json()  # fmt: skip
    assert (response["status"], response["output"][-1]["status"]) == ("completed", "incomplete")


def test_the_template_in_force_chooses_the_syntax(plain_model):
    """Not that of the tokenizer, where another one renders the prompts."""
    qwen = TEMPLATE + '{# <tool_call> {"name": f, "arguments": a} #}'
    body = {"messages": ASK, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 300,
            "parallel_tool_calls": False, "return_token_ids": True}  # fmt: skip
    for template, marker in (
        (TokenizerTemplate(plain_model.tokenizer, qwen), "<tool_call>"),
        (ChatTemplateConfig("internlm2").chat_template, "<|action_start|><|plugin|>"),
    ):
        with RunningServer([dataclasses.replace(plain_model, template=template)]) as server:
            (choice,) = server.post(CHAT, **body).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert plain_model.tokenizer.decode(choice["token_ids"]).startswith(marker)
    with RunningServer([plain_model], allow_request_templates=True) as server:
        (choice,) = server.post(CHAT, **body, chat_template=qwen).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("special", "text", "content"),
    [
        # None of the markers is a special token: all have been left out.
        (["</s>"], "<s>old</s> new", "<s>old</s> new"),
        (["<tool_call>", "</s>"], "a</s> b", "a b"),
        # Some cannot be told apart.
        (["<tool_call>", "<|a", "<|a|>", "<|a|>b", "<tool_call>x", "", "</s>"], "x</s>", "x"),
    ],
)
def test_special_tokens_are_left_out_where_they_are_decoded(special, text, content):
    tokenizer = SimpleNamespace(all_special_tokens=special, chat_template=None)
    entry = SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer, template=None))
    body = ChatBody.model_validate({"messages": ASK, "tools": [CLOCK]})
    plan = plan_tools(body, entry, ServerSettings(tool_call_parser="qwen"))
    assert plan.make_parser(entry, "").parse(text).content == content


def test_names_are_checked_at_the_start():
    for name, value in (
        ("tool_call_parser", "qwen9"), ("reasoning_parser", "qwen9"),
        ("reasoning_fields", ("thoughts",)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the names are"):
            ServerSettings(**{name: value})


# Reasoning. What the demo model writes before the sign of equality is taken for it.

REASONING = (
    ReasoningParser(("opened",), begin="<|im_start|>assistant", end=" ="),
    ReasoningParser(("written",), begin="12 +", end=" ="),
)


@pytest.fixture(params=["opened", "written"])
def reasoning_server(plain_model, request, monkeypatch):
    """Its prompts have begun the reasoning, or the model begins it."""
    monkeypatch.setattr("allspark.serve.parsers.registry.REASONING_PARSERS", REASONING)
    with RunningServer([plain_model], reasoning_parser=request.param) as server:
        yield server


def streamed(server, **body):
    """Content and reasoning that a stream adds up to."""
    deltas = [each["delta"] for event in server.events(CHAT, **body) for each in event["choices"]]
    return ["".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")]


def test_reasoning_is_a_field_of_its_own(reasoning_server):
    body = {"messages": SUM, "temperature": 0}
    answer = reasoning_server.post(CHAT, **body).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "47" and message["reasoning"] == message["reasoning_content"]
    assert message["reasoning"].endswith("35")
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"]
    assert streamed(reasoning_server, **body) == [message["content"], message["reasoning"]]
    hidden = reasoning_server.post(CHAT, **body, include_reasoning=False).json()
    assert set(hidden["choices"][0]["message"]) == {"role", "content"}


SUM_SCHEMA = {
    "type": "object", "properties": {"sum": {"enum": [46, 47]}}, "required": ["sum"],
    "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip


@pytest.mark.parametrize(
    "fields, content",
    [
        ({"response_format": {"type": "json_schema", "json_schema": SUM_SCHEMA}},
         r'\{"sum":4[67]\}'),
        ({"guided_json": SUM_SCHEMA}, r'\{"sum":4[67]\}'),
        ({"regex": "the sum: 4[0-9]"}, "the sum: 4[0-9]"),
        ({"guided_choice": ["x = 12 + 35 = 48", "x"]}, r"x( = 12 \+ 35 = 48)?"),
        ({"ebnf": 'root ::= "sum " [0-9] [0-9]'}, "sum [0-9][0-9]"),
        # With what would be a marker elsewhere.
        ({"regex": r"<12 \+ 35 = 47>"}, r"<12 \+ 35 = 47>"),
    ],
)
def test_a_format_holds_for_the_content_after_the_reasoning(reasoning_server, fields, content):
    body = {"messages": SUM, "temperature": 0, "max_tokens": 60, **fields}
    (choice,) = reasoning_server.post(CHAT, **body).json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    assert choice["message"]["reasoning"].endswith("35")
    assert re.fullmatch(content, choice["message"]["content"])
    found = [choice["message"][name] for name in ("content", "reasoning")]
    assert streamed(reasoning_server, **body) == found


def test_a_wrong_format_is_named_beside_reasoning(reasoning_server):
    for fields in ({"guided_regex": "("}, {"response_format": {"type": "xml"}}):
        status, error = error_of(reasoning_server.post(CHAT, messages=SUM, **fields))
        assert (status, error["param"]) == (400, *fields), error


@pytest.mark.parametrize(
    "fields, has_reasoning",
    [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, True),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_an_effort_asks_for_reasoning(tool_server, fields, has_reasoning):
    body = {"messages": SUM, "max_tokens": 5, "temperature": 0, **fields}
    message = tool_server.post(CHAT, **body).json()["choices"][0]["message"]
    assert ("reasoning" in message) == has_reasoning != bool(message["content"])


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_templates_see_the_flag_that_the_parser_sees(plain_model, name, flag):
    """Whatever the template calls it: a parser that takes a prompt for opened is not alone."""
    text = f"<｜Assistant｜>{{{{ '<think>' if {name} else '</think>' }}}}"
    model = dataclasses.replace(
        plain_model, template=TokenizerTemplate(plain_model.tokenizer, text)
    )
    given = [{"enable_thinking": flag}]
    given += [{"chat_template_kwargs": {each: flag}} for each in ("enable_thinking", "thinking")]
    with RunningServer([model], reasoning_parser="deepseek-v3") as server:
        for fields in given:
            body = {"messages": SUM, "max_tokens": 5, "temperature": 0, **fields}
            answer = server.post(CHAT, **body, return_token_ids=True).json()
            message = answer["choices"][0]["message"]
            prompt = model.tokenizer.decode(answer["prompt_token_ids"])
            assert prompt.endswith("<think>" if flag else "</think>")
            assert ("reasoning" in message) == bool(flag) != bool(message["content"])


def test_a_prompt_that_has_not_opened_the_reasoning(plain_model):
    """As one that ends with a tool's output, whatever the flag says."""
    text = "<｜Assistant｜>{% if thinking and messages[-1].role != 'tool' %}<think>{% endif %}"
    model = dataclasses.replace(
        plain_model, template=TokenizerTemplate(plain_model.tokenizer, text)
    )
    tool = {"role": "tool", "content": "47", "tool_call_id": "x"}
    with RunningServer([model], reasoning_parser="deepseek-v3") as server:
        for messages, name in ((SUM, "reasoning"), ([*SUM, tool], "content")):
            body = {"messages": messages, "enable_thinking": True, "max_tokens": 5}
            message = server.post(CHAT, **body).json()["choices"][0]["message"]
            assert [key for key in ("reasoning", "content") if message.get(key)] == [name]


@pytest.fixture
def reasoning():
    """With its builder, and the texts and threads of what it encoded."""
    encoded = []

    def encode(text, add_special_tokens):
        encoded.append((text, threading.current_thread()))
        return text.split()

    builder = MessageBuilder(
        MessageParser(None, choose_reasoning_parser(None, "default")), ("reasoning",)
    )
    builder.put("<think>", False)
    return ReasoningTokens(builder, SimpleNamespace(encode=encode)), builder, encoded


def test_reasoning_is_encoded_as_it_comes(reasoning):
    """Its tokens are in each chunk that has usage, and it may be long."""
    tokens, builder, encoded = reasoning
    for index in range(1000):
        tokens.count_new()
        assert tokens.count == index
        builder.put("ab ", False)
    builder.put("</think>x", True)
    asyncio.run(tokens.count_whole())
    assert tokens.count == 1000 and len(builder.reasoning) == 2999
    assert sum(len(text) for text, _ in encoded) < 2 * 2999


def test_the_whole_reasoning_is_encoded_beside_the_loop(reasoning):
    tokens, builder, encoded = reasoning
    builder.put("a b c</think>x", True)

    async def main():
        changed = asyncio.Event()
        assert not tokens.is_whole(changed.set)
        await changed.wait()
        assert tokens.is_whole(changed.set)

    asyncio.run(main())
    ((text, thread),) = encoded
    assert (text, tokens.count) == ("a b c", 3) and thread is not threading.main_thread()


def test_names_of_reasoning(plain_model, monkeypatch):
    monkeypatch.setattr("allspark.serve.parsers.registry.REASONING_PARSERS", REASONING)
    for names in (("reasoning",), ("reasoning_content",)):
        settings = {"reasoning_parser": "written", "reasoning_fields": names}
        with RunningServer([plain_model], **settings) as server:
            answer = server.post(CHAT, messages=SUM, temperature=0).json()
            assert set(answer["choices"][0]["message"]) == {"role", "content", *names}
            deltas = [event["choices"][0]["delta"]
                      for event in server.events(CHAT, messages=SUM, temperature=0)]  # fmt: skip
            assert set().union(*deltas) == {"role", "content", *names}


# A format beside tools.


def test_calls_or_content_in_the_format(server):
    body = {"messages": ASK, "tools": [CLOCK], "seed": 3, "max_tokens": 300,
            "parallel_tool_calls": False, "response_format": {"type": "regex", "regex": "no call"}}
    (choice,) = server.post(CHAT, **body, tool_choice="required").json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (choice,) = server.post(CHAT, **body, tool_choice="none").json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "no call"}
    # Under auto the model chooses: it does not like to begin with a snowman.
    found = []
    for text in ("no call", "\N{SNOWMAN}"):
        body["response_format"] = {"type": "regex", "regex": text}
        (choice,) = server.post(CHAT, **body).json()["choices"]
        message = choice["message"]
        assert (message["content"] == text) != bool(message.get("tool_calls")), choice
        found.append(choice["finish_reason"])
    assert found == ["stop", "tool_calls"]


# Calls of tools whose schemas cannot be enforced. The demo model gives them no arguments.


def unenforced(name, *required):
    schema = {"type": "object", "required": required, "not": {"required": ["zone", "zones"]}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


STRICT_FREE = {"messages": ASK, "tool_choice": "required", "parallel_tool_calls": False,
               "max_tokens": 300, "seed": 3}  # fmt: skip
MISSING = [{"index": 0, "message": "$: 'x' is a required property"}]


@pytest.fixture(scope="module")
def checking(model):
    with RunningServer([model], tool_call_parser="qwen3coder") as server:
        yield server


def test_invalid_calls_are_named_whole_and_streamed(checking):
    body = {**STRICT_FREE, "tools": [unenforced("t", "x")], "n": 2}
    for choice in checking.post(CHAT, **body).json()["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert arguments_of(call) == {} and choice["finish_reason"] == "tool_calls"
        assert choice["invalid_tool_calls"] == MISSING
    ends = [
        choice
        for event in checking.events(CHAT, **body)
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(choice["index"] for choice in ends) == [0, 1]
    assert [choice["invalid_tool_calls"] for choice in ends] == [MISSING] * 2


def test_nothing_is_said_of_valid_and_enforced_calls(checking):
    for tools in ([unenforced("t")], [CLOCK]):
        body = {**STRICT_FREE, "tools": tools}
        (choice,) = checking.post(CHAT, **body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and "invalid_tool_calls" not in choice
        events = checking.events(CHAT, **body)
        assert "invalid_tool_calls" not in json.dumps(events)


def test_anthropics_messages_name_them_too(checking):
    schema = unenforced("t", "x")["function"]["parameters"]
    tools = [{"name": "t", "input_schema": schema}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"messages": ASK, "tools": tools, "tool_choice": choice, "max_tokens": 300}
    message = checking.post("/v1/messages", **body).json()
    assert message["stop_reason"] == "tool_use" and message["invalid_tool_calls"] == MISSING
    text = checking.post("/v1/messages", **body, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    (delta,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert delta["invalid_tool_calls"] == MISSING and events[-1]["type"] == "message_stop"


def test_a_slow_validation_holds_up_nobody(checking, model, monkeypatch):
    begun, go_on, answers = threading.Event(), threading.Event(), []

    def slow(tool, arguments):
        begun.set()
        assert go_on.wait(30)
        return threading.current_thread().name.partition("_")[0]

    monkeypatch.setattr(call_checks, "argument_problem", slow)
    body = {**STRICT_FREE, "tools": [unenforced("t", "x")]}
    for ask in (
        lambda: answers.append(checking.post(CHAT, **body).json()["choices"][0]),
        lambda: answers.append(checking.events(CHAT, **body)[-1]["choices"][0]),
    ):
        begun.clear()
        go_on.clear()
        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(30)
        wait_for_requests(model, 0)
        with httpx.Client(base_url=checking.client.base_url, timeout=60) as other:
            assert other.get("/health").status_code == 200
        go_on.set()
        thread.join()
    names = [each["invalid_tool_calls"][0]["message"] for each in answers]
    assert names == ["allspark-schema"] * 2  # and no thread of others' work


def test_a_client_may_go_away_during_a_validation(checking, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slow(tool, arguments):
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(call_checks, "argument_problem", slow)
    body = {"model": "demo", **STRICT_FREE, "tools": [unenforced("t", "x")], "stream": True}
    with checking.client.stream("POST", CHAT, json=body):
        assert begun.wait(30)
    go_on.set()
    (choice,) = checking.post(CHAT, **body | {"stream": False}).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"


def test_what_is_validated(monkeypatch):
    tools = [Tool("t", {"type": "object", "required": ["x"]}), Tool("bad", {})]

    def problems(*calls):
        return asyncio.run(CallCheck(tools).wait(calls))

    assert problems(("other", "{}"), ("t", '{"x": 1}')) == []
    assert problems(("other", "{}"), ("t", "{}"), ("t", '{"x": ')) == [{**MISSING[0], "index": 1}]
    many = problems(*[("t", "{}")] * 70)
    assert len(many) == 65 and many[-1]["index"] == 64 and "first 64 calls" in many[-1]["message"]

    def fails(tool, arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(call_checks, "argument_problem", fails)
    assert "could not be validated" in problems(("t", "{}"))[0]["message"]
