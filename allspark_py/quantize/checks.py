"""What is checked before layers are quantised, which may take hours."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from allspark.model_loader.convert import Plan, read_rows
from allspark.model_loader.native import required_of
from allspark.quantize.arrays import check_finite
from allspark.quantize.layers import LayerSource

_STORED_BITS = {"uint4": 4, "uint8": 8, "bfloat16": 16, "float16": 16}  # of a model; others have 32
_WORK_BITS = {"uint4": 8, "uint8": 8}  # of a finished layer


def check_space(plan: Plan, output: Path, work: Path) -> None:
    """Raises OSError unless there is room for the finished layers, without those that `work` has
    already, and for the model."""
    bits = 0
    for tensor in required_of(plan.spec):
        of_element = _STORED_BITS.get(tensor.dtype, 32)
        if tensor.name.startswith("layers."):
            of_element += _WORK_BITS.get(tensor.dtype, 32)
        bits += math.prod(tensor.shape) * of_element
    used = sum(path.stat().st_size for path in work.glob("*")) if work.is_dir() else 0
    needed = max(bits // 8 - used, 0)
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OSError(f"output is {str(output)!r}, with {free} bytes free; {needed} are needed")


def check_others(source: LayerSource) -> None:
    """Raises ValueError if a tensor outside the layers is not finite; names it and the place."""
    for part, rows in read_rows(source.others(), source.spec):
        check_finite(part.rule.target, rows, part.row_begin)
