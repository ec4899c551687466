"""Describes architectures: which decoder a configuration asks for, and where its weights come from.

An ``Architecture`` is a declaration: a function from ``config.json`` to the fields of DecoderSpec,
and a list of ``Weight`` rules. Everything else is here, once: expanding the rules over the layers,
and the check that a rule explains every tensor of a checkpoint and produces every tensor that the
decoder requires.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig
from .errors import (
    ConfigFieldMissingError,
    ModelSerializerException,
    UnexplainedTensorError,
    UnsupportedModelError,
)
from .native import RequiredTensor
from .storage import FLOATS, TensorEntry, Tensors

# In messages, names beyond these are counted, not listed.
_MAX_NAMES = 8


# The decoder's order of a source's rows, computed from the DecoderSpec.
RowOrder = Callable[[Any], NDArray[np.intp]]


@dataclass(frozen=True)
class Weight:
    """Where the decoder's tensor ``target`` comes from; ``{i}`` stands for each layer's number.

    Several sources are stacked along rows, in order; sources with ``{e}`` are those of all experts,
    one after the other. A source with three dimensions counts as the rows of its matrices. An
    ``optional`` rule explains sources that a checkpoint may have although its spec does not use the
    target (a tied ``lm_head``). A single source may have its rows in another ``order``, or its
    float32 values changed by ``transform``. A ``transposed`` matrix is stored with its columns as
    rows. ``rows``: the rows of each source, computed from the DecoderSpec, if they are neither all
    equal nor those of q, k and v.

    Rules for the same target are alternatives: the first whose sources all exist counts.
    """

    target: str
    sources: tuple[str, ...]
    optional: bool = False
    order: RowOrder | None = None
    transform: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    transposed: bool = False
    rows: Callable[[Any], Sequence[int]] | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """The checkpoint's modules whose weights are the sources."""
        return tuple(source.removesuffix(".weight") for source in self.sources)


@dataclass(frozen=True)
class Architecture:
    """One Hugging Face model class. ``ignored`` are regular expressions for whole names of tensors
    that are not used. ``standard`` gives a configuration transformers' names if it has others.
    ``prefix`` is missing from names in checkpoints that were saved without the head. ``view``,
    given a DecoderSpec, converts the tensors to those that the rules name, if a checkpoint has
    another layout.
    """

    name: str
    decoder: Callable[[ModelConfig], dict[str, Any]]
    weights: tuple[Weight, ...]
    ignored: tuple[str, ...] = ()
    standard: Callable[[ModelConfig], ModelConfig] = lambda config: config
    prefix: str = ""
    view: Callable[[Tensors, Any], Tensors] = lambda tensors, spec: tensors

    def arranged(self, tensors: Tensors, spec: Any) -> Tensors:
        """``tensors`` in the layout of the rules."""
        return self.view(self.full_names(tensors), spec)

    def full_names(self, tensors: Tensors) -> Tensors:
        """``tensors`` by the rules' names."""
        if not self.prefix or any(name.startswith(self.prefix) for name in tensors):
            return tensors
        return {
            name if name.startswith("lm_head.") else self.prefix + name: entry
            for name, entry in tensors.items()
        }


@dataclass(frozen=True)
class Part:
    """One step of a conversion: ``source`` becomes the rows of ``target`` from ``row_begin`` on,
    according to its rule.
    """

    rule: Weight
    row_begin: int
    source: TensorEntry


_REGISTRY: dict[str, Architecture] = {}
_MODEL_TYPES: dict[str, list[str]] = {}  # names of the architectures, by model_type


def register(architecture: Architecture, model_type: str | None = None) -> Architecture:
    """Registers an architecture under the name that ``config.json`` gives; names must be unique.
    ``model_type`` is the model_type in ``config.json``.
    """
    if architecture.name in _REGISTRY:
        raise ValueError(f"the architecture {architecture.name!r} is already registered")
    _REGISTRY[architecture.name] = architecture
    if model_type is not None:
        _MODEL_TYPES.setdefault(model_type, []).append(architecture.name)
    return architecture


def registered() -> list[str]:
    from . import architectures  # noqa: F401  (importing the declarations registers them)

    return sorted(_REGISTRY)


def find_architecture(name: str) -> Architecture:
    known = registered()
    if name not in _REGISTRY:
        raise UnsupportedModelError(
            f"the architecture {name!r} is not supported; known are {', '.join(known)}"
        )
    return _REGISTRY[name]


def model_type_of(architecture: str) -> str | None:
    """The ``model_type`` of configurations of this architecture, if it is known."""
    registered()  # imports the declarations
    return next((kind for kind, names in _MODEL_TYPES.items() if architecture in names), None)


def with_architecture(config: ModelConfig) -> ModelConfig:
    """``config``; if it has no ``architectures``, with the one that its ``model_type`` implies."""
    if config.get("architectures") is not None or "model_type" not in config:
        return config
    model_type = config.text("model_type")
    registered()  # imports the declarations
    names = _MODEL_TYPES.get(model_type, [])
    if len(names) != 1:
        meaning = f"may be {' or '.join(names)}" if names else "is not known"
        raise ConfigFieldMissingError(
            f"{config.source}: the field 'architectures' is missing, and model_type "
            f"{model_type!r} {meaning}"
        )
    return config.with_fields(architectures=names)


