"""make_app: the FastAPI application with all routes."""

from __future__ import annotations

from typing import Any

from allspark.serve.http import Gate, add_error_handlers
from allspark.serve.routes import anthropic, information, management, openai, texts
from allspark.serve.state import ServerState
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

# Headers of answers that a page of another origin may read.
EXPOSED_HEADERS = ("request-id", "retry-after", "x-allspark-ignored", "x-request-id")


def make_app(state: ServerState) -> Any:
    """The ASGI application of a server."""
    settings = state.settings
    app = FastAPI(
        title="allspark",
        description="The allspark engine, with the protocols of OpenAI and Anthropic.",
        docs_url=None if settings.disable_docs else "/",
        redoc_url=None,
        responses={code: {"description": "`error` says what is wrong."} for code in ("4XX", "5XX")},
        openapi_url=None if settings.disable_docs else "/openapi.json",
    )
    add_error_handlers(app)
    for module in (information, openai, anthropic, texts, management):
        app.include_router(module.make_router(state))
    # Around the gate, so that a page of another origin can read its errors.
    return CORSMiddleware(
        Gate(app, state),
        allow_origins=settings.allow_origins,
        allow_methods=settings.allow_methods,
        allow_headers=settings.allow_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )
