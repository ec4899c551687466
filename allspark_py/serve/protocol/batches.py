"""Bodies of the routes about batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from allspark.serve.protocol.common import RequestBody
from pydantic import Field

# OpenAI's bounds.
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchBody(RequestBody):
    """/v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    # Refused where they ask for something.
    output_expires_after: dict[str, Any] | None = None
