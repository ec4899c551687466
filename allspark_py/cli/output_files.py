"""Flags that name files to write."""

from __future__ import annotations

from pathlib import Path


def check_output_file(flag: str, name: str | None) -> None:
    """Raises before anything is measured, where the file could not be written after it."""
    if name is None:
        return
    if not Path(name).resolve().parent.is_dir():
        raise ValueError(f"{flag} is {name!r}; there is no such folder")
    if Path(name).is_dir():
        raise ValueError(f"{flag} is {name!r}, which is a folder")
