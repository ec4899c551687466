"""blocked_fp8(): writes a checkpoint whose weights are float8 numbers (E4M3) with a scale for every
square of rows and columns, as DeepSeek-V3's checkpoints are. No text is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from allspark.eval.accuracy import remove_accuracy
from allspark.model_loader.native import required_of
from allspark.model_loader.quantized.e4m3 import E4M3_VALUES
from allspark.model_loader.spec import find_architecture
from allspark.model_loader.storage import TensorEntry, as_float32
from allspark.quantize.arrays import Floats, check_finite
from allspark.quantize.export_check import module_problem
from allspark.quantize.export_files import Output, check_directory, write_checkpoint
from allspark.quantize.export_places import Place, places_of
from allspark.quantize.source import check_floats, check_output, open_checkpoint
from numpy.typing import NDArray

BLOCK_SIZE = 128
_CODES = 127  # of numbers that are not negative
_POSITIVE = E4M3_VALUES[:_CODES].astype(np.float64)
_LARGEST = np.float32(_POSITIVE[-1])
_MIDDLES = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2
_NEGATIVE = np.uint8(128)  # the bit of the sign


def blocked_fp8(
    model: str,
    work_dir: str = "./work_dir",
    quant_dtype: str = "fp8",
    block_size: int = BLOCK_SIZE,
    dtype: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    trust_remote_code: bool = False,
    *,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> list[Path]:
    """Rounds the layers' weights to float8; all else keeps its bytes. Returns the files.

    Args:
        model: a checkpoint in floats.
        work_dir: the directory of the new checkpoint.
        quant_dtype: `fp8` or `float8_e4m3fn`, which are the same.
        block_size: rows, and columns, that share a scale.
        dtype: has no effect.
        progress: called at the end.

    Raises:
        TypeError, ValueError: an argument, or a weight that no such checkpoint can hold; the
            message says which, and the bound. OSError: files cannot be read or written.
    """
    del dtype
    if quant_dtype not in ("fp8", "float8_e4m3fn"):
        raise ValueError(f"quant_dtype is {quant_dtype!r}; it must be 'fp8' or 'float8_e4m3fn'")
    if block_size not in (32, 64, 128, 256):
        raise ValueError(f"block_size is {block_size!r}; it must be 32, 64, 128 or 256")
    loader = open_checkpoint(model, None, "bfloat16", trust_remote_code, revision, download_dir)
    check_floats(loader)
    output = check_output(work_dir, loader)
    plan = loader.plan()
    weights = {tensor.name for tensor in required_of(plan.spec) if tensor.quantizable}
    places = places_of(plan)
    modules = {}
    for place in places:
        if place.layer is None or place.target not in weights:
            continue
        problem = module_problem(place, multiple=1)
        if problem is not None:
            raise ValueError(f"{place.name!r} of {plan.spec.architecture} {problem}")
        modules[place.name] = place.module
    architecture = find_architecture(plan.spec.architecture)
    tensors = architecture.full_names(loader.checkpoint_tensors())
    outputs: list[Output] = []
    left = []
    for name, entry in tensors.items():
        if name in modules:
            outputs += _float8(modules[name], entry, block_size)
            continue
        outputs.append(Output.copied(name, entry))
        if len(entry.shape) == 2 and name.endswith(".weight"):
            left.append(name.removesuffix(".weight"))
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block_size, block_size],
        "modules_to_not_convert": [*left, "lm_head"],
    }
    check_directory(loader, config, outputs, output)
    _check_finite(places)
    paths = write_checkpoint(loader, config, outputs, output)
    remove_accuracy(output)
    progress(plan.spec.num_layers, plan.spec.num_layers)
    return paths


def _check_finite(places: Iterable[Place]) -> None:
    """Raises ValueError if a tensor of the model is not finite; names it and the place in it."""
    for place in places:
        source = place.part.source
        with source.open() as array:
            check_finite(place.name, as_float32(array, source.dtype))


def _float8(module: str, entry: TensorEntry, block_size: int) -> list[Output]:
    rows, cols = entry.shape

    def scaled() -> tuple[Floats, Floats]:
        with entry.open() as array:
            weight = np.array(as_float32(array, entry.dtype))
        return weight, block_scales(weight, block_size)

    def codes() -> NDArray[np.uint8]:
        weight, scales = scaled()
        by_row, by_column = np.arange(rows) // block_size, np.arange(cols) // block_size
        weight /= scales[by_row][:, by_column]
        return round_e4m3(weight)

    shape = (-(-rows // block_size), -(-cols // block_size))
    return [
        Output(f"{module}.weight", "float8_e4m3", (rows, cols), codes),
        Output(f"{module}.weight_scale_inv", "float32", shape, lambda: scaled()[1]),
    ]


def block_scales(weight: Floats, block_size: int) -> Floats:
    """The scale of each block: its largest weight becomes the largest float8 number."""
    rows, cols = weight.shape
    down, across = range(0, rows, block_size), range(0, cols, block_size)
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(weight), down), across, axis=1)
    return np.where(largest == 0, np.float32(1), largest / _LARGEST)


def round_e4m3(values: Floats) -> NDArray[np.uint8]:
    """The codes of the nearest float8 numbers, ties to even; what is larger becomes the largest."""
    magnitude = np.minimum(np.abs(values), _LARGEST).astype(np.float64)
    code = np.searchsorted(_MIDDLES, magnitude)  # in a tie, the lower of both
    is_tie = magnitude == _MIDDLES[np.minimum(code, len(_MIDDLES) - 1)]
    code += is_tie & (code % 2 == 1)
    return np.where(np.signbit(values), code + _NEGATIVE, code).astype(np.uint8)
