"""The native module for the loaders, imported at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import ModelSerializerException


@dataclass(frozen=True)
class Native:
    ModelWriter: Callable[..., Any]
    required_tensors: Callable[[bytes], list[Any]]
    LoraWriter: Callable[..., Any]
    MappingWatch: Callable[..., Any]


@functools.cache
def native() -> Native:
    try:
        import allspark._allspark as module
    except ImportError as error:
        raise ModelSerializerException(
            f"the native module of allspark cannot be imported: {error}; is the installation "
            "complete?"
        ) from error
    return Native(
        module.ModelWriter, module.required_tensors, module.LoraWriter, module.MappingWatch
    )
