"""The server's routes about texts: embeddings, token ids, scores, /generate."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

pytest.importorskip("fastapi")

from support.http_server import CHAT, COMPLETIONS, RunningServer, error_of, paused  # noqa: E402
from support.waiting import num_requests  # noqa: E402


def test_embeddings(server, model):
    texts = ["What is 12+35?", "A ResultQueue"]
    expected = model.engine.embed("demo", model.loader, texts)
    answer = server.post("/v1/embeddings", input=texts).json()
    assert answer["object"] == "list" and answer["usage"]["prompt_tokens"] > 4
    found = np.array([each["embedding"] for each in answer["data"]], np.float32)
    np.testing.assert_array_equal(found, expected)
    answer = server.post("/v1/embeddings", input=texts[0], encoding_format="base64").json()
    data = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(data, np.float32), expected[0])
    ids = model.tokenizer.encode(texts[1])
    for given in (ids, [ids]):
        answer = server.post("/v1/embeddings", input=given, pooling="mean").json()
        assert np.array(answer["data"][0]["embedding"], np.float32).tolist() == expected[1].tolist()


def test_ids_of_texts(server, model):
    ids = model.tokenizer.encode("12+35")
    assert server.post("/v1/encode", input="12+35").json() == {"input_ids": ids, "length": len(ids)}
    answer = server.post("/v1/encode", input=["12+35", "x"]).json()
    assert answer["input_ids"][0] == ids and len(answer["length"]) == 2
    chat = server.post("/v1/encode", input="12+35", do_preprocess=True).json()
    assert chat["length"] > len(ids)
    answer = server.post("/tokenize", prompt="12+35", return_token_strs=True).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == 2048 and len(answer["token_strs"]) == len(ids)
    messages = [{"role": "user", "content": "12+35"}]
    assert server.post("/tokenize", messages=messages).json()["tokens"] == chat["input_ids"]
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "12+35"}


def test_perplexity(server, model):
    text = "A ResultQueue is the queue a request gives back."
    (expected,) = model.engine.get_ppl("demo", model.loader, text)
    assert server.post("/get_ppl", input=text).json()["ppl"] == pytest.approx(expected)
    ids = model.tokenizer.encode(text)
    assert server.post("/get_ppl", input=ids).json()["ppl"] == pytest.approx(expected)


def test_generate(server, model):
    fields = {"max_tokens": 6, "temperature": 0, "return_logprob": True}
    whole = server.post("/generate", prompt="2+2=", **fields).json()
    info = whole["meta_info"]
    assert whole["text"] == "4" and info["finish_reason"] == {"type": "stop"}
    count = info["completion_tokens"]
    assert count == len(whole["output_ids"]) == len(info["output_token_logprobs"])
    ids = model.tokenizer.encode("2+2=")
    assert server.post("/generate", input_ids=ids, **fields).json() == whole
    events = server.events("/generate", prompt="2+2=", **fields)
    assert "".join(event["text"] for event in events) == "4"
    assert sum((event["output_ids"] for event in events), []) == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop"}


def test_a_request_ends_with_its_time(model):
    """Of an output what there is is the answer; of a score or an embedding there is no part."""
    with RunningServer([model], request_timeout=0.2) as server, paused(model):
        for path, fields in ((CHAT, {"messages": "x"}), (COMPLETIONS, {"prompt": "x"})):
            for timeout_ms in (0, 10**6):  # a request may ask for less alone
                answer = server.post(path, **fields, timeout_ms=timeout_ms).json()
                (choice,) = answer["choices"]
                assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
        for path, given in (("/v1/embeddings", ["x"] * 20), ("/get_ppl", "x y z")):
            status, error = error_of(server.post(path, input=given))
            assert (status, error["code"]) == (504, "deadline")
            assert error["message"] == "the request took more than 0.2 s (--request-timeout)"
        assert num_requests(model) == 0


@pytest.mark.parametrize(
    "path, fields, param, message",
    [
        ("/v1/embeddings", {"input": []}, "input", "input has 0 entries; it must have 1 to 2048"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "has no tokens"),
        ("/v1/embeddings", {"input": "x " * 4000}, "input", "the model's length is 2048"),
        ("/v1/embeddings", {"input": [99999]}, None, "99999"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4}, "dimensions", "not served"),
        ("/v1/embeddings", {"input": "a", "pooling": "max"}, "pooling", "'max'"),
        ("/v1/encode", {}, "input", "input is missing"),
        ("/tokenize", {}, "prompt", "one of them must be given"),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages", "[0].content"),
        ("/detokenize", {"tokens": [1, 5000]}, "tokens[1]", "tokens[1] is 5000"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "-1"),
        ("/get_ppl", {"input": [1]}, "input", "input has 1 tokens; a score needs 2"),
        ("/generate", {"prompt": "a", "input_ids": [1]}, "prompt", "one of them"),
        ("/generate", {"prompt": "a", "image_data": "x"}, "image_data", "image_data is not served"),
        ("/generate", {"prompt": "a", "n": 2}, "n", "n is 2; it must be 1"),
    ],
)
def test_wrong_fields_are_named(server, path, fields, param, message):
    status, error = error_of(server.post(path, **fields))
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"]
    assert json.dumps(error)
