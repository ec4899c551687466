"""The chat templates by name: the builtin ones, and those that users register."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from allspark.error_text import wrong_type

from .interface import ChatTemplate

_Class = TypeVar("_Class", bound=type[ChatTemplate])


class Registry:
    """Classes by name, in the order of their registration. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._classes: dict[str, type[ChatTemplate]] = {}

    @property
    def module_dict(self) -> Mapping[str, type[ChatTemplate]]:
        """A view of all names and classes."""
        return MappingProxyType(self._classes)

    def get(self, name: str) -> type[ChatTemplate] | None:
        return self._classes.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._classes))

    def __len__(self) -> int:
        return len(self._classes)

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: type[ChatTemplate] | None = None,
    ) -> Any:
        """Registers `module` under one name or several; without `module`, returns a decorator that
        does. Without a name it is that of the class. `force` replaces what has the name already.

        Raises:
            ValueError: a name is taken. TypeError: something is no name or no template class.
        """
        names = _names(name)
        if module is not None:
            self._add(module, names, force)
            return module
        return self._decorator(names, force)

    def _decorator(self, names: list[str], force: bool) -> Callable[[_Class], _Class]:
        def register(module: _Class) -> _Class:
            self._add(module, names, force)
            return module

        return register

    def _add(self, module: type[ChatTemplate], names: list[str], force: bool) -> None:
        if not (isinstance(module, type) and issubclass(module, ChatTemplate)):
            raise wrong_type("module", module, "a class derived from BaseChatTemplate")
        names = names or [module.__name__]
        with self._lock:
            taken = [name for name in names if name in self._classes]
            if taken and not force:
                raise ValueError(
                    f"name is {taken[0]!r}, which is registered already; force=True replaces it"
                )
            self._classes.update(dict.fromkeys(names, module))


def _names(name: str | Sequence[str] | None) -> list[str]:
    """None: an empty list, for the name of the class."""
    if name is None:
        return []
    if isinstance(name, str):
        names = [name]
    elif isinstance(name, Sequence):
        names = list(name)
    else:
        raise wrong_type("name", name, "a str or a list of str")
    for index, item in enumerate(names):
        if not isinstance(item, str):
            raise wrong_type(f"name[{index}]", item, "a str")
    if not names or "" in names:
        raise ValueError(f"name is {name!r}; it must not be empty")
    return names


MODELS = Registry()
