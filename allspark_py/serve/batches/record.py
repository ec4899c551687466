"""BatchRecord: what is known of a batch, as it is kept and as clients read it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
Record = TypeVar("Record")


@dataclass
class BatchRecord:
    """A batch. Times are in seconds since 1970; None: not yet, or never."""

    id: str
    input_file_id: str
    endpoint: str
    created_at: int
    expires_at: int
    # Files that get the answers and the errors; known to clients at the end, if there are any.
    output_file: str
    error_file: str
    ending: str | None = None  # the last status, from when it is certain
    # Digests of the models that the lines name, from when the batch began, by their names.
    fingerprints: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    status: str = "validating"
    errors: list[dict[str, Any]] = field(default_factory=list)  # of an input that is no batch
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether its status is the last one."""
        return self.status not in UNFINISHED

    def enter(self, status: str) -> None:
        """Takes a status, now."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        shown = asdict(self)
        for name in ("output_file", "error_file", "ending", "fingerprints"):
            del shown[name]
        counts = {name: shown.pop(name) for name in ("total", "completed", "failed")}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {**shown, "object": "batch", "errors": errors, "request_counts": counts}


def read_record(path: Path, kind: Callable[..., Record]) -> Record:
    """A record of a dataclass. Raises ValueError that names the file where it is none."""
    try:
        return kind(**json.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no record of this server: {error}") from None
