"""What a target of fuzzing is, and what the targets share."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from allspark.model_loader import errors  # noqa: E402
from mutations import Mutate  # noqa: E402
from support import checkpoints  # noqa: E402

__all__ = ["LOADERS", "ROOT", "Target", "checkpoints", "errors", "file_with", "parsed_object",
           "read_all", "remove_scratch", "scratch"]  # fmt: skip

Documented = tuple[type[Exception], ...]
LOADERS: Documented = (errors.ModelSerializerException,)


@dataclass(frozen=True)
class Target:
    """``runs``: in the slow tier, about a minute of them."""

    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], None]
    mutate: Mutate
    documented: Documented
    runs: int


@functools.cache
def scratch() -> Path:
    """A folder of this process, in memory where there is such a file system."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="allspark-fuzz-", dir=base))


def remove_scratch() -> None:
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


def file_with(name: str, data: bytes) -> Path:
    """A new file each time: what maps the one before keeps it."""
    path = scratch() / name
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def read_all(entries: Iterable[Any]) -> None:
    for entry in entries:
        with entry.open() as array:
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).sum()


def parsed_object(data: bytes) -> dict[str, Any] | None:
    """None where it is not one, which is not what is tested."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
