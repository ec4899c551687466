"""What a server says of itself: /health, /v1/models, /metrics."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from allspark.serve.catalog import Entry
from allspark.serve.http import is_anthropic
from allspark.serve.protocol.answers import ModelCard, ModelCards, ModelInfo, ModelInfos, Status
from allspark.serve.routes.common import Json, described
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = health_router(state)

    shown = described(None, ModelCards, ModelInfos)

    @router.get("/v1/models", openapi_extra=shown)
    @router.get("/anthropic/v1/models", openapi_extra=shown)
    async def models(request: Request) -> Any:
        """The models and adapters that requests may name. The header anthropic-version asks for
        Anthropic's form."""
        if is_anthropic(request.scope):
            infos = [_info(entry) for entry in state.catalog.entries]
            ends = {"first_id": infos[0]["id"], "last_id": infos[-1]["id"]}
            return Json({"data": infos, "has_more": False, **ends})
        return Json({"object": "list", "data": [_card(entry) for entry in state.catalog.entries]})

    shown = described(None, ModelCard, ModelInfo)

    @router.get("/v1/models/{name:path}", openapi_extra=shown)
    @router.get("/anthropic/v1/models/{name:path}", openapi_extra=shown)
    async def model(name: str, request: Request) -> Any:
        """One of them."""
        shown = _info if is_anthropic(request.scope) else _card
        return Json(shown(state.catalog.get(name)))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Any:
        """Everything that is counted, in Prometheus' text format."""
        engines = {id(model.engine): model.engine for model in state.catalog.models}
        text = "".join(engine.metrics_text() for engine in engines.values())
        return Response(text, media_type="text/plain; version=0.0.4")

    return router


def health_router(state: ServerState) -> APIRouter:
    """/health alone."""
    router = APIRouter(tags=["server"])

    @router.get("/health", openapi_extra=described(None, Status))
    async def health() -> Any:
        """200 while requests are taken, 503 while the server shuts down."""
        if state.is_draining:
            return Json({"status": "shutting down"}, status_code=503)
        return Json({"status": "sleeping" if state.is_sleeping else "healthy"})

    return router


def _info(entry: Entry) -> dict[str, Any]:
    """A model as Anthropic's clients read it."""
    created = datetime.fromtimestamp(entry.created, timezone.utc)
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": entry.model.session_len,
        "max_tokens": entry.model.session_len,
    }


def _card(entry: Entry) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{entry.name}",
        "object": "model_permission",
        "created": entry.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": True,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "allspark",
        "root": entry.root,
        "parent": None if entry.adapter is None else entry.root,
        "max_model_len": entry.model.session_len,
        "permission": [permission],
    }
