"""Flags that name files to write, and the settings that reports name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

# Options that are no settings of a measurement.
_NO_SETTINGS = {"command", "eval", "fail", "json", "markdown", "parser"}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given or have defaults."""
    found = {k: v for k, v in sorted(vars(options).items()) if k not in _NO_SETTINGS}
    return {k: v for k, v in found.items() if v not in (None, [], False)}


def check_output_file(flag: str, name: str | None) -> None:
    """Raises before anything is measured, where the file could not be written after it."""
    if name is None:
        return
    if not Path(name).resolve().parent.is_dir():
        raise ValueError(f"{flag} is {name!r}; there is no such folder")
    if Path(name).is_dir():
        raise ValueError(f"{flag} is {name!r}, which is a folder")
