"""/v1/responses, and what becomes of stored ones."""

from __future__ import annotations

from operator import itemgetter
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
from allspark.serve.responses.request import NOT_SERVED
from allspark.serve.responses.run import whole_response
from allspark.serve.responses.start import count_input, start_response
from allspark.serve.responses.stream import ResponseStream
from allspark.serve.routes.common import (
    EVENTS,
    Json,
    described,
    ignored_header,
    in_order,
    number,
    page_of,
)
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

    @router.post(
        "/v1/responses", openapi_extra=described(ResponsesBody, ResponseAnswer, stream=EVENTS)
    )
    async def create(request: Request) -> Any:
        """Answers an input, and keeps the answer for requests that go on from it."""
        body = validate(ResponsesBody, await read_json(request, settings.max_body_bytes))
        run = await start_response(state, body, request.receive)
        headers = ignored_header(body)
        if body.stream:
            source = ResponseStream(run.record, run, -1, is_owner=True)
            return EventStream(source, settings.keep_alive_interval, headers)
        if body.background:
            return Json(run.record.response(), headers=headers)
        return Json(await until_gone(request.receive, whole_response(run)), headers=headers)

    @router.post(
        "/v1/responses/input_tokens", openapi_extra=described(ResponsesBody, InputTokens)
    )
    async def input_tokens(request: Request) -> Any:
        """The length of an input's prompt; nothing is generated."""
        body = validate(ResponsesBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings, NOT_SERVED)
        answer = await count_input(state, body, request.receive)
        return Json(answer, headers=ignored_header(body))

    @router.get(
        "/v1/responses/{response_id}",
        openapi_extra=described(None, ResponseAnswer, stream=EVENTS, query=_RETRIEVED),
    )
    async def retrieve(response_id: str, request: Request) -> Any:
        """A response as it is now; with `stream` its events, from the one after
        `starting_after`."""
        is_stream = _flag(request, "stream")
        after = number(request, "starting_after", -1, 0, None)
        if after >= 0 and not is_stream:
            raise wrong("starting_after", f"is {after}; it needs stream to be true")
        record = await library.find(response_id)
        if is_stream:
            run = library.running.get(response_id)
            source = ResponseStream(record, run, after, is_owner=False)
            return EventStream(source, settings.keep_alive_interval)
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
        run = library.running.get(response_id)
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
        items = in_order(request, (await library.find(response_id)).input)
        page, has_more = page_of(request, items, itemgetter("id"), 20, _MAX_LISTED)
        ends = {
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
        }
        return Json({"object": "list", "data": page, "has_more": has_more, **ends})

    return router


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text.lower() not in _BOOLS:
        raise wrong(name, f"is {shown(text)}; it must be true or false")
    return _BOOLS[text.lower()]
