"""/v1/responses, and what becomes of stored ones."""

from __future__ import annotations

from typing import Any

from allspark.serve.field_names import check_fields
from allspark.serve.json_body import read_json, validate
from allspark.serve.places import shown, wrong
from allspark.serve.protocol.answers import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseAnswer,
)
from allspark.serve.protocol.responses import ResponsesBody
from allspark.serve.responses.record import Record
from allspark.serve.responses.request import NOT_SERVED
from allspark.serve.responses.run import ResponseRun, whole_response
from allspark.serve.responses.start import count_input, start_response
from allspark.serve.responses.stream import ResponseStream
from allspark.serve.routes.common import EVENTS, Json, described, ignored_header
from allspark.serve.sse import EventStream, until_gone
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request

_MAX_LISTED = 100
_RETRIEVED = {
    "stream": ("boolean", "its events"),
    "starting_after": ("integer", "with stream: the number of the event before the first"),
}
_LISTED = {
    "limit": ("integer", f"1 to {_MAX_LISTED}"),
    "order": ("string", "desc or asc"),
    "after": ("string", "the id of the item before the first"),
}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["OpenAI"])
    settings, library = state.settings, state.responses

    def stream_of(
        record: Record, run: ResponseRun | None, after: int, is_owner: bool, ignored: str = ""
    ) -> EventStream:
        source = ResponseStream(record, run, after, is_owner)
        return EventStream(source, settings.keep_alive_interval, ignored_header(ignored))

    def run_of(id: str) -> ResponseRun | None:
        run = library.running.get(id)
        return run if isinstance(run, ResponseRun) else None

    @router.post(
        "/v1/responses", openapi_extra=described(ResponsesBody, ResponseAnswer, stream=EVENTS)
    )
    async def create(request: Request) -> Any:
        """Answers an input, and keeps the answer for requests that go on from it."""
        body = validate(ResponsesBody, await read_json(request, settings.max_body_bytes))
        run = await start_response(state, body, request.receive)
        if body.stream:
            return stream_of(run.record, run, -1, True, run.ignored)
        headers = ignored_header(run.ignored)
        if body.background:
            return Json(run.record.response(), headers=headers)
        return Json(await until_gone(request.receive, whole_response(run)), headers=headers)

    @router.post(
        "/v1/responses/input_tokens", openapi_extra=described(ResponsesBody, InputTokens)
    )
    async def input_tokens(request: Request) -> Any:
        """The length of an input's prompt; nothing is generated."""
        body = validate(ResponsesBody, await read_json(request, settings.max_body_bytes))
        headers = ignored_header(check_fields(body, settings, NOT_SERVED))
        return Json(await count_input(state, body, request.receive), headers=headers)

    @router.get(
        "/v1/responses/{response_id}",
        openapi_extra=described(None, ResponseAnswer, stream=EVENTS, query=_RETRIEVED),
    )
    async def retrieve(response_id: str, request: Request) -> Any:
        """A response as it is now; with `stream` its events, from the one after
        `starting_after`."""
        is_stream = _flag(request, "stream")
        after = _number(request, "starting_after", -1, 0, None)
        if after >= 0 and not is_stream:
            raise wrong("starting_after", f"is {after}; it needs stream to be true")
        record = await library.find(response_id)
        if is_stream:
            return stream_of(record, run_of(response_id), after, False)
        return Json(record.response())

    @router.delete("/v1/responses/{response_id}", openapi_extra=described(None, DeletedResponse))
    async def delete(response_id: str) -> Any:
        """Forgets a response. One that runs ends."""
        await library.delete(response_id)
        return Json({"id": response_id, "object": "response", "deleted": True})

    @router.post(
        "/v1/responses/{response_id}/cancel", openapi_extra=described(None, ResponseAnswer)
    )
    async def cancel(response_id: str) -> Any:
        """Ends a response that runs in the background; what it has so far stays."""
        record = await library.find(response_id)
        if not record.head["background"]:
            problem = f"is {shown(response_id)}, which does not run in the background"
            raise wrong("response_id", problem)
        run = run_of(response_id)
        if run is not None:
            run.cancel()
            await run.ended()
        return Json(record.response())

    @router.get(
        "/v1/responses/{response_id}/input_items",
        openapi_extra=described(None, InputItems, query=_LISTED),
    )
    async def input_items(response_id: str, request: Request) -> Any:
        """The items of a response's own input, without those of responses before it."""
        limit = _number(request, "limit", 20, 1, _MAX_LISTED)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise wrong("order", f"is {shown(order)}; it must be 'asc' or 'desc'")
        items = (await library.find(response_id)).input
        if order == "desc":
            items = items[::-1]
        after = request.query_params.get("after")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise wrong("after", f"is {shown(after)}; no item of the input has it")
            items = items[ids.index(after) + 1 :]
        listed = items[:limit]
        ends = {
            "first_id": listed[0]["id"] if listed else "",
            "last_id": listed[-1]["id"] if listed else "",
        }
        return Json({"object": "list", "data": listed, "has_more": len(items) > limit, **ends})

    return router


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text.lower() not in _BOOLS:
        raise wrong(name, f"is {shown(text)}; it must be true or false")
    return _BOOLS[text.lower()]


def _number(request: Request, name: str, default: int, least: int, most: int | None) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) < 19
    if not is_number or int(text) < least or (most is not None and int(text) > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise wrong(name, f"is {shown(text)}; it must be a whole number, {bounds}")
    return int(text)
