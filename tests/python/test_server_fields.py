"""Fields of requests: none is dropped unseen, and no constraint is."""

from __future__ import annotations

import json
import logging

import pytest

pytest.importorskip("fastapi")

from allspark.serve import field_names  # noqa: E402
from support.http_server import CHAT, COMPLETIONS, RunningServer, error_of  # noqa: E402

SUM = [{"role": "user", "content": "What is 12+35?"}]
MAX_SEED = 9_200_000_000_000_000_000
ONE = {"type": "json_schema", "json_schema": {"const": 1}}
TREE = {"format": {"type": "tag", "begin": "<a>", "content": ONE, "end": "</a>"}}


@pytest.mark.parametrize("text", [False, True])
def test_a_structural_tag_is_a_format_of_its_own_name(server, text):
    tag = json.dumps(TREE) if text else TREE
    for fields in ({"structural_tag": tag}, {"structured_outputs": {"structural_tag": tag}}):
        answer = server.post(CHAT, messages=SUM, max_tokens=40, **fields).json()
        assert answer["choices"][0]["message"]["content"] == "<a>1</a>", fields


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"guided_json_object": True}, "guided_json_object"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_something_new": {"a": 1}}, "guided_something_new"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"sampling_params": {"regex": "a"}}, "sampling_params"),
        ({"image_data": "x"}, "image_data"),
        ({"input_ids": [1]}, "input_ids"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"structured_outputs": {"jsonschema": {}, "whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
    ],
)  # fmt: skip
def test_what_binds_the_output_is_not_dropped(server, fields, param):
    status, error = error_of(server.post(CHAT, messages=SUM, **fields))
    assert (status, error["param"], error["code"]) == (400, param, "unsupported_feature")
    assert error["message"] == f"{param} is not served"


def test_what_asks_for_nothing_is_taken(server):
    empty = {"allowed_token_ids": [], "guided_json_object": False, "structured_outputs": {}}
    answer = server.post(CHAT, messages=SUM, max_tokens=1, **empty)
    assert answer.status_code == 200
    assert answer.headers["x-allspark-ignored"] == "allowed_token_ids, guided_json_object"
    known = {"guided_decoding_backend": "x", "mm_processor_kwargs": {}, "media_io_kwargs": {}}
    answer = server.post(CHAT, messages=SUM, max_tokens=1, **known)
    assert "x-allspark-ignored" not in answer.headers


def test_a_wrong_structural_tag_is_named(server):
    for value, problem in (("{", "no JSON"), ("[]", "a JSON list; it must be an object")):
        status, error = error_of(server.post(CHAT, messages=SUM, structural_tag=value))
        assert (status, error["param"]) == (400, "structural_tag")
        assert problem in error["message"]


def test_unknown_fields_of_parts_are_named_too(server, model):
    options = {"include_usage": True, "include_usages": True}
    body = {"messages": SUM, "max_tokens": 1, "stream": True, "stream_options": options}
    answer = server.post(CHAT, **body, zeta=1)
    assert answer.headers["x-allspark-ignored"] == "zeta, stream_options.include_usages"
    with RunningServer([model], strict_fields=True) as strict:
        status, error = error_of(strict.post(CHAT, **body))
        assert (status, error["param"]) == (400, "stream_options.include_usages")


