"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from allspark.serve.anthropic import (
    PING,
    MessageStream,
    count_tokens,
    start_messages,
    whole_message,
)
from allspark.serve.anthropic_request import NOT_SERVED
from allspark.serve.field_names import check_fields
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol.answers import AnthropicAnswer, TokenCount
from allspark.serve.protocol.anthropic import CountTokensBody, MessagesBody
from allspark.serve.routes.common import EVENTS, Json, described, ignored_header
from allspark.serve.sse import EventStream, until_gone
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["Anthropic"])
    settings = state.settings

    shown = described(MessagesBody, AnthropicAnswer, stream=EVENTS)

    @router.post("/v1/messages", openapi_extra=shown)
    async def messages(request: Request) -> Any:
        """Answers a conversation."""
        body = validate(MessagesBody, await read_json(request, settings.max_body_bytes))
        call = await start_messages(state, body)
        headers = ignored_header(body)
        if body.stream:
            return EventStream(MessageStream(call), settings.keep_alive_interval, headers, PING)
        return Json(await until_gone(request.receive, whole_message(call)), headers=headers)

    @router.post("/v1/messages/count_tokens", openapi_extra=described(CountTokensBody, TokenCount))
    async def count(request: Request) -> Any:
        """The length of a conversation's prompt; nothing is generated."""
        body = validate(CountTokensBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings, NOT_SERVED)
        return Json(await count_tokens(state, body), headers=ignored_header(body))

    return router
