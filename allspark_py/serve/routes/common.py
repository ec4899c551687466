"""What routes share: answers as JSON, and bodies in the OpenAPI document."""

from __future__ import annotations

from typing import Any

import orjson
from allspark.serve.protocol.common import RequestBody
from fastapi import Response


class Json(Response):
    """An answer of bytes that orjson makes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def ignored_header(names: str) -> dict[str, str]:
    """The header that names fields of a request that this server does not know."""
    return {"x-allspark-ignored": names} if names else {}


def body_of(model: type[RequestBody]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    schema = model.model_json_schema(ref_template="{model}")
    parts = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, parts)}}
    return {"requestBody": {"content": content, "required": True}}


def _inlined(value: Any, parts: dict[str, Any]) -> Any:
    """A schema with its parts in the places of their names: the document has no list of them. No
    part holds itself."""
    if isinstance(value, list):
        return [_inlined(each, parts) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(parts[value["$ref"]], parts)
    return {key: _inlined(each, parts) for key, each in value.items()}
