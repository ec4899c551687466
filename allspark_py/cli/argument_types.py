"""Types of arguments that several commands have. Each raises ArgumentTypeError for a wrong text."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def not_negative(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    return value


def positive_real(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def boolean(text: str) -> bool:
    """True or False, in any case, or 1 or 0."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return values[text.lower()]


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value
