"""/v1/chat/interactive."""

from __future__ import annotations

from typing import Any

from allspark.serve.field_names import check_fields
from allspark.serve.interactive import (
    EMPTY_LINE,
    LINES,
    NOT_SERVED,
    Turn,
    TurnStream,
    start_turn,
    whole_turn,
)
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol.answers import InteractiveAnswer
from allspark.serve.protocol.interactive import InteractiveBody
from allspark.serve.routes.common import Json, described, ignored_header
from allspark.serve.sse import EventStream, until_gone
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["LMDeploy"])
    settings = state.settings

    shown = described(
        InteractiveBody,
        InteractiveAnswer,
        stream=LINES["content-type"],
        errors={409: "a turn of the session runs"},
    )

    @router.post("/v1/chat/interactive", openapi_extra=shown)
    async def chat_interactive(request: Request) -> Any:
        """Answers a turn of a conversation that the server keeps."""
        body = validate(InteractiveBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings, NOT_SERVED)
        headers = ignored_header(body)
        turn = await start_turn(state, body, request.state.api_key)
        if not isinstance(turn, Turn):
            return Json(turn, headers=headers)
        if body.stream:
            interval = settings.keep_alive_interval
            return EventStream(TurnStream(turn), interval, {**LINES, **headers}, EMPTY_LINE)
        return Json(await until_gone(request.receive, whole_turn(turn)), headers=headers)

    return router
