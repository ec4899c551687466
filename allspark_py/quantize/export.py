"""export_checkpoint(): writes a quantised model as a checkpoint that other programs read.

Integers, scales and zero points are those of the engine's own file. Other tensors are copied from
the checkpoint with their bytes, except those of layers that a method scaled: these keep their type,
so in bfloat16 and float16 they are rounded, as llm-compressor rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.convert import Plan
from allspark.model_loader.quantized.tensor import QuantizedTensor
from allspark.model_loader.spec import find_architecture
from allspark.model_loader.storage import TensorEntry, round_float32
from allspark.quantize.arrays import Floats
from allspark.quantize.config import QuantizeConfig
from allspark.quantize.export_check import check_exportable
from allspark.quantize.export_files import (
    Output,
    check_directory,
    stored_as,
    write_checkpoint,
)
from allspark.quantize.export_formats import SAVE_FORMATS, ModuleWeight, Scheme
from allspark.quantize.export_places import Place, elements_in, places_of
from allspark.quantize.work import Work
from numpy.typing import NDArray

# Weights outside layers that no reader takes for those of nn.Linear.
_TABLES = ("embedding", "position_embedding")


def check_export(
    plan: Plan, config: QuantizeConfig, loader: HuggingFaceModel, output: Path, save_format: str
) -> int:
    """Raises the ValueErrors of export_checkpoint; asked before any work is done. Returns the bytes
    of all tensors."""
    scheme = check_exportable(plan, config, save_format)
    export = _Export(plan, None, scheme, loader, save_format)
    outputs = list(export.outputs())
    check_directory(loader, export.config(), outputs, output)
    return sum(each.nbytes for each in outputs)


def export_checkpoint(
    plan: Plan,
    work: Work,
    config: QuantizeConfig,
    loader: HuggingFaceModel,
    output: Path,
    save_format: str,
) -> list[Path]:
    """Writes the finished layers of `work`, and all else of the checkpoint that `plan` was made
    from, with config.json, tokenizer and the checkpoint's own code. Returns the files with weights.

    Args:
        save_format: compressed-tensors, gptq or awq.

    Raises:
        ValueError: `check_exportable` refuses, or the directory holds other weights.
        OSError: files cannot be written.
    """
    scheme = check_exportable(plan, config, save_format)
    export = _Export(plan, work, scheme, loader, save_format)
    return write_checkpoint(loader, export.config(), list(export.outputs()), output.expanduser())


class _Export:
    """What a checkpoint has. Without `work` its tensors cannot be made; scales then have the first
    type of their format, as nearly all have."""

    def __init__(
        self,
        plan: Plan,
        work: Work | None,
        scheme: Scheme,
        loader: HuggingFaceModel,
        save_format: str,
    ) -> None:
        self._spec = plan.spec
        self._work = work
        self._scheme = scheme
        self._format = SAVE_FORMATS[save_format]
        self._architecture = find_architecture(plan.spec.architecture)
        self._quantized = {quant.tensor for quant in plan.spec.weight_quant}
        self._layers: dict[int, dict[str, TensorEntry]] = {}
        self._checkpoint = self._architecture.full_names(loader.checkpoint_tensors())
        # The parts of each tensor of the checkpoint.
        self._places: dict[str, list[Place]] = {}
        by_source = {entry.name: name for name, entry in self._checkpoint.items()}
        for place in places_of(plan):
            name = by_source[place.part.source.name] if place.is_made_up else place.name
            self._places.setdefault(name, []).append(place)

    def config(self) -> dict[str, Any]:
        """The field quantization_config."""
        return self._format.config(self._scheme, self._modules_left())

    def outputs(self) -> Iterator[Output]:
        """The tensors, in the order of the checkpoint's files."""
        for name, entry in self._checkpoint.items():
            places = self._places.get(name, [])
            if self._is_quantized(places):
                module, weight = places[0].module, self._weight(places[0])
                yield from self._format.tensors(module, weight, self._scheme)
            elif not self._is_idle(name):
                make = self._floats(
                    name, entry, [each for each in places if each.layer is not None]
                )
                yield Output(name, entry.dtype, entry.shape, make)

    def _is_quantized(self, places: Sequence[Place]) -> bool:
        return any(place.target in self._quantized for place in places)

    def _is_idle(self, name: str) -> bool:
        """Whether this is a bias that the quantiser of the checkpoint added (`requantize`)."""
        module = name.removesuffix(".bias")
        return (
            module != name
            and name not in self._places
            and isinstance(self._checkpoint.get(f"{module}.weight"), QuantizedTensor)
        )

    def _modules_left(self) -> list[str]:
        """The modules with matrices that are not quantised."""
        found = []
        for name, entry in self._checkpoint.items():
            places = self._places.get(name, [])
            is_table = any(place.target in _TABLES for place in places)
            is_matrix = len(entry.shape) >= 2 and (places or name.endswith(".weight"))
            if is_matrix and not is_table and not self._is_quantized(places):
                found.append(name.rpartition(".")[0])
        # Readers have the head's module even where its weight is the embedding's.
        for rule in self._architecture.weights:
            if rule.target == "lm_head":
                found += rule.modules
        return list(dict.fromkeys(found))

    def _floats(
        self, name: str, entry: TensorEntry, places: Sequence[Place]
    ) -> Callable[[], NDArray[Any]]:
        """What reads a tensor with the changes that a method made to parts of it."""

        def make() -> NDArray[Any]:
            with entry.open() as array:
                stored = np.array(array)
            for place in places:
                rows = self._read(place, "")
                if place.is_same(rows, self._spec):
                    continue
                values = _rounded(place.restored(rows, self._spec), entry.dtype, name)
                if place.is_made_up:
                    stored.reshape(-1)[elements_in(entry, place.part.source)] = values
                else:
                    stored = values
            return stored

        return make

    def _weight(self, place: Place) -> ModuleWeight:
        rows, cols = place.part.source.shape

        def read(suffix: str) -> NDArray[Any]:
            return place.put_back(self._read(place, suffix), self._spec)

        def scales() -> Floats:
            if self._work is None:
                groups = cols // (self._scheme.format.group_size or cols)
                return np.zeros((rows, groups), np.float32)
            return read("_scale")

        def zeros() -> NDArray[np.uint8]:
            if self._scheme.format.asymmetric:
                return read("_zero")
            return np.full(read("_scale").shape, self._scheme.format.middle, np.uint8)

        return ModuleWeight((rows, cols), place.part.source.dtype, lambda: read(""), scales, zeros)

    def _read(self, place: Place, suffix: str) -> NDArray[Any]:
        """The rows of a place in a finished layer."""
        assert place.layer is not None
        with self._entries(place.layer)[place.own + suffix].open() as array:
            return np.array(place.of_target(array))

    def _entries(self, layer: int) -> dict[str, TensorEntry]:
        if layer not in self._layers:
            assert self._work is not None
            self._layers[layer] = self._work.entries(layer)
        return self._layers[layer]


def _rounded(values: Floats, dtype: str, name: str) -> NDArray[Any]:
    """`values` in a type.

    Raises:
        ValueError: a value is too large for it.
    """
    if not np.isfinite(round_float32(values, dtype)).all():
        worst = values.flat[int(np.argmax(np.abs(values)))]
        raise ValueError(f"{name} becomes {worst}, which its type {dtype} cannot hold")
    return stored_as(values, dtype)
