"""What routes share: answers as JSON, and bodies in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from allspark.serve.field_names import unknown_names
from allspark.serve.places import shown, wrong
from allspark.serve.protocol.common import RequestBody
from fastapi import Request, Response
from pydantic import BaseModel

EVENTS = "text/event-stream"
Item = TypeVar("Item")


class Json(Response):
    """An answer of bytes that orjson makes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def ignored_header(body: RequestBody) -> dict[str, str]:
    """The header that names fields of a request that this server does not know."""
    names = unknown_names(body)
    return {"x-allspark-ignored": names} if names else {}


def number(request: Request, name: str, default: int, least: int, most: int | None) -> int:
    """A parameter of the query. Raises ApiError where it is no whole number, or beyond a bound."""
    text = request.query_params.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) < 19
    if not is_number or int(text) < least or (most is not None and int(text) > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise wrong(name, f"is {shown(text)}; it must be a whole number, {bounds}")
    return int(text)


def in_order(request: Request, items: Sequence[Item]) -> Sequence[Item]:
    """A list as the query's `order` says: the last item first, unless it is asc."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong("order", f"is {shown(order)}; it must be 'asc' or 'desc'")
    return items if order == "asc" else items[::-1]


def page_of(
    request: Request, items: Sequence[Item], id_of: Callable[[Item], str], default: int, most: int
) -> tuple[Sequence[Item], bool]:
    """The part of a list that the query's `after` and `limit` name, and whether there is more.

    Args:
        default, most: of `limit`.
    """
    limit = number(request, "limit", default, 1, most)
    after = request.query_params.get("after")
    if after is not None:
        ids = [id_of(item) for item in items]
        if after not in ids:
            raise wrong("after", f"is {shown(after)}; no item of the list has it")
        items = items[ids.index(after) + 1 :]
    return items[:limit], len(items) > limit


def body_of(model: type[RequestBody]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    content = {"application/json": {"schema": schema_of(model)}}
    return {"requestBody": {"content": content, "required": True}}


def described(
    body: type[RequestBody] | None,
    *answers: type[BaseModel],
    stream: str | None = None,
    errors: Mapping[int, str] | None = None,
    query: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """`openapi_extra` of a route: its body, its answers, the media type of a streamed one, the
    errors that not all routes have, and the type and meaning of each parameter of its query."""
    schemas = [schema_of(model) for model in answers]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream is not None:
        content[stream] = {"schema": {"type": "string", "description": "with stream: its pieces"}}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    responses.update({str(code): {"description": text} for code, text in (errors or {}).items()})
    extra: dict[str, Any] = {**(body_of(body) if body else {}), "responses": responses}
    if query:
        extra["parameters"] = [
            {"name": name, "in": "query", "description": text, "schema": {"type": kind}}
            for name, (kind, text) in query.items()
        ]
    return extra


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a body or an answer, in one piece."""
    schema = model.model_json_schema(ref_template="{model}", by_alias=True)
    parts = schema.pop("$defs", {})
    found: dict[str, Any] = _inlined(schema, parts)
    return found


def _inlined(value: Any, parts: dict[str, Any]) -> Any:
    """A schema with its parts in the places of their names: the document has no list of them. No
    part holds itself."""
    if isinstance(value, list):
        return [_inlined(each, parts) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(parts[value["$ref"]], parts)
    # Answers may get further fields.
    return {
        key: _inlined(each, parts)
        for key, each in value.items()
        if not (key == "additionalProperties" and each is False)
    }
