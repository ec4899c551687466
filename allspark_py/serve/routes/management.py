"""/sleep, /wakeup, /is_sleeping, /abort_request, and adapters while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from allspark._allspark import AsStatus
from allspark.pipeline.served_model import ServedModel
from allspark.serve.catalog import Catalog
from allspark.serve.choice import stop_choices
from allspark.serve.errors import ApiError, invalid_value, refused
from allspark.serve.field_names import check_fields
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol.answers import Aborted, Sleeping, Status
from allspark.serve.protocol.management import AbortBody, LoadAdapterBody, UnloadAdapterBody
from allspark.serve.routes.common import Json, described, ignored_header
from allspark.serve.state import ServerState
from fastapi import APIRouter, Request

NOT_ALLOWED = {403: "this server loads no adapters for clients"}
IN_USE = {**NOT_ALLOWED, 409: "a request uses the adapter"}


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["management"])
    settings, catalog = state.settings, state.catalog
    changing = asyncio.Lock()  # of the models' memory
    unloaded: list[ServedModel] = []  # those whose memory was given back
    loading = asyncio.Lock()  # of adapters: names are checked and given one at a time

    async def load() -> None:
        """Takes their memory again. Raises ApiError where one has none; the server then sleeps."""
        while unloaded:
            model = unloaded[-1]
            status = await asyncio.to_thread(model.engine.load_device_mem, model.name)
            if status == AsStatus.ALLSPARK_MEMORY_ERROR:
                raise ApiError(503, f"there is no memory for {model.name}", code="out_of_memory")
            if status != AsStatus.ALLSPARK_SUCCESS:
                raise ApiError(500, f"{model.name} cannot take its memory again")
            unloaded.pop()
        state.is_sleeping = False

    @router.post("/sleep", openapi_extra=described(None, Status))
    async def sleep() -> Any:
        """Gives the models' memory back; requests that run wait, new ones get 503."""
        async with changing:
            if not state.is_sleeping:
                state.is_sleeping = True
                for model in catalog.models:
                    status = await asyncio.to_thread(model.engine.unload_device_mem, model.name)
                    if status != AsStatus.ALLSPARK_SUCCESS:
                        with contextlib.suppress(ApiError):  # /wakeup tries again
                            await load()
                        raise ApiError(500, f"{model.name} cannot give its memory back")
                    unloaded.append(model)
        return Json({"status": "sleeping"})

    @router.post("/wakeup", openapi_extra=described(None, Status))
    async def wakeup() -> Any:
        """Takes the memory again; requests that waited go on."""
        async with changing:
            await load()
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
            raise invalid_value(message, "request_id")
        count = stop_choices(None if body.abort_all else body.request_id)
        return Json({"aborted": count}, headers=ignored_header(body))

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
        async with loading:
            await _load(catalog, body)
        return Json({"status": "loaded", "model": body.lora_name}, headers=ignored_header(body))

    shown = described(UnloadAdapterBody, Status, errors=IN_USE)

    @router.post("/v1/unload_lora_adapter", openapi_extra=shown)
    async def unload_adapter(request: Request) -> Any:
        """Frees an adapter that no request uses."""
        body = validate(UnloadAdapterBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        check_allowed()
        async with loading:
            await _unload(catalog, body.lora_name)
        return Json({"status": "unloaded", "model": body.lora_name}, headers=ignored_header(body))

    return router


async def _load(catalog: Catalog, body: LoadAdapterBody) -> None:
    model, name = catalog.get(body.model).model, body.lora_name
    if any(entry.name == name for entry in catalog.entries):
        message = f"there is a model {name!r} already"
        raise invalid_value(message, "lora_name")

    def load() -> tuple[AsStatus, str]:
        return model.load_adapter(name, body.lora_path), model.engine.last_error()

    status, message = await asyncio.to_thread(load)
    if status != AsStatus.ALLSPARK_SUCCESS:
        error = refused(status, message)
        if error.status == 503:  # there is no memory for it
            raise error
        raise invalid_value(message, "lora_path")
    catalog.add_adapter(model, name)


async def _unload(catalog: Catalog, name: str) -> None:
    entry = catalog.get(name)
    if entry.adapter is None:
        raise invalid_value(f"{name!r} is no adapter", "lora_name")
    model, adapter = entry.model, entry.adapter

    def unload() -> tuple[AsStatus, str]:  # which waits for the running step
        return model.engine.unload_lora(model.name, adapter), model.engine.last_error()

    status, message = await asyncio.to_thread(unload)
    if status != AsStatus.ALLSPARK_SUCCESS:
        raise ApiError(409, message, code="in_use")
    catalog.remove_adapter(model, adapter)
