"""The OpenAPI document: complete, well made, and what the server does."""

from __future__ import annotations

import functools
import json
import re

import pytest

pytest.importorskip("fastapi")
jsonschema = pytest.importorskip("jsonschema")

from allspark.serve.protocol import answers  # noqa: E402
from support.chats import SUM  # noqa: E402
from support.http_server import CHAT, COMPLETIONS, RunningServer, paused  # noqa: E402

RESPONSES = "/v1/responses"
RESPONSE = "/v1/responses/{response_id}"
FILE = "/v1/files/{file_id}"
BATCH = "/v1/batches/{batch_id}"
WITHOUT_BODY = {"/sleep", "/wakeup", f"{RESPONSE}/cancel", f"{BATCH}/cancel"}
STREAMED = {CHAT, COMPLETIONS, RESPONSES, "/v1/messages", "/v1/chat/interactive", "/generate"}
STREAMED = {("post", path) for path in STREAMED} | {("get", RESPONSE)}


@pytest.fixture(scope="module")
def document(server):
    return server.client.get("/openapi.json").json()


def operations(document):
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def parts(value):
    """The value, and everything in it."""
    yield value
    children = value.values() if isinstance(value, dict) else value
    for child in children if isinstance(value, (dict, list)) else ():
        yield from parts(child)


def test_every_route_is_described(document):
    tags = {tag["name"] for tag in document["tags"]}
    for path, method, operation in operations(document):
        assert operation["summary"] and set(operation["tags"]) <= tags, path
        content = operation["responses"]["200"]["content"]
        assert all(each["schema"] for each in content.values()), path
        assert ("text/event-stream" in content or "application/x-ndjson" in content) == (
            (method, path) in STREAMED
        )
        errors = [code for code in operation["responses"] if code != "200"]
        if method == "post" and path not in WITHOUT_BODY:
            (body,) = operation["requestBody"]["content"].values()
            assert body["schema"]["properties"], path
            assert {"400", "401", "404", "413", "415", "429", "503"} <= set(errors), path
        assert errors and "422" not in errors, path
        for code in errors:
            (found,) = operation["responses"][code]["content"].values()
            kind = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            expected = {"$ref": f"#/components/schemas/{kind}"}
            assert found["schema"] == expected or path == "/health", (path, code)
    assert "409" in document["paths"]["/v1/chat/interactive"]["post"]["responses"]


def test_the_document_is_well_made(document):
    """The main rules of OpenAPI 3.1."""
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert document["info"]["title"] and document["info"]["version"]
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"\w+", each) for each in ids)
    for path, _, operation in operations(document):
        named = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))
        for code, response in operation["responses"].items():
            assert re.fullmatch(r"[1-5](\d\d|XX)", code) and response["description"]
    for part in parts(document):
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            found = document
            for name in part["$ref"].removeprefix("#/").split("/"):
                found = found[name]
        if isinstance(part, dict) and isinstance(part.get("schema"), dict):
            jsonschema.Draft202012Validator.check_schema(part["schema"])


# A request to each route, with the model of its answer.
REQUESTS = [
    ("/health", None, "Status"),
    ("/v1/models", None, "ModelCards"),
    ("/v1/models/demo", None, "ModelCard"),
    ("/is_sleeping", None, "Sleeping"),
    (CHAT, {"messages": SUM, "max_tokens": 4, "logprobs": True, "return_token_ids": True},
     "ChatCompletion"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 4, "return_token_ids": True}, "TextCompletion"),
    (RESPONSES, {"input": "x", "max_output_tokens": 4}, "ResponseAnswer"),
    ("/v1/responses/input_tokens", {"input": "x"}, "InputTokens"),
    ("/v1/messages", {"messages": SUM, "max_tokens": 4}, "AnthropicAnswer"),
    ("/v1/messages/count_tokens", {"messages": SUM}, "TokenCount"),
    ("/v1/chat/interactive", {"prompt": "x", "request_output_len": 4}, "InteractiveAnswer"),
    ("/v1/embeddings", {"input": ["x", "y"]}, "Embeddings"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "base64"}, "Embeddings"),
    ("/v1/encode", {"input": "x"}, "Encoded"),
    ("/v1/encode", {"input": ["x", "y"]}, "Encoded"),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}, "Tokenized"),
    ("/detokenize", {"tokens": [5, 6]}, "Detokenized"),
    ("/get_ppl", {"input": "a b c"}, "Perplexity"),
    ("/generate", {"prompt": "x", "max_tokens": 4}, "Generated"),
    ("/abort_request", {"abort_all": True}, "Aborted"),
    ("/sleep", {}, "Status"),
    ("/wakeup", {}, "Status"),
]  # fmt: skip


