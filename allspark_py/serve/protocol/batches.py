"""Bodies of the routes about batches."""

from __future__ import annotations

from typing import Any, Literal

from allspark.serve.protocol.common import Metadata, RequestBody


class BatchBody(RequestBody):
    """/v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    # Refused where they ask for something.
    output_expires_after: dict[str, Any] | None = None
