"""How the fields of a config class are declared: what a value must be, and what becomes of it.

A field is *mapped* to something of this engine, *accepted* because it changes nothing here, or
*refused* unless it has its default. The declaration is the only place that says so:
docs/pipeline.md shows it as a table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allspark.error_text import shown

# Raises TypeError or ValueError with the name where a value is none that the field takes.
Check = Callable[[str, Any], None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The treatment of one field."""

    treatment: str  # "mapped", "accepted" or "refused"
    note: str  # what it is mapped to, why it changes nothing, or why it is refused
    check: Check | None = None


def mapped(default: Any, note: str, check: Check) -> Any:
    """A field that this engine has, too."""
    return dataclasses.field(default=default, metadata={"rule": Rule("mapped", note, check)})


def accepted(default: Any, note: str, check: Check | None = None) -> Any:
    """A field of which any value gives the same output here."""
    return dataclasses.field(default=default, metadata={"rule": Rule("accepted", note, check)})


def refused(default: Any, note: str) -> Any:
    """A field of which only the default is taken."""
    return dataclasses.field(default=default, metadata={"rule": Rule("refused", note)})


def rules(config_class: type) -> dict[str, Rule]:
    """The rules of a config class by field."""
    return {field.name: field.metadata["rule"] for field in dataclasses.fields(config_class)}


def check_fields(config: Any) -> None:
    """Checks every field of a config that differs from its default.

    Raises:
        TypeError, ValueError: a value is wrong or refused; the message names class, field, value
            and what is taken.
    """
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if value is default or _is_equal(value, default):
            continue
        name, rule = f"{type(config).__name__}.{field.name}", field.metadata["rule"]
        if rule.treatment == "refused":
            raise ValueError(f"{name} is {shown(value)}; only {default!r} is served: {rule.note}")
        if rule.check is not None:
            rule.check(name, value)


def _is_equal(value: Any, default: Any) -> bool:
    # A str may be a member of an enum. Of other types, True is not 1.
    is_same = type(value) is type(default) or (isinstance(value, str) and isinstance(default, str))
    return is_same and bool(value == default)


def _between(low: float | None, high: float | None) -> str:
    if high is None:
        return "" if low is None else f" of at least {low}"
    return f" in [{low}, {high}]"


def whole(low: int | None = None, high: int | None = None, none: bool = False) -> Check:
    """An integer; with `none` also None."""

    def check(name: str, value: Any) -> None:
        if none and value is None:
            return
        must = f"it must be {'None or ' if none else ''}an integer{_between(low, high)}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); {must}")
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError(f"{name} is {shown(value)}; {must}")

    return check


def real(low: float, high: float | None = None) -> Check:
    """A finite number."""

    def check(name: str, value: Any) -> None:
        must = f"it must be a number{_between(low, high)}"
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); {must}")
        if not (math.isfinite(value) and low <= value and (high is None or value <= high)):
            raise ValueError(f"{name} is {shown(value)}; {must}")

    return check


def flag(name: str, value: Any) -> None:
    """A bool, or 0 or 1."""
    if value not in (False, True):
        raise TypeError(f"{name} is {shown(value)}; it must be a bool")


def one_of(*values: Any, others: tuple[Any, ...] = (), reason: str = "") -> Check:
    """One of the values. `others` are LMDeploy's, which are none here for the `reason`."""

    def check(name: str, value: Any) -> None:
        if value not in values:
            listed = ", ".join(map(repr, values))
            why = f": {reason}" if value in others else ""
            raise ValueError(f"{name} is {shown(value)}; it must be one of {listed}{why}")

    return check


def text(name: str, value: Any) -> None:
    """A str, or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)} ({type(value).__name__}); it must be a str")


def texts(name: str, value: Any) -> None:
    """A str or a list of them, or None."""
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} is {shown(value)}; it must be a list of str")


def token_ids(name: str, value: Any) -> None:
    """A list of integers, or None."""
    if value is None:
        return
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is {shown(value)}; it must be a list of token ids")
    for index, token in enumerate(value):
        whole(0)(f"{name}[{index}]", token)


def mapping(name: str, value: Any) -> None:
    """A dict, or None."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} is {shown(value)}; it must be a dict")


def paths(name: str, value: Any) -> None:
    """A dict from names to paths, or None."""
    mapping(name, value)
    for key, path in (value or {}).items():
        if not isinstance(key, str) or not isinstance(path, str):
            raise TypeError(f"{name} has {shown(key)}: {shown(path)}; both must be str")