def expand(
    weights: Iterable[Weight],
    num_layers: int,
    num_experts: int = 0,
    tensors: Collection[str] | None = None,
) -> list[Weight]:
    """The rules with ``{i}`` replaced by each layer's number, and ``{e}`` by each expert's.

    With the names of the checkpoint's ``tensors``, a layer without a tensor of its first expert has
    rules for that expert alone: its experts are stacked, or missing. Raises UnexplainedTensorError
    before a configuration asks for more tensors of experts than the checkpoint has tensors.
    """
    expanded = []
    num_names = 0  # of single experts
    for rule in weights:
        for i in range(num_layers) if "{i}" in rule.target else (0,):
            names = tuple(source.replace("{i}", str(i)) for source in rule.sources)
            if any("{e}" in name for name in names):
                first = names[0].replace("{e}", "0")
                count = num_experts
                if tensors is not None and first not in tensors:
                    count = min(num_experts, 1)
                num_names += count * len(names)
                if tensors is not None and count > 1 and num_names > len(tensors):
                    raise UnexplainedTensorError(
                        f"there are {num_experts} experts in a layer, so {num_names} tensors of "
                        f"experts up to layer {i}; the checkpoint has {len(tensors)} tensors"
                    )
                names = tuple(
                    name.replace("{e}", str(e)) for e in range(count) for name in names
                )
            target = rule.target.replace("{i}", str(i))
            expanded.append(replace(rule, target=target, sources=names))
    return expanded


def resolve(
    architecture: Architecture,
    rules: Iterable[Weight],
    required: Sequence[RequiredTensor],
    tensors: Tensors,
    computed: Collection[str] = (),
) -> list[Part]:
    """Plans a conversion: the parts in the order of the checkpoint's data.

    ``rules`` are the architecture's, expanded; ``computed`` names required tensors that do not come
    from the checkpoint. Raises UnexplainedTensorError naming the tensors that no rule explains,
    that a rule needs and the checkpoint lacks, or whose shape or type is wrong.
    """
    missing_targets = {tensor.name: tensor for tensor in required if tensor.name not in computed}
    explained: set[str] = set()
    absent: list[str] = []
    parts: list[Part] = []
    alternatives: dict[str, list[Weight]] = {}
    for rule in rules:
        alternatives.setdefault(rule.target, []).append(rule)
    for name, choices in alternatives.items():
        target = missing_targets.pop(name, None)
        if target is None:
            explained.update(*(rule.sources for rule in choices if rule.optional))
            continue
        complete = (rule for rule in choices if all(source in tensors for source in rule.sources))
        rule = next(complete, choices[0])
        explained.update(rule.sources)
        lacking = [source for source in rule.sources if source not in tensors]
        if lacking:
            absent.extend(lacking)
        else:
            parts.extend(_parts(rule, target, [tensors[source] for source in rule.sources]))
    patterns = [re.compile(pattern) for pattern in architecture.ignored]
    mystery = [
        name
        for name in tensors
        if name not in explained and not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    problems = []
    if mystery:
        problems.append(f"no rule explains {_names(mystery)}")
    if absent:
        problems.append(f"the checkpoint lacks {_names(absent)}")
    if missing_targets:
        problems.append(f"no rule produces {_names(missing_targets)}")
    if problems:
        where = "".join(f"{place}: " for place in _places(tensors))
        raise UnexplainedTensorError(f"{where}{architecture.name}: {'; '.join(problems)}")
    parts.sort(key=lambda part: (str(part.source.file.path), part.source.offset))
    return parts


def _places(tensors: Tensors) -> list[str]:
    """The file of ``tensors``, or the directory if they are in several."""
    paths = {entry.file.path for entry in tensors.values()}
    return sorted({str(path if len(paths) == 1 else path.parent) for path in paths})


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _MAX_NAMES
    return ", ".join(map(repr, listed[:_MAX_NAMES])) + (f" and {more} more" if more > 0 else "")


def _parts(rule: Weight, target: RequiredTensor, sources: Sequence[TensorEntry]) -> list[Part]:
    parts, rows = [], 0
    for source in sources:
        if source.dtype not in FLOATS:
            raise UnexplainedTensorError(
                f"{source.where} has dtype {source.dtype}, expected {', '.join(FLOATS)}"
            )
        own = replace(rule, transposed=rule.transposed and not source.has_outputs_first)
        shape = source.shape[::-1] if own.transposed else source.shape
        if len(shape) == 3 and len(target.shape) == 2:
            shape = (shape[0] * shape[1], shape[2])
        if len(shape) != len(target.shape) or shape[1:] != target.shape[1:]:
            raise UnexplainedTensorError(
                f"{source.where} has shape {list(source.shape)}, which does not fit "
                f"{target.name!r} {list(target.shape)}"
            )
        parts.append(Part(own, rows, source))
        rows += shape[0]
    if rows != target.shape[0]:
        raise UnexplainedTensorError(
            f"{', '.join(source.where for source in sources)}: {rows} rows, but {target.name!r} "
            f"has {target.shape[0]}"
        )
    return parts


def message_class(name: str) -> Any:
    """The protobuf class ``allspark.proto.<name>``."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"allspark.proto.{name}"))


@functools.cache
def _pool() -> Any:
    """The messages of the format, from the descriptor set in the package.

    Generated code would tie the package to one protobuf version; a descriptor set works with all
    of them. There is one pool, because messages of different pools never compare equal.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool

    path = importlib.resources.files("allspark").joinpath("allspark.desc")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelSerializerException(
            f"{path}: cannot be read: {error}; is the installation complete?"
        ) from None
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool
