"""Fields of requests: none is dropped unseen, and no constraint is."""

from __future__ import annotations

import dataclasses
import json
import logging
import re

import pytest

pytest.importorskip("fastapi")

from allspark.serve import field_names  # noqa: E402
from allspark.serve.protocol.common import FORMAT_FIELDS, ChatBody  # noqa: E402
from support.chats import SUM  # noqa: E402
from support.http_server import CHAT, COMPLETIONS, RunningServer, error_of  # noqa: E402

MAX_SEED = 9_200_000_000_000_000_000
ONE = {"type": "json_schema", "json_schema": {"const": 1}}
TREE = {"format": {"type": "tag", "begin": "<a>", "content": ONE, "end": "</a>"}}
GENERATE, INTERACTIVE, RESPONSES = "/generate", "/v1/chat/interactive", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
# The routes that generate by the fields of GenerationBody, with a prompt and a length.
PROMPTS = {
    CHAT: {"messages": SUM, "max_tokens": 9},
    COMPLETIONS: {"prompt": "x", "max_tokens": 9},
    GENERATE: {"prompt": "x", "max_tokens": 9},
    INTERACTIVE: {"prompt": "x", "request_output_len": 9},
    RESPONSES: {"input": "x", "max_output_tokens": 9},
}
ALL_PROMPTS = {**PROMPTS, MESSAGES: {"messages": SUM, "max_tokens": 9}}
# The output is 1, by each name of a format.
FORMATS = {
    "response_format": ONE,
    "structured_outputs": {"regex": "1"},
    "guided_json": {"const": 1},
    "guided_regex": "1",
    "guided_choice": ["1"],
    "guided_grammar": 'root ::= "1"',
    "structural_tag": {"format": {"type": "const_string", "value": "1"}},
    "json_schema": {"const": 1},
    "regex": "1",
    "ebnf": 'root ::= "1"',
    "grammar": 'start: "1"',
}


def text_of(path, answer):
    """The text of an answer of PROMPTS."""
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    if path == COMPLETIONS:
        return answer["choices"][0]["text"]
    if path == RESPONSES:
        return answer["output"][0]["content"][0]["text"]
    return answer["text"]


@pytest.mark.parametrize("name", FORMAT_FIELDS)
def test_no_route_drops_a_format(server, name):
    for path, prompt in PROMPTS.items():
        answer = server.post(path, **prompt, **{name: FORMATS[name]})
        assert answer.status_code == 200, answer.text
        assert text_of(path, answer.json()) == "1", path
    for value in (FORMATS[name], {}, ""):
        status, error = error_of(server.post(MESSAGES, **ALL_PROMPTS[MESSAGES], **{name: value}))
        assert (status, error["message"]) == (400, f"{name} is not served")


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
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"early_stopping": False}, "early_stopping"),
    ],
)
def test_what_binds_the_output_is_not_dropped(server, fields, param):
    for path, prompt in ALL_PROMPTS.items():
        if (path, param) == (GENERATE, "input_ids"):  # which is its prompt
            continue
        status, error = error_of(server.post(path, **prompt, **fields))
        assert (status, error["message"]) == (400, f"{param} is not served"), path
        if path != MESSAGES:
            assert (error["param"], error["code"]) == (param, "unsupported_feature")


def test_formats_of_another_protocol_are_not_dropped(server):
    schema = {"type": "json_schema", "schema": {"const": 1}}
    for name, value in (("output_format", schema), ("output_config", {"format": schema})):
        for path, prompt in PROMPTS.items():
            status, error = error_of(server.post(path, **prompt, **{name: value}))
            assert (status, error["message"]) == (400, f"{name} is not served"), path
    body = {"messages": SUM, "structured_outputs": {"jsonschema": {}, "whitespace_pattern": " "}}
    status, error = error_of(server.post(CHAT, **body))
    assert (status, error["param"]) == (400, "structured_outputs.whitespace_pattern")


def test_each_field_of_the_engine_is_served_or_refused(server, repo_root):
    text = (repo_root / "docs" / "generation.md").read_text()
    (fields,) = re.findall(r"^## Fields\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    names = re.findall(r"^\| `([a-z_]+)` \|", fields, re.MULTILINE)
    assert len(names) > 50
    refused = [name for name in names if name not in ChatBody.model_fields]
    assert {"prompt_only", "output_logits", "max_new_tokens", "early_stopping"} <= set(refused)
    for name in refused:
        status, error = error_of(server.post(CHAT, messages=SUM, **{name: 1}))
        assert (status, error["param"], error["message"]) == (400, name, f"{name} is not served")


def test_what_asks_for_nothing_is_taken(server):
    empty = {"allowed_token_ids": [], "guided_json_object": False, "structured_outputs": {}}
    answer = server.post(CHAT, messages=SUM, max_tokens=1, **empty)
    assert answer.status_code == 200
    assert answer.headers["x-allspark-ignored"] == "allowed_token_ids, guided_json_object"
    known = {"guided_decoding_backend": "x", "mm_processor_kwargs": {}, "media_io_kwargs": {}}
    known["prompt_cache_options"] = {"mode": "explicit", "ttl": "30m"}
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
    for path, prompt in PROMPTS.items():
        status, error = error_of(server.post(path, **prompt, **fields))
        shown = param
        if path == RESPONSES and param == "response_format":
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


# What reaches the engine.

# Fields of the same name and value there.
SAME = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 3, "typical_p": 1.0, "min_p": 0.1,
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4,
    "suppress_repetition_in_generation": True, "seed": 7, "stop_token_ids": [5],
    "stop_words_ids": [[5, 6]], "bad_words": ["x"], "bad_words_ids": [[7, 8]],
    "ignore_eos": True, "max_length": 60, "min_length": 5, "min_new_tokens": 2,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "priority": 3,
    "timeout_ms": 9000, "no_repeat_ngram_size": 4, "logprobs_mode": "raw",
    "prompt_lookup_num_tokens": 2, "use_draft_model": False, "length_penalty": 0.5,
    "beam_early_stopping": "never",
}  # fmt: skip
# What others become.
OTHERS = [
    ({"min_tokens": 3}, {"min_new_tokens": 3}),
    ({"min_tokens": 30}, {"min_new_tokens": 9}),  # as many as there may be
    ({"logit_bias": {"5": 1.5}}, {"logit_bias": {5: 1.5}}),
    ({"repetition_ngram_size": 2, "repetition_ngram_threshold": 4},
     {"repetition_ngram_size": 2, "repetition_ngram_threshold": 4}),
    ({"stop": ["x", "y"]}, {"stop_words": ["x", "y"]}),
    ({"stop": "x"}, {"stop_words": ["x"]}),
    ({"bad_token_ids": [5, 6], "bad_words_ids": [[7, 8]]}, {"bad_words_ids": [[7, 8], [5], [6]]}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"temperature": 0}, {"temperature": 0, "do_sample": False}),
    ({"do_sample": False}, {"temperature": 0.7, "do_sample": False}),
    ({"best_of": 3, "temperature": 0}, {"best_of": 3, "do_sample": True}),
    ({"num_beams": 3}, {"num_beams": 3, "do_sample": False, "prompt_lookup_num_tokens": 0}),
]  # fmt: skip


@pytest.mark.parametrize(
    "fields, expected",
    [*(({name: value}, {name: value}) for name, value in SAME.items()), *OTHERS],
    ids=lambda fields: "-".join(fields),
)
def test_a_field_reaches_the_engine(server, started, fields, expected):
    for path, prompt in PROMPTS.items():
        if path == INTERACTIVE and expected.get("temperature") == 0.7:
            continue  # it has another one
        answer = server.post(path, **prompt, **fields)
        assert answer.status_code == 200, answer.text
        assert {name: started[-1].get(name) for name in expected} == expected, path


def test_what_a_request_does_not_say_is_not_said(server, started):
    for path, prompt in PROMPTS.items():
        server.post(path, **prompt)
        shown = {name for name, value in SAME.items() if started[-1].get(name) == value}
        assert not shown, path


def test_embeddings_reach_the_engine(server, started):
    server.post(EMBEDDINGS, input="x")
    server.post(EMBEDDINGS, input="x", pooling="last", normalize=False, priority=3)
    found = [[each[name] for name in ("pooling", "normalize", "priority")] for each in started]
    assert found == [["mean", True, 0], ["last", False, 3]]


def test_the_model_and_the_server_have_defaults(server, model, started):
    """A request comes first, then the server, then the model, then the route."""

    def sampling(server, path, **fields):
        server.post(path, **PROMPTS[path], **fields)
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        return [started[-1].get(name) for name in names]

    for path in PROMPTS:
        own = [0.8, 0.8, 40, None] if path == INTERACTIVE else [0.7, 1.0, 40, None]
        assert sampling(server, path) == own
    of_model = {"temperature": 0.3, "top_k": 7, "repetition_penalty": 1.1}
    of_server = {"top_k": 9, "repetition_penalty": 1.3}
    other = dataclasses.replace(model, sampling_defaults=of_model)
    with (
        RunningServer([other]) as plain,
        RunningServer([other], sampling_defaults=of_server) as set_server,
    ):
        for path in PROMPTS:
            top_p = 0.8 if path == INTERACTIVE else 1.0
            assert sampling(plain, path) == [0.3, top_p, 7, 1.1]
            assert sampling(set_server, path) == [0.3, top_p, 9, 1.3]
            asked = {"temperature": 0.5, "top_p": 0.6, "top_k": 5, "repetition_penalty": 1.4}
            assert sampling(set_server, path, **asked) == list(asked.values())


# The best of several outputs.


@pytest.mark.parametrize(
    "fields", [{"best_of": 4, "seed": 3, "temperature": 2, "top_k": 0}, {"num_beams": 4}]
)
def test_the_best_outputs_are_returned(server, model, fields):
    ids = model.tokenizer.encode("A queue")
    config = {**model.request_fields(), "max_new_tokens": 5, **fields}
    config |= {"num_return_sequences": 2, "do_sample": "best_of" in fields}
    _, handles, queues = model.engine.start_request_ids(model.name, model.loader, ids, config)
    expected = [queue.Get().ids_from_generate for queue in queues]
    model.engine.release_request(model.name, handles)
    body = {"prompt": "A queue", "max_tokens": 5, "n": 2, "return_token_ids": True}
    choices = server.post(COMPLETIONS, **body, **fields).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"best_of": 2, "stream": True}, "stream", "it must be false where best_of is 2"),
        ({"num_beams": 2, "stream": True}, "stream", "it must be false where num_beams is 2"),
        ({"best_of": 1, "n": 2}, "best_of", "best_of is 1; it must be at least n, which is 2"),
        ({"num_beams": 2, "n": 3}, "n", "n is 3; it must be at most num_beams, which is 2"),
        ({"num_beams": 2, "best_of": 2}, "best_of", "best_of is 2; it must be 1"),
        ({"num_beams": 2, "do_sample": True}, "do_sample", "it must be false where num_beams is 2"),
        ({"best_of": 2, "regex": "a"}, "regex", "it must not be where best_of is 2"),
        ({"best_of": 2, "stop": "x"}, "stop", "it must be empty where best_of is 2"),
        ({"n": 2, "do_sample": False}, "n", "n is 2; it must be 1 where do_sample is False"),
        ({"typical_p": 0.5}, "typical_p", "typical_p is 0.5; only 1.0 is served"),
    ],
)  # fmt: skip
def test_what_cannot_be_ranked_is_named(server, fields, param, message):
    for path in (CHAT, COMPLETIONS):
        status, error = error_of(server.post(path, **PROMPTS[path], **fields))
        assert (status, error["param"]) == (400, param), error
        assert message in error["message"]
    if "stream" in fields:
        status, error = error_of(server.post(RESPONSES, **PROMPTS[RESPONSES], **fields))
        assert (status, error["param"]) == (400, param), error
