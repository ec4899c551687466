"""The OpenAPI document: what all routes have in common is added to what each says of itself."""

from __future__ import annotations

import re
from typing import Any

from allspark.serve.http import OPEN_ROUTES, is_anthropic
from allspark.serve.protocol.answers import AnthropicError, Error
from allspark.serve.routes.common import schema_of
from fastapi import FastAPI

# Status -> when it comes, as docs/server.md has it.
_ANY = {
    "401": "the key is missing or wrong",
    "431": "the headers are too large",
    "500": "a failure",
}
_OF_BODIES = {
    "400": "a field is wrong, the prompt is too long, a format is refused, the body is no JSON",
    "404": "there is no such model",
    "413": "the body is too large",
    "415": "the body is no JSON",
    "429": "too many requests run or wait; Retry-After says when to come back",
    "503": "the server shuts down, or the models sleep",
}
_TAGS = {
    "OpenAI": "Conversations and texts, with the protocol of OpenAI.",
    "Anthropic": "Conversations, with the protocol of Anthropic.",
    "LMDeploy": "Conversations that the server keeps.",
    "texts": "Embeddings, scores and token ids.",
    "batches": "Files of requests, answered below all others.",
    "management": "Memory, requests and adapters of a server that runs.",
    "server": "What a server says of itself.",
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def complete_document(app: FastAPI, has_keys: bool) -> None:
    """Makes the application's document the complete one."""
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(_completed(FastAPI.openapi(app), has_keys))
        return made

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any], has_keys: bool) -> dict[str, Any]:
    used = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            used.update(operation.get("tags", ()))
            _complete(path, method, operation)
            if has_keys and path not in OPEN_ROUTES:
                operation["security"] = [{name: []} for name in _KEYS]
    document["components"] = {
        "schemas": {"Error": schema_of(Error), "AnthropicError": schema_of(AnthropicError)}
    }
    if has_keys:
        document["components"]["securitySchemes"] = _KEYS
    document["tags"] = [
        {"name": name, "description": text} for name, text in _TAGS.items() if name in used
    ]
    return document


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    operation["operationId"] = f"{method}_" + "_".join(re.findall(r"\w+", path))
    first, _, rest = operation.pop("description", "").partition(". ")
    operation["summary"] = " ".join(first.split()).removesuffix(".")
    if rest:
        operation["description"] = " ".join(rest.split())
    responses = operation["responses"]
    responses.pop("422", None)  # the framework's own errors: no route gives them
    content = responses["200"].get("content", {})
    if len(content) > 1 and not content.get("application/json", {}).get("schema"):
        content.pop("application/json", None)
    kind = "AnthropicError" if is_anthropic({"path": path, "headers": ()}) else "Error"
    schema = {"$ref": f"#/components/schemas/{kind}"}
    errors = dict(_ANY) if path not in OPEN_ROUTES else {}
    if "requestBody" in operation:
        errors.update(_OF_BODIES)
    elif "{" in path:
        errors.update({"400": "a parameter is wrong", "404": "there is none of this name"})
    elif path == "/wakeup":
        errors["503"] = "there is no memory"
    elif path == "/health":
        errors["503"] = "the server shuts down"
    errors.update({"4XX": "another fault of the request", "5XX": "a failure"})
    for status, text in errors.items():
        responses.setdefault(status, {"description": text})
    for status, response in responses.items():
        if status == "503" and path == "/health":
            response["content"] = responses["200"]["content"]
        elif status != "200":
            response["content"] = {"application/json": {"schema": schema}}
    operation["responses"] = dict(sorted(responses.items()))
