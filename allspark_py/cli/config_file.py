"""The file of `allspark serve --config`: its keys are the names of flags, which it sets unless the
command line does."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from allspark.error_text import shown
from allspark.unicode_text import read_text

# Not for a file: where the file is, and what ends the command.
_NOT_KEYS = {"config", "help"}


def set_defaults(parser: argparse.ArgumentParser, path: str) -> None:
    """Makes the values of a file the defaults of the parser's arguments.

    Raises:
        ValueError: the file is no YAML or JSON, a key is unknown, or a value is none that its flag
            takes; the message names file, key and value.
        OSError: the file cannot be read.
    """
    actions = {key: action for action in parser._actions for key in _keys(action) - _NOT_KEYS}
    defaults = {}
    for given, value in _read(path).items():
        key = str(given).replace("_", "-")
        action = actions.get(key)
        if action is None:
            raise ValueError(f"{path}: there is no flag {given!r}{_near(key, list(actions))}")
        if value is not None:
            defaults[action.dest] = _converted(action, value, f"{path}: {given}")
    parser.set_defaults(**defaults)


def _keys(action: argparse.Action) -> set[str]:
    """"server-port" for --server-port, "models" for the models."""
    if not action.option_strings:
        return {action.dest}
    return {name.removeprefix("--") for name in action.option_strings if name.startswith("--")}


def _read(path: str) -> dict[Any, Any]:
    text = read_text(Path(path))
    try:
        if path.endswith(".json"):
            values = json.loads(text)
        else:
            import yaml  # transformers needs it, too

            values = yaml.safe_load(text)
    except Exception as error:  # each library has its own
        raise ValueError(f"{path}: it cannot be read: {' '.join(str(error).split())}") from None
    if values is None:  # an empty file
        return {}
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ValueError(f"{path}: it is a {kind}; it must be an object of flags and values")
    return values


def _near(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 3)
    return f"; near it are {', '.join(near)}" if near else "; `allspark serve --help` lists them"


def _converted(action: argparse.Action, value: Any, place: str) -> Any:
    if action.nargs == 0:  # a flag without a value
        if not isinstance(value, bool):
            raise ValueError(f"{place} is {shown(value)}; it must be true or false")
        return value if value else action.default
    if action.nargs is None:
        return _scalar(action, value, place)
    if isinstance(value, dict) and str(action.metavar).startswith("[NAME=]"):
        value = [f"{name}={_text(each, f'{place}.{name}')}" for name, each in value.items()]
    if not isinstance(value, list):
        value = [value]
    return [_scalar(action, each, f"{place}[{i}]") for i, each in enumerate(value)]


def _scalar(action: argparse.Action, value: Any, place: str) -> Any:
    """What the flag would make of the value's text."""
    text = _text(value, place)
    kind: Any = action.type or str
    try:
        found = kind(text)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise ValueError(f"{place} is {shown(value)}; it must be {expected}") from None
    if action.choices is not None and found not in action.choices:
        listed = ", ".join(map(repr, action.choices))
        raise ValueError(f"{place} is {shown(value)}; it must be one of {listed}")
    return found


def _text(value: Any, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{place} is {shown(value)}; it must be a text or a number")
    return str(value)
