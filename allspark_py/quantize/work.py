"""The work of a quantisation, layer by layer, in files: what goes on after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from allspark.model_loader.safetensors_file import read_safetensors
from allspark.model_loader.storage import TensorEntry
from allspark.quantize.grid import QuantizedWeight, WeightFormat
from allspark.quantize.layers import parts_of
from allspark.quantize.solver import SolvedLayer
from allspark.whole_file import write_whole

FOLDER = "quantize.partial"  # in the directory of the model
_SETTINGS = "settings.json"
_FALLBACKS = "fallbacks"


class Work:
    """The finished layers of one quantisation.

    Args:
        folder: where they are.
        settings: what they depend on. Layers that were made with other settings are not used.
        resume: whether layers from before are used.

    Raises:
        ValueError: there are layers to be used, but of other settings; the message names one.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self._folder = folder
        if resume and (folder / _SETTINGS).is_file():
            _check_same(json.loads((folder / _SETTINGS).read_text(encoding="utf-8")), settings)
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_whole(folder / _SETTINGS, json.dumps(dict(settings), indent=1).encode())

    def has(self, layer: int) -> bool:
        return self._path(layer).is_file()

    def save(self, layer: int, solved: SolvedLayer) -> None:
        """Writes a layer; after a crash it is there as a whole, or not at all."""
        from safetensors.numpy import save

        arrays = dict(solved.tensors)
        for name, weight in solved.quantized.items():
            arrays |= parts_of(name, weight)
        # Arrays in another order than C would be written as they lie.
        data = save(
            {name: np.ascontiguousarray(rows) for name, rows in arrays.items()},
            {_FALLBACKS: json.dumps(solved.fallbacks)},
        )
        write_whole(self._path(layer), data)

    def load(self, layer: int, formats: Mapping[str, WeightFormat]) -> SolvedLayer:
        """A finished layer, without its fallbacks."""
        arrays = {}
        for name, entry in self.entries(layer).items():
            with entry.open() as rows:
                arrays[name] = np.array(rows)
        quantized = {}
        for name, weight_format in formats.items():
            quantized[name] = QuantizedWeight(
                weight_format,
                arrays.pop(name),
                arrays.pop(f"{name}_scale"),
                arrays.pop(f"{name}_zero", None),
            )
        return SolvedLayer(arrays, quantized)

    def entries(self, layer: int) -> dict[str, TensorEntry]:
        """The tensors of a layer, by their names in it."""
        return {entry.name: entry for entry in read_safetensors(self._path(layer))}

    def fallbacks(self, layer: int) -> dict[str, str]:
        with self._path(layer).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found: dict[str, str] = json.loads(header["__metadata__"][_FALLBACKS])
        return found

    def remembered(self, name: str, compute: Callable[[], list[str]]) -> list[str]:
        """A list that is computed once, also where the work goes on after an interruption."""
        path = self._folder / f"{name}.json"
        if not path.is_file():
            write_whole(path, json.dumps(compute()).encode())
        found: list[str] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:04}.safetensors"


def _check_same(found: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if found.get(name) != value:
            raise ValueError(
                f"resume: the layers that are there were made with {name} {found.get(name)!r}; it "
                f"must be {value!r} (without resume they are made anew)"
            )
