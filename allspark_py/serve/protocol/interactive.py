"""The body of /v1/chat/interactive."""

from __future__ import annotations

from typing import Any

from allspark.serve.protocol.common import GenerationBody
from allspark.serve.sessions import MAX_ID
from pydantic import Field


class InteractiveBody(GenerationBody):
    """/v1/chat/interactive: a turn of a conversation that the server keeps."""

    prompt: str | list[dict[str, Any]] = Field(
        "", description="a text or messages; with interactive_mode false, empty ends the session"
    )
    session_id: int | None = Field(-1, ge=-1, le=MAX_ID, description="-1: the server chooses one")
    interactive_mode: bool | None = Field(False, description="true: the session is kept")
    request_output_len: int | None = Field(None, ge=0, description="null: up to the model's length")
    cancel: bool | None = Field(False, description="true: ends the turn that runs")
    adapter_name: str | None = None
    # Refused where it asks for something.
    image_url: str | list[str] | None = None
