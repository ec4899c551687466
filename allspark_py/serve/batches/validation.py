"""Checks the file of a batch before any line of it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allspark.batch.lines import LineError, LineReader
from allspark.error_text import shown
from allspark.serve.batches.requests import check_line

MAX_REQUESTS = 100_000
MAX_ERRORS = 100  # that a client is told of


@dataclass
class Validation:
    """What was found."""

    num_lines: int = 0
    models: set[str | None] = field(default_factory=set)  # of the lines; None: the only one
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        self.errors.append({"code": code, "message": message, "line": line, "param": param})


def validate_file(path: Path, endpoint: str, models: Collection[str]) -> Validation:
    """Checks all lines but for their bodies, whose faults are errors of their lines. Takes seconds
    for a large file.

    Args:
        models: the names of all that there are.
    """
    found = Validation()
    seen: set[bytes] = set()
    reader = LineReader(path)
    try:
        while len(found.errors) < MAX_ERRORS and (line := reader.next()) is not None:
            found.num_lines += 1
            if found.num_lines > MAX_REQUESTS:
                message = f"the file has more than {MAX_REQUESTS} lines, the bound"
                found.add("too_many_requests", message, line.number)
                break
            try:
                value = line.parse()
                check_line(value, endpoint)
            except LineError as error:
                found.add(error.code, str(error), line.number)
                continue
            model = value["body"].get("model")
            if model is None or (isinstance(model, str) and model in models):
                found.models.add(model)
            custom_id = value["custom_id"]
            digest = hashlib.blake2b(
                custom_id.encode("utf-8", "surrogatepass"), digest_size=16
            ).digest()
            if digest in seen:
                message = f"custom_id is {shown(custom_id)}, as in a line before"
                found.add("duplicate_custom_id", message, line.number, "custom_id")
            seen.add(digest)
    finally:
        reader.close()
    if not found.num_lines:
        found.add("empty_file", "the file has no lines", None, "input_file_id")
    return found
