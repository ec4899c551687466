"""What is checked before layers are quantised, which may take hours."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allspark.model_loader.convert import read_rows
from allspark.model_loader.native import RequiredTensor, required_of
from allspark.quantize.arrays import check_finite
from allspark.quantize.layers import LayerSource

_STORED_BITS = {"uint4": 4, "uint8": 8, "bfloat16": 16, "float16": 16}  # of a model; others have 32
_WORK_BITS = {"uint4": 8, "uint8": 8}  # of a finished layer


def model_bytes(spec: Any, more_bits: float = 0) -> int:
    """Of the engine's own file of a model; `more_bits`: that its weights have beside their
    formats."""
    return math.ceil((_bits(required_of(spec), _STORED_BITS) + more_bits) / 8)


def check_space(spec: Any, needed: int, output: Path, work: Path) -> None:
    """Raises OSError unless there is room for the finished layers, without those that `work` has
    already, and for the `needed` bytes of the model."""
    layers = [tensor for tensor in required_of(spec) if tensor.name.startswith("layers.")]
    used = sum(path.stat().st_size for path in work.glob("*")) if work.is_dir() else 0
    needed = max(needed + _bits(layers, _WORK_BITS) // 8 - used, 0)
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OSError(f"output is {str(output)!r}, with {free} bytes free; {needed} are needed")


def _bits(tensors: list[RequiredTensor], of_type: Mapping[str, int]) -> int:
    return sum(math.prod(tensor.shape) * of_type.get(tensor.dtype, 32) for tensor in tensors)


def check_others(source: LayerSource) -> None:
    """Raises ValueError if a tensor outside the layers is not finite; names it and the place."""
    for part, rows in read_rows(source.others(), source.spec):
        check_finite(part.rule.target, rows, part.row_begin)
