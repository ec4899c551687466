"""Names of other engines that a script may import and not use."""

from __future__ import annotations

from typing import Any


def not_served(name: str, instead: str) -> NotImplementedError:
    """The exception of a call that does not exist here."""
    return NotImplementedError(f"{name} is not served: {instead}")


def placeholder(name: str, instead: str) -> type:
    """A class in place of a name, which may have that of its module in front; making an instance,
    or calling it, raises."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise not_served(name, instead)

    attributes = {"__init__": refuse, "__doc__": f"Not served: {instead}."}
    return type(name.rpartition(".")[2], (), attributes)
