"""The native module for the loaders, imported at first use."""

from __future__ import annotations

from typing import Any, NamedTuple

from .errors import ModelSerializerException


class RequiredTensor(NamedTuple):
    """A tensor a spec requires, as the native ``required_tensors`` lists it.

    ``quantizable``: an entry of ``weight_quant`` may name it. ``modules``: of a weight that takes
    adapters, where the output features of each of its modules end; empty where it takes none.
    """

    name: str
    dtype: str
    layout: int
    shape: tuple[int, ...]
    quantizable: bool
    modules: tuple[int, ...]


def native() -> Any:
    """The module; the stub _allspark.pyi describes it."""
    try:
        import allspark._allspark as module
    except ImportError as error:
        raise ModelSerializerException(
            f"the native module of allspark cannot be imported: {error}; is the installation "
            "complete?"
        ) from error
    return module


def required_of(spec: Any) -> list[RequiredTensor]:
    """The tensors that a DecoderSpec message requires.

    Raises:
        ValueError: the spec is inconsistent; the message names the field, the value and the bound.
    """
    return [RequiredTensor(*row) for row in native().required_tensors(spec.SerializeToString())]
