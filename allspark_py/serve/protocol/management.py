"""Bodies of the routes about requests that run, and about adapters."""

from __future__ import annotations

from typing import Annotated

from allspark.serve.protocol.common import RequestBody
from pydantic import Field


class LoadAdapterBody(RequestBody):
    """/v1/load_lora_adapter."""

    model: str | None = None
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapterBody(RequestBody):
    """/v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]


class AbortBody(RequestBody):
    """/abort_request."""

    request_id: str | None = None
    abort_all: bool | None = False
