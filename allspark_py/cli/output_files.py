"""Flags that name files to write, and the settings that reports name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

# Options that are no settings of a measurement, or secret.
_NO_SETTINGS = {
    "api_key", "command", "csv", "eval", "fail", "json", "markdown", "parser", "plot",
}  # fmt: skip


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given or have defaults."""
    return {
        name: value
        for name, value in sorted(vars(options).items())
        if name not in _NO_SETTINGS and value is not None and value is not False and value != []
    }


def check_output_file(flag: str, name: str | None) -> None:
    """Raises before anything is measured, where the file could not be written after it."""
    if name is None:
        return
    if not Path(name).resolve().parent.is_dir():
        raise ValueError(f"{flag} is {name!r}; there is no such folder")
    if Path(name).is_dir():
        raise ValueError(f"{flag} is {name!r}, which is a folder")
