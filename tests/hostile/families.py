"""The families of hostile cases, and how many cases of each the slow tests run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

NUM_CASES = {
    "schemas": 2500,
    "grammars": 1500,
    "expressions": 1800,
    "choices": 600,
    "configs": 1300,
    "adapters": 700,
    "side_files": 500,
    "links": 300,
    "requests": 400,
    "limits": 150,
    "signals": 100,
    "fork": 75,
    "exit": 75,
}


@dataclass(frozen=True)
class Family:
    # Runs once, in a process without threads, with a folder that all cases may read.
    prepare: Callable[[Path], None]
    # Runs one case, with a folder of its own, and returns a text that begins with `taken`,
    # `refused` or `ended`.
    run: Callable[[Random, Path], str]


class _Families(Mapping[str, Family]):
    """Imported on demand: each module imports what it attacks."""

    _MODULES = {
        "schemas": "formats", "grammars": "formats", "expressions": "formats", "choices": "formats",
        "configs": "files", "adapters": "files", "side_files": "files", "links": "files",
        "requests": "processes", "limits": "processes", "signals": "processes",
        "fork": "processes", "exit": "processes",
    }  # fmt: skip

    def __getitem__(self, name: str) -> Family:
        module: Any = importlib.import_module(self._MODULES[name])
        return Family(module.prepare, getattr(module, name))

    def __iter__(self) -> Any:
        return iter(self._MODULES)

    def __len__(self) -> int:
        return len(self._MODULES)


FAMILIES = _Families()
