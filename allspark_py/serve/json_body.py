"""Reads the body of a request: bounded, as JSON, into a model of the protocol."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import orjson
from allspark.error_text import shown
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.protocol.common import RequestBody
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

Body = TypeVar("Body", bound=RequestBody)
# Above this, parsing would hold up the event loop.
_LARGE = 256 << 10
MAX_DEPTH = 100


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The bytes of a request's body. Raises ApiError where there are too many."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise _too_large(size, max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(499, "the client closed the connection") from None
    return b"".join(parts)


def _too_large(size: int, bound: int) -> ApiError:
    message = f"the body has {size} bytes or more; the bound is {bound}"
    return ApiError(413, message, code="request_too_large")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object of a request's body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", ""):
        message = f"the content type is {kind!r}; it must be application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        message = f"the content encoding is {encoding!r}; it must be 'identity'"
        raise ApiError(415, message, code="unsupported_media_type")
    data = await read_body(request, max_bytes)
    if len(data) > _LARGE:
        return await asyncio.to_thread(parse_object, data)
    return parse_object(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object of at most MAX_DEPTH levels. Raises ApiError for anything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        message = f"the body is a JSON {type(value).__name__}; it must be an object"
        raise ApiError(400, message, code="invalid_json")
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ApiError where arrays and objects are nested deeper than MAX_DEPTH levels."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            message = f"the body is nested deeper than {MAX_DEPTH} levels"
            raise ApiError(400, message, code="invalid_json")
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]


def validate(model: type[Body], value: dict[str, Any]) -> Body:
    """The request that a JSON object stands for. Raises ApiError that names the field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_fault(error) from None


def _first_fault(error: ValidationError) -> ApiError:
    """The first fault that validation found, as field, what is wrong, and the value. Of a field
    with alternatives, the one that fits best has its fault deepest."""
    faults = error.errors(include_url=False, include_context=False)
    own = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    fault = max(own, key=lambda each: len(each["loc"]))
    param = path_of(fault["loc"])
    given = fault.get("input")
    message = f"{param}: {fault['msg']}"
    if fault["type"] == "missing":
        message = f"{param} is missing"
    elif not isinstance(given, (dict, list)):
        message += f"; it is {shown(given)}"
    return invalid_value(message, param)


def path_of(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") as messages[0].content. Names of alternatives, which pydantic
    adds, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and (part[0].islower() or part[0] == "_") and part not in _KINDS:
            path += f".{part}" if path else part
    return path or "the body"


# Alternatives of a field, in the places that pydantic names.
_KINDS = {"str", "int", "float", "bool", "list", "dict", "none"}