def test_the_log_names_an_unknown_field_once(server, caplog):
    field_names._logged.clear()
    with caplog.at_level(logging.WARNING, "allspark.serve"):
        for _ in range(3):
            server.post(CHAT, messages=SUM, max_tokens=1, **{"frob\nnicate": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "requests have the unknown field frob\\nnicate, which is ignored"
    ]


def test_tokens_that_must_not_appear(server, model):
    body = {"messages": SUM, "temperature": 0, "return_token_ids": True}
    ids = server.post(CHAT, **body).json()["choices"][0]["token_ids"]
    other = server.post(CHAT, **body, bad_token_ids=[ids[0]], max_tokens=8)
    assert ids[0] not in other.json()["choices"][0]["token_ids"]
    answer = server.post(CHAT, **body, no_repeat_ngram_size=1, ignore_eos=True, max_tokens=20)
    found = answer.json()["choices"][0]["token_ids"]
    assert len(set(found)) == len(found)


def test_a_key_of_logit_bias_that_is_no_id(server):
    for key in ("9" * 5000, "12345678901", "1.0", "-1"):
        status, error = error_of(server.post(CHAT, messages=SUM, logit_bias={key: 1}))
        assert (status, error["param"]) == (400, "logit_bias"), error
        assert len(error["message"]) < 300


def test_messages_without_a_template(server):
    parts = [{"type": "text", "text": "2+2="}]
    body = {"do_preprocess": False, "temperature": 0, "max_tokens": 4}
    texts = [
        server.post(CHAT, messages=[{"role": "user", "content": content}], **body).json()
        for content in ("2+2=", parts)
    ]
    assert texts[0]["choices"] == texts[1]["choices"]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    status, error = error_of(server.post(CHAT, messages=image, **body))
    assert status == 400 and "messages[0].content[0].type" in error["message"]


def test_an_empty_suffix_asks_for_nothing(server):
    assert server.post(COMPLETIONS, prompt="2+2=", suffix="", max_tokens=1).status_code == 200
    assert error_of(server.post(COMPLETIONS, prompt="2+2=", suffix="x"))[1]["param"] == "suffix"


def test_cached_tokens_are_those_of_all_prompts(server):
    prompts = [f"{word} " * 200 for word in ("one", "two", "three")]

    def usage(**fields):
        return server.post(COMPLETIONS, max_tokens=1, **fields).json()["usage"]

    assert usage(prompt="four " * 200, n=3)["prompt_tokens_details"]["cached_tokens"] == 0
    usage(prompt=prompts)
    again = usage(prompt=prompts)
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert 0.6 * again["prompt_tokens"] < cached < again["prompt_tokens"]


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"max_tokens": 1 << 40}, "max_tokens", "max_tokens is 1099511627776; it must be in [0, "),
        ({"max_completion_tokens": 1 << 40}, "max_completion_tokens", "it must be in [0, "),
        ({"top_k": 1 << 31}, "top_k", "top_k is 2147483648; it must be in [0, "),
        ({"seed": MAX_SEED, "n": 2}, "seed", f"seed is {MAX_SEED + 1}"),
        ({"seed": MAX_SEED + 1}, "seed", f"seed: Input should be less than or equal to {MAX_SEED}"),
        ({"bad_words": [""]}, "bad_words[0]", "bad_words[0] is ''"),
        ({"bad_token_ids": [1, 99999]}, "bad_token_ids[1]", "holds 99999"),
        ({"messages": ""}, "messages", "messages have no tokens"),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf are both given; there is one"),
        ({"response_format": {"type": ["x"]}}, "response_format", "has the type ['x']"),
        ({"guided_json": {"type": "x"}}, "guided_json", "guided_json: response_format cannot be"),
        ({"ebnf": "x"}, "ebnf", "ebnf: Failed to convert the grammar"),
        ({"structural_tag": {"a": 1}}, "structural_tag", "has the key 'a'"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "key 'schema'"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs",
         "has json and regex"),
    ],
)  # fmt: skip
def test_what_the_engine_refuses_is_named_as_the_request_has_it(server, fields, param, message):
    status, error = error_of(server.post(CHAT, **{"messages": SUM, **fields}))
    assert (status, error["param"]) == (400, param), error
    assert error["code"] in ("invalid_request", "invalid_value")
    assert message in error["message"], error


def test_the_greatest_seed_is_taken(server):
    assert server.post(CHAT, messages=SUM, max_tokens=1, seed=MAX_SEED).status_code == 200


def test_ids_that_the_engine_refuses_are_named(server):
    for path, fields, param in (
        (COMPLETIONS, {"prompt": [1, 99999]}, "prompt[1]"),
        ("/generate", {"input_ids": [1, 99999]}, "input_ids[1]"),
        ("/v1/chat/interactive", {"prompt": "x", "request_output_len": 1 << 40},
         "request_output_len"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1 << 40}, "max_output_tokens"),
    ):  # fmt: skip
        status, error = error_of(server.post(path, **fields))
        assert (status, error["param"]) == (400, param), error


def test_an_expression_that_fails_late_is_the_requests_fault(server):
    body = {"messages": SUM, "regex": "a{100000}", "max_tokens": 3}
    status, error = error_of(server.post(CHAT, **body))
    assert (status, error["param"]) == (400, "regex")
    assert error["message"].startswith("regex: the grammar failed")
    assert "use shorter repetitions" in error["message"]
    (event,) = [e for e in server.events(CHAT, **body) if "error" in e]
    assert event["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"guided_regex": "abc", "min_tokens": 8}, "guided_regex"),
        ({"guided_regex": "a" * 24, "no_repeat_ngram_size": 1}, "guided_regex"),
        ({"response_format": {"type": "regex", "regex": "abc"}, "bad_token_ids": [67, 68, 69]},
         "response_format"),
        ({"guided_choice": ["x"], "bad_words": ["x"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_a_format_that_other_fields_contradict_is_the_requests_fault(server, fields, param):
    for path, prompt in (
        (CHAT, {"messages": SUM}),
        (COMPLETIONS, {"prompt": "x"}),
        ("/generate", {"prompt": "x"}),
        ("/v1/chat/interactive", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ):
        status, error = error_of(server.post(path, **prompt, **fields))
        shown = param
        if path == "/v1/responses" and param == "response_format":
            shown = "text.format"
        assert (status, error["param"]) == (400, shown), (path, error)
        assert error["message"].startswith(f"{shown}: other fields, such as min_tokens")


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt"])
def test_fields_are_no_variables_of_a_template(server, name):
    for path in (CHAT, "/tokenize"):
        body = {"messages": SUM, "chat_template_kwargs": {name: 1}}
        status, error = error_of(server.post(path, **body))
        assert (status, error["param"]) == (400, "chat_template_kwargs")
        assert f"has {name!r}, which is no variable" in error["message"]
