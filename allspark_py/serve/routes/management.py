"""/sleep, /wakeup, /is_sleeping, /abort_request, and adapters while the server runs."""

from __future__ import annotations

import asyncio
from typing import Any

from allspark._allspark import AsStatus
from allspark.serve.catalog import Entry
from allspark.serve.choice import stop_choices
from allspark.serve.errors import ApiError, refused
from allspark.serve.fields import check_fields
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol.answers import Aborted, Sleeping, Status
from allspark.serve.protocol.texts import AbortBody, LoadAdapterBody, UnloadAdapterBody
from allspark.serve.routes.common import Json, described
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request

NOT_ALLOWED = {403: "this server loads no adapters for clients"}
IN_USE = {**NOT_ALLOWED, 409: "a request uses the adapter"}


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["management"])
    settings, catalog = state.settings, state.catalog
    changing = asyncio.Lock()  # of the models' memory

    @router.post("/sleep", openapi_extra=described(None, Status))
    async def sleep() -> Any:
        """Gives the models' memory back; requests that run wait, new ones get 503."""
        async with changing:
            if not state.is_sleeping:
                state.is_sleeping = True
                for model in catalog.models:
                    status = await asyncio.to_thread(model.engine.unload_device_mem, model.name)
                    if status != AsStatus.ALLSPARK_SUCCESS:
                        state.is_sleeping = False
                        raise ApiError(500, f"{model.name} cannot give its memory back")
        return Json({"status": "sleeping"})

    @router.post("/wakeup", openapi_extra=described(None, Status))
    async def wakeup() -> Any:
        """Takes the memory again; requests that waited go on."""
        async with changing:
            if state.is_sleeping:
                for model in catalog.models:
                    status = await asyncio.to_thread(model.engine.load_device_mem, model.name)
                    if status == AsStatus.ALLSPARK_MEMORY_ERROR:
                        raise ApiError(503, f"there is no memory for {model.name}")
                state.is_sleeping = False
        return Json({"status": "awake"})

    @router.get("/is_sleeping", openapi_extra=described(None, Sleeping))
    async def is_sleeping() -> Any:
        """Whether the models sleep."""
        return Json({"is_sleeping": state.is_sleeping})

    @router.post("/abort_request", openapi_extra=described(AbortBody, Aborted))
    async def abort_request(request: Request) -> Any:
        """Ends a request by its X-Request-Id, or all; what they have so far is their answer."""
        body = validate(AbortBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        if not body.abort_all and body.request_id is None:
            message = "request_id is missing; or abort_all must be true"
            raise ApiError(400, message, param="request_id", code="invalid_value")
        return Json({"aborted": stop_choices(None if body.abort_all else body.request_id)})

    def check_allowed() -> None:
        if not settings.allow_adapter_loading:
            message = "this server loads no adapters for clients (--allow-adapter-loading)"
            raise ApiError(403, message, code="permission_denied")

    shown = described(LoadAdapterBody, Status, errors=NOT_ALLOWED)

    @router.post("/v1/load_lora_adapter", openapi_extra=shown)
    async def load_adapter(request: Request) -> Any:
        """Loads an adapter from a path on the server; it is a model of its own from then on."""
        body = validate(LoadAdapterBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        check_allowed()
        model = catalog.get(body.model).model
        name = body.lora_name
        if any(entry.name == name for entry in catalog.entries):
            message = f"there is a model {name!r} already"
            raise ApiError(400, message, param="lora_name", code="invalid_value")
        status, message = await asyncio.to_thread(_load, model, name, body.lora_path)
        if status != AsStatus.ALLSPARK_SUCCESS:
            error = refused(status, message)
            raise ApiError(min(error.status, 400), message, param="lora_path", code=error.code)
        catalog.add_adapter(model, name)
        return Json({"status": "loaded", "model": name})

    shown = described(UnloadAdapterBody, Status, errors=IN_USE)

    @router.post("/v1/unload_lora_adapter", openapi_extra=shown)
    async def unload_adapter(request: Request) -> Any:
        """Frees an adapter that no request uses."""
        body = validate(UnloadAdapterBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        check_allowed()
        entry: Entry = catalog.get(body.lora_name)
        if entry.adapter is None:
            message = f"{body.lora_name!r} is no adapter"
            raise ApiError(400, message, param="lora_name", code="invalid_value")
        status = entry.model.engine.unload_lora(entry.model.name, entry.adapter)
        if status != AsStatus.ALLSPARK_SUCCESS:
            raise ApiError(409, entry.model.engine.last_error(), code="in_use")
        catalog.remove_adapter(entry.model, entry.adapter)
        return Json({"status": "unloaded", "model": body.lora_name})

    return router


def _load(model: Any, name: str, path: str) -> tuple[AsStatus, str]:
    status = model.engine.load_lora(model.name, name, path)
    return status, model.engine.last_error()
