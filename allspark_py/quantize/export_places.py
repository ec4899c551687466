"""Where the rows of the decoder's tensors lie in a checkpoint, and how they are put back there: the
inverse of the architectures' rules, found from a plan and from trials of the rules' functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from allspark.model_loader.convert import Plan, read_rows
from allspark.model_loader.derived import DerivedTensor
from allspark.model_loader.spec import Part, find_architecture
from allspark.model_loader.storage import TensorEntry
from allspark.quantize.layers import split_name
from numpy.typing import NDArray

_WEIGHT = ".weight"
_SAMPLES = 64  # values that a transform is tried on


@dataclass(frozen=True)
class Place:
    """One of a target's parts, and the name that the checkpoint's tensor has for its rule."""

    name: str
    part: Part
    # Whether a view of the architecture made up the name; the checkpoint itself has another tensor.
    is_made_up: bool

    @property
    def target(self) -> str:
        return self.part.rule.target

    @property
    def layer(self) -> int | None:
        """None: outside layers."""
        prefix, _ = split_name(self.target)
        return int(prefix.split(".")[1]) if prefix else None

    @property
    def own(self) -> str:
        """The target's name within its layer."""
        return split_name(self.target)[1]

    @property
    def module(self) -> str:
        return self.name.removesuffix(_WEIGHT)

    @property
    def is_module(self) -> bool:
        return self.name.endswith(_WEIGHT) and not self.is_made_up

    @property
    def num_rows(self) -> int:
        """Of the target."""
        shape = self.part.source.shape
        if len(shape) == 3:
            return shape[0] * shape[1]
        return shape[-1] if self.part.rule.transposed else shape[0]

    def of_target(self, rows: NDArray[Any]) -> NDArray[Any]:
        """This part of all rows of the target."""
        return rows[self.part.row_begin : self.part.row_begin + self.num_rows]

    def put_back(self, rows: NDArray[Any], spec: Any) -> NDArray[Any]:
        """The rows of a matrix, or of what lies beside one, in the order of the checkpoint."""
        order = self.part.rule.order
        if order is None:
            return rows
        placed = np.empty_like(rows)
        placed[order(spec)] = rows
        return placed

    def restored(self, rows: NDArray[np.float32], spec: Any) -> NDArray[np.float32]:
        """The tensor of the checkpoint that the rule makes these rows of."""
        rule = self.part.rule
        if rule.transform is not None:
            factor, summand = affine(rule.transform) or (0.0, 0.0)
            rows = (rows - np.float32(summand)) / np.float32(factor)
        rows = self.put_back(rows, spec)
        if rule.transposed:
            rows = rows.T
        return np.ascontiguousarray(rows).reshape(self.part.source.shape)

    def is_same(self, rows: NDArray[np.float32], spec: Any) -> bool:
        """Whether these rows of the target are what the checkpoint has."""
        for piece, found in read_rows([self.part], spec):
            begin = piece.row_begin - self.part.row_begin
            if not np.array_equal(found, rows[begin : begin + len(found)]):
                return False
        return True


def places_of(plan: Plan) -> list[Place]:
    """Of all parts of a plan."""
    by_target: dict[str, list[Part]] = {}
    for part in plan.parts:
        by_target.setdefault(part.rule.target, []).append(part)
    architecture = find_architecture(plan.spec.architecture)
    has_view = architecture.view is not type(architecture).view
    places = []
    for parts in by_target.values():
        # The parts of a target are stacked in the order of its rule's sources.
        parts.sort(key=lambda part: part.row_begin)
        for name, part in zip(parts[0].rule.sources, parts, strict=True):
            is_made_up = has_view and not _is_name_of(name, part.source, architecture.prefix)
            places.append(Place(name, part, is_made_up))
    return places


def _is_name_of(name: str, source: TensorEntry, prefix: str) -> bool:
    """Whether the checkpoint has the source under this name: as it is, or as tensors of a quantised
    module."""
    known = source.name.rpartition(".")[0] if name.endswith(_WEIGHT) else source.name
    return name.removesuffix(_WEIGHT) in (known, prefix + known)


def affine(
    transform: Callable[[NDArray[Any]], NDArray[Any]],
) -> tuple[float, float] | None:
    """(factor, summand) of a transform that does the same to all values; None: it is not so."""
    values = np.random.default_rng(0).standard_normal(_SAMPLES, np.float32)
    try:
        zero, one = (transform(np.full(_SAMPLES, value, np.float32)) for value in (0, 1))
        factor, summand = float(one[0] - zero[0]), float(zero[0])
        found, expected = transform(values), np.float32(factor) * values + np.float32(summand)
        if factor and found.shape == values.shape and np.allclose(found, expected, 1e-6, 1e-6):
            return factor, summand
    except (ValueError, IndexError):  # of a transform for matrices alone
        pass
    return None


def elements_in(raw: TensorEntry, source: TensorEntry) -> NDArray[np.intp]:
    """The index in the flat tensor `raw` of each element of `source`, which a view of the
    architecture took from it.

    Raises:
        ValueError: its elements are computed in another way.
    """
    count = int(np.prod(raw.shape))
    if source is raw:
        return np.arange(count).reshape(raw.shape)
    if not isinstance(source, DerivedTensor):
        begin = (source.offset - raw.offset) * count // raw.nbytes
        return np.arange(begin, begin + int(np.prod(source.shape))).reshape(source.shape)
    inner = elements_in(raw, source.inputs[0])
    found = source.compute(inner)
    # Numbers that were only moved stay each other's complements; sums and products do not.
    if found.dtype != inner.dtype or not np.array_equal(source.compute(~inner), ~found):
        raise ValueError(f"{source.where} is computed from a tensor of the file, not a part of it")
    return found
