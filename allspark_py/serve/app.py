"""make_app: the FastAPI application with all routes."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from allspark.serve.direct_routes import DirectRoutes
from allspark.serve.http import Gate, add_error_handlers
from allspark.serve.openapi import complete_document
from allspark.serve.routes import (
    anthropic,
    batches,
    information,
    interactive,
    management,
    openai,
    page,
    responses,
    texts,
)
from allspark.serve.state import ServerState
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

# Headers of answers that a page of another origin may read.
EXPOSED_HEADERS = ("request-id", "retry-after", "x-allspark-ignored", "x-request-id")


def _version() -> str:
    try:
        return importlib.metadata.version("allspark")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "0"


def make_app(state: ServerState) -> Any:
    """The ASGI application of a server."""
    settings = state.settings
    app = FastAPI(
        title="allspark",
        version=_version(),
        description="The allspark engine, with the protocols of OpenAI, Anthropic and LMDeploy.",
        docs_url=None if settings.disable_docs else "/docs" if settings.home_is_page else "/",
        redoc_url=None,
        openapi_url=None if settings.disable_docs else "/openapi.json",
    )
    add_error_handlers(app)
    modules = (information, openai, responses, anthropic, interactive, texts, management)
    routers = [module.make_router(state) for module in modules]
    for router in routers:
        app.include_router(router)
    if state.batches is not None:
        app.include_router(batches.make_router(state, state.batches))
    app.include_router(page.make_router())
    if settings.home_is_page:
        app.include_router(page.make_home_router())
    complete_document(app, bool(settings.api_keys))
    # Around the gate, so that a page of another origin can read its errors.
    return CORSMiddleware(
        Gate(DirectRoutes(app, routers), state),
        allow_origins=settings.allow_origins,
        allow_methods=settings.allow_methods,
        allow_headers=settings.allow_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )
