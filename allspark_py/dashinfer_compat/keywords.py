"""Parameters under the names that DashInfer gave them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def keywords(names: Mapping[str, Mapping[str, str]]) -> Callable[[Class], Class]:
    """Decorates a class. `names` is {method: {DashInfer's name of a parameter: allspark's}}."""

    def decorate(cls: Class) -> Class:
        for method, parameters in names.items():
            static = isinstance(vars(cls.__mro__[1]).get(method), staticmethod)
            call = _with_names(getattr(cls, method), parameters)
            setattr(cls, method, staticmethod(call) if static else call)
        return cls

    return decorate


def _with_names(function: Callable[..., Any], parameters: Mapping[str, str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{parameters.get(name, name): kwargs[name] for name in kwargs})

    return call
