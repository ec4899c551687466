"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import Any

from allspark.serve.chat import ChatStream, start_chat, whole_chat
from allspark.serve.completion import CompletionStream, start_completion, whole_completion
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol.answers import ChatCompletion, TextCompletion
from allspark.serve.protocol.common import ChatBody, CompletionBody
from allspark.serve.routes.common import EVENTS, Json, described, ignored_header
from allspark.serve.sse import EventStream, until_gone
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["OpenAI"])
    settings = state.settings

    shown = described(ChatBody, ChatCompletion, stream=EVENTS)

    @router.post("/v1/chat/completions", openapi_extra=shown)
    async def chat_completions(request: Request) -> Any:
        """Answers a conversation."""
        body = validate(ChatBody, await read_json(request, settings.max_body_bytes))
        call = await start_chat(state, body)
        headers = ignored_header(body)
        if body.stream:
            return EventStream(ChatStream(call), settings.keep_alive_interval, headers)
        return Json(await until_gone(request.receive, whole_chat(call)), headers=headers)

    shown = described(CompletionBody, TextCompletion, stream=EVENTS)

    @router.post("/v1/completions", openapi_extra=shown)
    async def completions(request: Request) -> Any:
        """Continues texts."""
        body = validate(CompletionBody, await read_json(request, settings.max_body_bytes))
        call = await start_completion(state, body)
        headers = ignored_header(body)
        if body.stream:
            return EventStream(CompletionStream(call), settings.keep_alive_interval, headers)
        return Json(await until_gone(request.receive, whole_completion(call)), headers=headers)

    return router
