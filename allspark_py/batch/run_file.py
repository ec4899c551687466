"""The file beside an output, which says what the output was begun with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allspark.batch.output import OutputFile
from allspark.error_text import shown
from allspark.whole_file import write_whole

_VERSION = 1
Settings = Mapping[str, Any]  # name -> a value of JSON


def run_file_of(output: Path) -> Path:
    """The path of the file."""
    return output.with_name(output.name + ".run")


def settings_before(output: OutputFile) -> dict[str, Any]:
    """The settings with which an output was begun; none where it has nothing yet.

    Raises:
        ValueError: they cannot be read.
    """
    return dict(_read(run_file_of(output.path))["settings"]) if output.num_bytes() else {}


def begin(output: OutputFile, settings: Settings, created: int, overwrite: bool) -> tuple[int, int]:
    """Begins an output, or finds where it goes on.

    Args:
        settings: all that an answer depends on.
        created: the time of a run that begins now, in seconds since 1970.
        overwrite: the lines that are there are removed.

    Returns:
        How many lines the output has, and the time of its run.

    Raises:
        ValueError: the output was begun otherwise; the message says what differs.
    """
    path = run_file_of(output.path)
    if overwrite:
        output.clear()
    elif output.num_bytes():
        found = _read(path)
        _compare(output.path, found["settings"], settings)
        count = output.cut()
        if count:
            return count, int(found["created"])
    value = {"version": _VERSION, "created": created, "settings": settings}
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")
    return 0, created


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        if value["version"] != _VERSION:
            raise ValueError(f"its version is {value['version']}, expected {_VERSION}")
        int(value["created"])
        dict(value["settings"])
    except FileNotFoundError:
        output = path.name.removesuffix(".run")
        raise ValueError(
            f"{path.with_name(output)} is there, but not {path.name}, which a batch writes beside "
            "it; give another output, or --overwrite"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; --overwrite begins anew") from None
    return dict(value)


def _compare(output: Path, found: Settings, expected: Settings) -> None:
    # As they would be read: a tuple is a list in JSON.
    expected = json.loads(json.dumps(expected))
    differences = [
        f"{name} was {shown(found.get(name))}, is {shown(expected.get(name))}"
        for name in dict.fromkeys([*found, *expected])
        if found.get(name) != expected.get(name)
    ]
    if differences:
        raise ValueError(
            f"{output} was begun with other settings: {'; '.join(differences)}. Give the old ones, "
            "another output, or --overwrite"
        )