def test_answers_are_as_described(model, server, document):
    asked = set()
    for path, body, name in REQUESTS:
        response = server.client.get(path) if body is None else server.post(path, **body)
        assert response.status_code == 200, response.text
        getattr(answers, name).model_validate(response.json())
        place = path.replace("/demo", "/{name}")
        operation = document["paths"][place]["get" if body is None else "post"]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(response.json(), schema)
        asked.add(place)
    models = server.client.get("/anthropic/v1/models", headers={"anthropic-version": "x"})
    answers.ModelInfos.model_validate(models.json())
    one = server.client.get("/anthropic/v1/models/demo", headers={"anthropic-version": "x"})
    answers.ModelInfo.model_validate(one.json())
    response = server.post(RESPONSES, input="x", max_output_tokens=4, background=True).json()
    line = {"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "x"}}
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
    file, unused = (
        server.client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
        for _ in range(2)
    )
    answers.File.model_validate(file)
    with paused(model):  # so that the batch can be cancelled
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = server.client.post("/v1/batches", json=body).json()
        cancelled = server.client.post(f"/v1/batches/{batch['id']}/cancel").json()
    answers.Batch.model_validate(batch)
    answers.Batch.model_validate(cancelled)
    asked.add(f"{BATCH}/cancel")
    ids = {"{response_id}": response["id"], "{file_id}": unused["id"], "{batch_id}": batch["id"]}
    for method, path, name in (
        ("get", "/v1/batches", "Batches"),
        ("get", BATCH, "Batch"),
        ("get", "/v1/files", "Files"),
        ("get", FILE, "File"),
        ("delete", FILE, "DeletedFile"),
        ("post", f"{RESPONSE}/cancel", "ResponseAnswer"),
        ("get", RESPONSE, "ResponseAnswer"),
        ("get", f"{RESPONSE}/input_items", "InputItems"),
        ("delete", RESPONSE, "DeletedResponse"),
    ):
        place = functools.reduce(lambda text, pair: text.replace(*pair), ids.items(), path)
        found = server.client.request(method, place)
        assert found.status_code == 200, found.text
        getattr(answers, name).model_validate(found.json())
        described = document["paths"][path][method]["responses"]["200"]["content"]
        jsonschema.validate(found.json(), described["application/json"]["schema"])
        asked.add(path)
    others = {f"{FILE}/content", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    others |= {path for path in document["paths"] if path.startswith("/anthropic/")}
    assert asked | others == set(document["paths"])


def test_errors_are_as_described(server, document):
    for path, name in ((CHAT, "Error"), ("/v1/messages", "AnthropicError")):
        body = server.post(path, messages=7).json()
        getattr(answers, name).model_validate(body)
        jsonschema.validate(body, document["components"]["schemas"][name])


def test_keys_are_named_where_they_are_asked_for(model, document):
    assert "securitySchemes" not in document["components"]
    with RunningServer([model], api_keys=("k",)) as server:
        found = server.client.get("/openapi.json").json()
    assert set(found["components"]["securitySchemes"]) == {"bearer", "header"}
    for path, _, operation in operations(found):
        assert ("security" in operation) == (path != "/health"), path


def test_the_page_can_be_left_out(model):
    with RunningServer([model], disable_docs=True) as server:
        for path in ("/", "/openapi.json"):
            assert server.client.get(path).status_code == 404
