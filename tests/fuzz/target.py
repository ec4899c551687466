"""The definition of a fuzz target, and code that the targets share."""

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
    name: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[bytes], None]
    mutate: Mutate
    documented: Documented


@functools.cache
def scratch() -> Path:
    """A folder of this process, in a memory file system if there is one."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="allspark-fuzz-", dir=base))


def remove_scratch() -> None:
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


def file_with(name: str, data: bytes) -> Path:
    """Makes a new file each time, because the old one may still be mapped."""
    path = scratch() / name
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def read_all(entries: Iterable[Any]) -> None:
    for entry in entries:
        with entry.open() as array:
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).sum()


def parsed_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in ``data``; None if it is something else, which is not tested here."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
