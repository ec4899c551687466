"""The server's core: chat and completions, whole and streamed, over HTTP."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import pytest
from allspark.chat_template import ChatTemplateConfig
from allspark.pipeline import EngineConfig

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from allspark.grammar_compiler import Compiler  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve import chat, completion  # noqa: E402
from allspark.serve.catalog import Catalog  # noqa: E402
from allspark.serve.event_form import ids_form, text_form  # noqa: E402
from allspark.serve.logprobs import CompletionRows  # noqa: E402
from allspark.serve.settings import ServerSettings  # noqa: E402
from allspark.serve.sse import frame  # noqa: E402
from allspark.serve.state import ServerState  # noqa: E402
from allspark.serve.text_work import is_working  # noqa: E402
from support.chats import QUEUE, SUM  # noqa: E402
from support.http_server import CHAT, COMPLETIONS, RunningServer, error_of, paused  # noqa: E402
from support.raw_http import Raw, post  # noqa: E402
from support.waiting import wait_for_requests, wait_until  # noqa: E402


@pytest.fixture(scope="module")
def model(demo_model, repo_root):
    config = EngineConfig(
        max_batch_size=8, adapters={"threes": str(repo_root / "examples" / "demo_adapter")}
    )
    model = ServedModel.open(str(demo_model), config, "demo")
    yield model
    model.close()


# Chat.


def test_a_conversation_is_answered(server):
    answer = server.post(CHAT, messages=SUM, temperature=0).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "demo" and answer["system_fingerprint"].startswith("fp_")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "12 + 35 = 47"}
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == 28


def fingerprint(model, **settings):
    catalog = Catalog([model])
    return ServerState(catalog, ServerSettings(**settings)).fingerprint(catalog.get("demo"))


@pytest.mark.parametrize(
    "settings, is_same",
    [
        ({}, True),
        ({"max_batch_size": 3, "block_size": 16, "threads": 1, "prefill_chunk": 64}, True),
        ({"chat_template": "llama2"}, False),
        ({"data_type": "float32"}, False),
        ({"precision": "A8W8"}, False),
        ({"precision": "A16W8"}, False),
        ({"kv_cache_bits": 8}, False),
        ({"rope_scaling_factor": 2.0}, False),
        ({"use_logn_attn": True}, False),
        ({"session_len": 512}, True),
    ],
)
def test_the_fingerprint_is_that_of_what_the_bits_depend_on(model, demo_model, settings, is_same):
    settings = dict(settings)
    template = settings.pop("chat_template", None)
    config = EngineConfig(**settings)
    other = ServedModel.open(str(demo_model), config, "demo", chat_template=template)
    assert (fingerprint(other) == fingerprint(model)) == is_same
    other.close()


def test_all_facts_are_in_the_fingerprint(model, monkeypatch):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.add_tokens(["<new>"])
    found = [
        fingerprint(model),
        fingerprint(model, sampling_defaults={"top_k": 5}),
        fingerprint(model, tool_call_parser="qwen"),
        fingerprint(model, reasoning_parser="default"),
        fingerprint(dataclasses.replace(model, sampling_defaults={"temperature": 0.1})),
        fingerprint(dataclasses.replace(model, end_ids=(7,))),
        fingerprint(dataclasses.replace(model, tokenizer=tokenizer)),
        *(
            fingerprint(dataclasses.replace(model, config=longer, session_len=length))
            for longer in [EngineConfig(rope_scaling_factor=2.0)]
            for length in (256, 512)
        ),
    ]
    stat = SimpleNamespace(kernel_table="another")
    for name, value in (("get_version_full", "2.0"), ("get_as_engine_stat", stat)):
        with monkeypatch.context() as patched:
            patched.setattr(type(model.engine), name, lambda *_, value=value: value)
            found.append(fingerprint(model))
    assert len(set(found)) == len(found)
    assert fingerprint(model) == found[0]


def parts_of(events, choice):
    """What the events have of a choice."""
    index = choice["index"]
    return [each for event in events for each in event["choices"] if each["index"] == index]


def test_deltas_add_up_to_the_message(server):
    for fields in ({}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}, {"n": 3}):
        fields = {"messages": QUEUE, "seed": 5, "temperature": 1.0, "max_tokens": 40, **fields}
        whole = server.post(CHAT, **fields).json()
        events = server.events(CHAT, **fields)
        for choice in whole["choices"]:
            own = parts_of(events, choice)
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(each["delta"].get("content", "") for each in own)
            assert text == choice["message"]["content"]
            assert [each["finish_reason"] for each in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == choice["finish_reason"]
            if "logprobs" in fields:
                rows = [each["logprobs"]["content"] for each in own if each["logprobs"]]
                assert sum(rows, []) == choice["logprobs"]["content"]
            if "return_token_ids" in fields:
                ids = [i for each in own for i in each.get("token_ids", [])]
                assert ids == choice["token_ids"]
                assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
                assert all("prompt_token_ids" not in each for each in events[1:])


CONTROLS = "".join(map(chr, range(0x21)))


@pytest.mark.parametrize(
    "text",
    ["", "a", 'quote " and \\', "[1234567890123,3210987654321]", CONTROLS, "\x7f é€😀\u2028"],
)
@pytest.mark.parametrize("ids", [[], [0], [5, 151_935]])
def test_events_of_text_and_ids_are_those_of_any_other(text, ids):
    def make(text, ids=None):
        choice = {"index": 0, "text": text} | ({} if ids is None else {"token_ids": ids})
        return {"id": "cmpl-1", "choices": [choice], "usage": None}

    assert ids_form(make)(text, ids) == frame(make(text, ids))
    assert text_form(make)(text) == text_form(make)(text, ids) == frame(make(text))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True}, {"n": 2}])
def test_ids_of_streamed_completions_add_up(server, fields):
    fields = {"prompt": "1+2=", "seed": 5, "temperature": 1.0, "max_tokens": 30,
              "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
    whole = server.post(COMPLETIONS, **fields).json()
    events = server.events(COMPLETIONS, **fields)
    for choice in whole["choices"]:
        own = parts_of(events, choice)
        assert "".join(each["text"] for each in own) == choice["text"]
        assert sum((each["token_ids"] for each in own), []) == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in each for each in own[1:])
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + ["length"]


def test_usage_in_streams(server):
    events = server.events(CHAT, messages=SUM, stream_options={"include_usage": True})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["prompt_tokens"] == 17
    assert all(event["usage"] is None for event in events[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, messages=SUM, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == counts[-2]


def test_stops_say_which(server):
    def ask(**fields):
        body = {"messages": QUEUE, "temperature": 0, **fields}
        return server.post(CHAT, **body).json()["choices"][0]

    text = ask()["message"]["content"]
    choice = ask(stop=[text[6:20], "zzz"])
    assert choice["message"]["content"] == text[:6]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[6:20])
    ids = ask(return_token_ids=True)["token_ids"]
    assert ask(stop_token_ids=[ids[3]])["stop_reason"] == ids[3]
    choice = ask(ignore_eos=True, timeout_ms=30, max_tokens=100_000)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")


def test_stop_words_of_a_template_are_no_stops_of_the_request(model):
    from allspark.chat_template import ChatTemplate

    class Stopping(ChatTemplate):
        stop_words = ("47",)
        render, encode = model.template.render, model.template.encode

    stopping = dataclasses.replace(model, template=Stopping())
    with RunningServer([stopping]) as server:
        body = {"messages": SUM, "temperature": 0}
        for stop, reason in (([], None), (["47"], "47")):
            (choice,) = server.post(CHAT, **body, stop=stop).json()["choices"]
            assert choice["message"]["content"] == "12 + 35 = "
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


def test_formats_by_every_name(server):
    regex = "call me [A-Z]{3}"
    schema = {
        "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
        "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip
    for fields in (
        {"response_format": {"type": "regex", "regex": regex}},
        {"guided_regex": regex},
        {"regex": regex},
        {"structured_outputs": {"regex": regex}},
        {"guided_choice": ["call me ABC", "call me XYZ"]},
        {"ebnf": 'root ::= "call me " [A-Z] [A-Z] [A-Z]'},
    ):
        answer = server.post(CHAT, messages=SUM, max_tokens=40, **fields).json()
        assert answer["choices"][0]["message"]["content"].startswith("call me "), fields
    for fields in (
        {"guided_json": schema},
        {"json_schema": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    ):
        answer = server.post(CHAT, messages=SUM, max_tokens=200, **fields).json()
        assert json.loads(answer["choices"][0]["message"]["content"])["a"] in (1, 2), fields
    status, error = error_of(server.post(CHAT, messages=SUM, regex=regex, guided_regex=regex))
    assert status == 400 and "guided_regex and regex are both given" in error["message"]


def test_an_adapter_is_a_model(server):
    answer = server.client.post(CHAT, json={"model": "threes", "messages": SUM, "temperature": 0})
    assert answer.json()["choices"][0]["message"]["content"].endswith("48")
    cards = server.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["demo", "threes"]
    assert cards[1]["parent"] == "demo"


def test_a_last_message_of_the_assistant_is_continued(server):
    messages = [*SUM, {"role": "assistant", "content": "12 + 35 = "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = server.post(CHAT, temperature=0, **body).json()
    assert answer["choices"][0]["message"]["content"] == "47"


# Completions.


def test_prompts_are_continued_each_with_its_index(server):
    body = {"prompt": ["1+1=", "2+2=", "3+4="], "max_tokens": 4, "temperature": 0}
    answer = server.post(COMPLETIONS, **body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[1:] == ["4", "7"]
    streamed = ["", "", ""]
    for event in server.events(COMPLETIONS, **body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    assert len(server.post(COMPLETIONS, n=2, **body).json()["choices"]) == 6


def test_ids_are_prompts(server, model):
    ids = model.tokenizer.encode("2+2=")
    for prompt in (ids, [ids]):
        answer = server.post(COMPLETIONS, prompt=prompt, max_tokens=4, temperature=0).json()
        assert answer["choices"][0]["text"] == "4"


def test_the_prompts_of_a_request_are_bounded(server):
    answer = server.post(COMPLETIONS, prompt=["1"] * 1024, max_tokens=1).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(1024))
    for prompts in (["1"] * 1025, []):
        status, error = error_of(server.post(COMPLETIONS, prompt=prompts, max_tokens=1))
        assert (status, error["param"]) == (400, "prompt")
        assert f"prompt has {len(prompts)} entries; it must have 1 to 1024" in error["message"]


def test_echo_with_log_probabilities(server, model):
    body = {"prompt": "A ResultQueue is", "max_tokens": 2, "echo": True, "logprobs": 1}
    (choice,) = server.post(COMPLETIONS, temperature=0, **body).json()["choices"]
    rows = choice["logprobs"]
    assert choice["text"].startswith("A ResultQueue is")
    tokens = rows["tokens"]
    assert "".join(tokens) == choice["text"]
    assert rows["token_logprobs"][0] is None and max(rows["token_logprobs"][1:]) <= 0
    assert rows["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    body["max_tokens"] = 0
    (scored,) = server.post(COMPLETIONS, **body).json()["choices"]
    assert scored["text"] == "A ResultQueue is"
    expected = model.engine.score("demo", model.loader, "A ResultQueue is")[0].logprobs
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(expected)


@pytest.fixture
def made_rows(monkeypatch):
    """How many log-probabilities were made at a time, and on which threads."""
    found = []
    make_chat, make_completion = chat.chat_rows, CompletionRows.rows

    def of_chat(tokenizer, ids, *others):
        found.append((len(ids), threading.current_thread()))
        return make_chat(tokenizer, ids, *others)

    def of_completion(self, ids, *others):
        found.append((len(ids), threading.current_thread()))
        return make_completion(self, ids, *others)

    monkeypatch.setattr(chat, "chat_rows", of_chat)
    monkeypatch.setattr(CompletionRows, "rows", of_completion)
    return found


def test_log_probabilities_hold_up_nobody(server, made_rows, monkeypatch):
    """Of a whole answer they are made on a thread, of a stream a few at a time."""
    monkeypatch.setattr(chat, "MOST_ROWS", 2)
    monkeypatch.setattr(completion, "MOST_ROWS", 2)
    same = {"n": 3, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    of_chat = {"messages": SUM, "logprobs": True, "top_logprobs": 3, **same}
    of_completion = {"prompt": ["A queue is", "1+1="], "logprobs": 3, "echo": True, **same}
    for path, body in ((CHAT, of_chat), (COMPLETIONS, of_completion)):
        made_rows.clear()
        whole = server.post(path, **body).json()["choices"]
        assert made_rows and all(thread is not server._thread for _, thread in made_rows)
        made_rows.clear()
        events = server.events(path, **body)
        assert max(count for count, _ in made_rows) <= 2
        for choice in whole:
            own = parts_of(events, choice)
            assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
            if path == COMPLETIONS:
                assert "".join(each["text"] for each in own) == choice["text"]
            found = [each["logprobs"] for each in own if each["logprobs"]]
            for name, values in choice["logprobs"].items():
                assert values is None or sum((each[name] for each in found), []) == values


def test_a_prompt_of_ids_is_echoed(server, model):
    ids = model.tokenizer.encode("2+2=")
    body = {"prompt": [ids, ids], "echo": True, "max_tokens": 4, "temperature": 0}
    choices = server.post(COMPLETIONS, **body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["2+2=4"] * 2
    for wrong in (-1, 1 << 40):
        status, error = error_of(server.post(COMPLETIONS, prompt=[wrong], echo=True))
        assert (status, error["param"]) == (400, "prompt[0]"), error


@pytest.fixture(scope="module")
def infilling(model):
    """A server whose chat template has the capability."""
    template = ChatTemplateConfig("codellama", capability="infilling").chat_template
    with RunningServer([dataclasses.replace(model, template=template)]) as server:
        yield server


def test_what_stands_between_two_texts_is_filled_in(infilling, model):
    expected = model.tokenizer.encode("<PRE> a <SUF>b <MID>")
    for fields in (
        {"prompt": "a<FILL>b"}, {"prompt": "a<FILL>b", "suffix": ""}, {"prompt": "a", "suffix": "b"}
    ):  # fmt: skip
        answer = infilling.post(COMPLETIONS, **fields, return_token_ids=True).json()
        assert answer["choices"][0]["prompt_token_ids"] == expected


@pytest.mark.parametrize(
    "path, fields, param, message",
    [
        (COMPLETIONS, {"prompt": "a<FILL>b<FILL>c"}, "prompt",
         "prompt[0]: prompt has <FILL> 2 times"),
        (COMPLETIONS, {"prompt": ["a", "<FILL><FILL>"]}, "prompt", "prompt[1]: "),
        (COMPLETIONS, {"prompt": "a", "suffix": "b<FILL>"}, "suffix",
         "suffix has <FILL>, whose place is in the prompt"),
        (COMPLETIONS, {"prompt": "a<FILL>b", "suffix": "c"}, "suffix",
         "suffix is given, but prompt[0] has <FILL>"),
        ("/v1/encode", {"input": "a", "do_preprocess": True}, "input", "has <FILL> 0 times"),
    ],
)  # fmt: skip
def test_what_cannot_be_filled_in_is_refused(infilling, path, fields, param, message):
    status, error = error_of(infilling.post(path, **fields))
    assert (status, error["param"]) == (400, param) and message in error["message"], error


# Errors.


@pytest.mark.parametrize(
    "fields, status, param, message",
    [
        ({"model": "nobody"}, 404, "model", "'nobody' does not exist; the models here are demo"),
        ({"model": 7}, 400, "model", "should be a valid string; it is 7"),
        ({"messages": None}, 400, "messages", ""),
        ({"messages": []}, 400, "messages", "must have a message"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "messages", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, 400, "messages", "2048"),
        ({"temperature": 2.5}, 400, "temperature", "less than or equal to 2; it is 2.5"),
        ({"temperature": "hot"}, 400, "temperature", "'hot'"),
        ({"top_p": -1}, 400, "top_p", "-1"),
        ({"n": 129}, 400, "n", "128; it is 129"),
        ({"n": 0}, 400, "n", "it is 0"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20; it is 21"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
        ({"stop": ["x"] * 65}, 400, "stop", "65 strings; the bound is 64"),
        ({"stop": ["x", ""]}, 400, "stop[1]", "empty"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "'x'"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias", "101"),
        ({"stop_token_ids": [99999]}, 400, "stop_token_ids", "99999"),
        ({"response_format": {"type": "xml"}}, 400, "response_format", "xml"),
        ({"guided_regex": "("}, 400, "guided_regex", ""),
        ({"max_tokens": 0}, 400, "max_tokens", "it is 0"),
        ({"audio": {"voice": "x"}}, 400, "audio", "audio is not served"),
        ({"moderation": {"model": "x"}}, 400, "moderation", "moderation is not served"),
        ({"modalities": ["audio"]}, 400, "modalities", "only ['text']"),
        ({"chat_template": "{{ x }}"}, 400, "chat_template", "--allow-request-templates"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages",
         "image_url"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(server, fields, status, param, message):
    found, error = error_of(server.post(CHAT, **{"messages": SUM, **fields}))
    assert (found, error["param"]) == (status, param), error
    assert message in error["message"], error
    assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    "data, status, message",
    [
        (b"", 400, "no JSON"),
        (b"{", 400, "no JSON"),
        (b"[]", 400, "must be an object"),
        (b'{"messages": NaN}', 400, "no JSON"),
        (b'{"messages": "\\ud800"}', 400, "no JSON"),
        (b'{"messages": "\xff"}', 400, "no JSON"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, 400, "nested deeper than 100 levels"),
        (b'{"a": ' * 100000, 400, ""),
        (b'{"messages": 1' + b"0" * 5000 + b"}", 400, ""),
    ],
)
def test_what_is_no_body_is_refused(server, data, status, message):
    headers = {"content-type": "application/json"}
    found, error = error_of(server.client.post(CHAT, content=data, headers=headers))
    assert found == status and message in error["message"], error


def test_other_content_and_routes(server):
    status, error = error_of(server.client.post(CHAT, content="x", headers={"content-type": "a/b"}))
    assert (status, error["code"]) == (415, "unsupported_media_type")
    assert error_of(server.client.post("/nowhere"))[0] == 404
    assert error_of(server.client.get(CHAT))[0] == 405


def test_unknown_fields_are_named(server, model):
    response = server.post(CHAT, messages=SUM, max_tokens=1, frobnicate=1, zeta=2)
    assert response.headers["x-allspark-ignored"] == "frobnicate, zeta"
    response = server.post(CHAT, messages=SUM, max_tokens=1, user="u")
    assert "x-allspark-ignored" not in response.headers
    with RunningServer([model], strict_fields=True) as strict:
        status, error = error_of(strict.post(CHAT, messages=SUM, frobnicate=1))
        assert (status, error["param"]) == (400, "frobnicate")


# Limits, keys, the end.


def test_keys_guard_everything_but_health_and_pages(model):
    with RunningServer([model], api_keys=("k1", "k2")) as server:
        get = server.client.get
        assert get("/health").status_code == 200 and get("/").status_code == 200
        for path in ("/v1/models", "/metrics", "/nowhere"):
            status, error = error_of(get(path))
            assert (status, error["code"]) == (401, "invalid_api_key")
        assert error_of(server.post(CHAT, messages=SUM))[0] == 401
        assert get("/metrics").headers["www-authenticate"] == "Bearer"
        both = {"authorization": "Bearer none", "x-api-key": "k1"}
        for headers in ({"authorization": "Bearer k2"}, {"x-api-key": "k1"}, both):
            assert get("/v1/models", headers=headers).status_code == 200
        assert get("/v1/models", headers={"authorization": "Bearer k"}).status_code == 401


def test_sizes_are_bounded(model):
    with RunningServer([model], max_body_bytes=1000, max_header_bytes=2000) as server:
        status, error = error_of(server.post(CHAT, messages="x" * 2000))
        assert status == 413 and "the bound is 1000" in error["message"]

        def pieces():
            yield b"{" + b" " * 2000

        headers = {"content-type": "application/json"}
        assert error_of(server.client.post(CHAT, content=pieces(), headers=headers))[0] == 413
        response = server.client.get("/health", headers={"x-long": "y" * 3000})
        assert error_of(response)[0] == 431


def test_parts_of_a_request_are_bounded(model):
    schema = {"type": "object", "description": "x" * 200}
    tool = {"type": "function", "function": {"name": "t", "parameters": schema}}
    bounds = {"max_schema_bytes": 99, "max_tools": 1, "max_stops": 2}
    with RunningServer([model], **bounds, tool_call_parser="qwen") as server:
        for path, fields, param, message in (
            (CHAT, {"guided_json": schema}, "guided_json", "bytes as JSON; the bound is 99"),
            (CHAT, {"structured_outputs": {"json": schema}}, "structured_outputs", "is 99"),
            (CHAT, {"response_format": {"type": "json_schema", "json_schema": schema}},
             "response_format", "the bound is 99"),
            (CHAT, {"tools": [tool]}, "tools[0].function.parameters", "has 234 bytes as JSON"),
            (CHAT, {"tools": [tool, tool]}, "tools", "tools has 2 entries; the bound is 1"),
            (CHAT, {"stop": ["a", "b", "c"]}, "stop", "stop has 3 strings; the bound is 2"),
            (COMPLETIONS, {"regex": "a" * 98}, "regex", "regex has 100 bytes"),
            (COMPLETIONS, {"stop": ["a"] * 3}, "stop", "the bound is 2"),
        ):
            prompt = {"messages": SUM} if path == CHAT else {"prompt": "x"}
            status, error = error_of(server.post(path, **prompt, **fields))
            assert (status, error["param"]) == (400, param), error
            assert message in error["message"], error
        fields = {"regex": "a" * 97, "max_tokens": 2, "stop": ["x", "y"]}
        assert server.post(COMPLETIONS, prompt="x", **fields).status_code == 200


def test_compiling_a_schema_is_bounded(model):
    slow = {"messages": SUM, "regex": "(a|b|c|d|e|f){1,2000}x[0-9]{1,1000}", "max_tokens": 4}
    with RunningServer([model], schema_timeout=1e-9) as server:
        status, error = error_of(server.post(CHAT, **slow))
        assert status == 400 and "takes more than 1e-09 s to compile" in error["message"], error
    with RunningServer([model]) as server:
        assert server.post(CHAT, **slow).status_code == 200


@pytest.fixture
def slow_compiling(monkeypatch):
    """Every format compiles until the event is set."""
    go_on, compile_it = threading.Event(), Compiler._compile

    def compile_late(self, response_format):
        assert go_on.wait(100)
        return compile_it(self, response_format)

    monkeypatch.setattr(Compiler, "_compile", compile_late)
    yield go_on
    go_on.set()


NAMED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("fields", [{"regex": "a"}, {"tools": [NAMED], "tool_choice": "required"}])
def test_slow_schemas_hold_up_no_other_work(tool_model, slow_compiling, fields):
    """There are more of them than asyncio has threads. The end waits for none."""
    with (
        RunningServer([tool_model], tool_call_parser="qwen") as server,
        contextlib.ExitStack() as clients,
    ):
        for _ in range(40):
            body = post(CHAT, messages=SUM, max_tokens=1, **fields)
            clients.enter_context(Raw(server.port)).send(body)
        wait_until(lambda: server.server.state.num_running >= 40 and is_working(), 20)
        assert server.client.post("/tokenize", json={"prompt": "x" * 5000}, timeout=20).is_success
        server.server.stop()
        server.server.stop()
        server._thread.join(20)
        assert not server._thread.is_alive() and is_working()


@pytest.mark.parametrize("name", ["max_tools", "request_timeout", "max_sessions", "server_port"])
def test_bounds_are_not_negative(name):
    with pytest.raises(ValueError, match=f"{name} is -1; it must be at least 0"):
        ServerSettings(**{name: -1})
    with pytest.raises(ValueError, match="schema_timeout is 0; it must be more than 0"):
        ServerSettings(schema_timeout=0)


def test_request_ids_are_taken_or_made(server):
    def answered(given):
        response = server.client.get("/health", headers={"x-request-id": given})
        return response.headers["x-request-id"]

    assert answered("abc-1.2:3") == "abc-1.2:3"
    for bad in ("a b", "x" * 129, "<script>"):
        assert answered(bad) != bad and len(answered(bad)) == 32


def stream(server, **fields):
    """A stream; leaving it closes the connection."""
    body = {"model": "demo", "messages": SUM, "ignore_eos": True, "stream": True, **fields}
    return server.client.stream("POST", CHAT, json=body)


def test_a_client_that_goes_away_ends_its_request(server, model):
    for fields in ({}, {"n": 3}):
        with paused(model):
            with stream(server, **fields) as response:
                parts = response.iter_bytes()  # dropped, it would close the connection
                next(parts)
                wait_for_requests(model, fields.get("n", 1))
            wait_for_requests(model, 0)
    with paused(model):
        with Raw(server.port).send(post(CHAT, messages=SUM, ignore_eos=True)):
            wait_for_requests(model, 1)
        wait_for_requests(model, 0)
    # While its tokens come, too.
    with stream(server, n=8) as response:
        parts = response.iter_bytes()
        next(parts)
    wait_for_requests(model, 0)


def test_beyond_the_bound_requests_are_sent_away(model):
    with RunningServer([model], max_concurrent_requests=1) as server:
        with paused(model), stream(server) as response:
            parts = response.iter_bytes()
            next(parts)
            with httpx.Client(base_url=server.client.base_url, timeout=60) as other:
                refused = other.post(CHAT, json={"model": "demo", "messages": SUM})
                assert error_of(refused)[0] == 429 and refused.headers["retry-after"] == "1"
                assert other.get("/health").status_code == 200


def test_a_shutdown_lets_running_requests_end(model):
    with RunningServer([model]) as server, contextlib.ExitStack() as stack:
        with paused(model):
            response = stack.enter_context(stream(server, max_tokens=20))
            lines = response.iter_lines()
            next(lines)
            server.server.stop()
            with httpx.Client(base_url=server.client.base_url, timeout=60) as other:
                wait_until(lambda: other.get("/health").status_code == 503)
                refused = other.post(CHAT, json={"model": "demo", "messages": SUM})
                assert error_of(refused)[0] == 503 and "retry-after" in refused.headers
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_second_stop_ends_at_once(model):
    with RunningServer([model]) as server, paused(model):
        begin = time.monotonic()
        with stream(server) as response:
            parts = response.iter_bytes()
            next(parts)
            server.server.stop()
            server.server.stop()
            with pytest.raises(httpx.HTTPError):
                for _ in parts:
                    pass
        assert time.monotonic() - begin < 20
        wait_for_requests(model, 0)


def test_a_slow_reader_gets_everything(model):
    """Tokens wait as text while the client does not read, and come in few events."""
    fields = {"messages": SUM, "ignore_eos": True, "max_tokens": 1500, "temperature": 0}
    with RunningServer([model], send_buffer=4096) as server:
        expected = server.post(CHAT, **fields).json()["choices"][0]["message"]["content"]
        with Raw(server.port, receive_buffer=4096) as raw:
            with paused(model):
                assert raw.send(post(CHAT, **fields, stream=True)).head().status == 200
                wait_for_requests(model, 1)
            wait_for_requests(model, 0)
            events = b"".join(iter(raw.chunk, b"")).decode().split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == expected
    # The buffers of both sides and the 64 KiB of the event loop hold the first few hundred tokens,
    # each in an event of some 200 bytes; all others came in one.
    assert len(events) < 1500 / 2


def test_a_quiet_stream_is_kept_alive(model):
    with RunningServer([model], keep_alive_interval=0.2) as server:
        with paused(model), stream(server) as response:
            data = b""
            for part in response.iter_raw():
                data += part
                if data.count(b": keep-alive\n\n") == 2:
                    break


def test_metrics(server):
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE" in response.text and "demo" in response.text
