"""Writes a checkpoint in Hugging Face layout, one tensor in memory at a time. A large one becomes
several files with an index.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from allspark.model_loader import HuggingFaceModel
from allspark.model_loader.config import ModelConfig
from allspark.model_loader.safetensors_file import DTYPES
from allspark.model_loader.serialised import Companions
from allspark.model_loader.spec import model_type_of
from allspark.model_loader.storage import ELEMENT_TYPES, TensorEntry, round_float32
from allspark.quantize.source import check_no_others
from allspark.whole_file import temporary_file
from numpy.typing import NDArray

MAX_SHARD_BYTES = 4_000_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMES = {own: name for name, own in DTYPES.items()}


@dataclass(frozen=True)
class Output:
    """A tensor to be written: `make` returns its array when its turn has come."""

    name: str
    dtype: str  # of storage.ELEMENT_TYPES
    shape: tuple[int, ...]
    make: Callable[[], NDArray[Any]]

    @classmethod
    def copied(cls, name: str, entry: TensorEntry) -> Output:
        """A tensor of another checkpoint, with its bytes."""

        def read() -> NDArray[Any]:
            with entry.open() as array:
                return np.array(array)

        return cls(name, entry.dtype, entry.shape, read)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_TYPES[self.dtype].itemsize


def stored_as(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Rounded to the nearest value of a type, in the form of storage.ELEMENT_TYPES."""
    rounded = round_float32(values, dtype)
    if dtype == "bfloat16":
        return (rounded.view(np.uint32) >> 16).astype(ELEMENT_TYPES[dtype])
    return rounded.astype(ELEMENT_TYPES[dtype])


def write_checkpoint(
    loader: HuggingFaceModel,
    quantization_config: Mapping[str, Any],
    outputs: Sequence[Output],
    output: Path,
) -> list[Path]:
    """Writes the tensors, with config.json, tokenizer and, if it is trusted, the code of the
    loader's checkpoint. Returns the files with weights.

    Raises:
        ValueError: check_directory refuses. OSError: files cannot be written.
    """
    check_directory(loader, quantization_config, outputs, output)
    output.mkdir(parents=True, exist_ok=True)
    with _companions(loader, quantization_config, output).written():
        return write_files(outputs, output)


def check_directory(
    loader: HuggingFaceModel,
    quantization_config: Mapping[str, Any],
    outputs: Sequence[Output],
    output: Path,
) -> None:
    """Raises where the directory holds another model. Files of weights that have the names of ours
    are replaced only beside the same config.json and tokenizer: they are of an earlier result."""
    check_no_others(output, _names(len(_shards(outputs, MAX_SHARD_BYTES))))
    _companions(loader, quantization_config, output).check()


def _companions(
    loader: HuggingFaceModel, quantization_config: Mapping[str, Any], output: Path
) -> Companions:
    fields = loader.get_model_config() | {"quantization_config": dict(quantization_config)}
    # A GGUF file has architectures alone, and other programs ask for the type.
    kind = model_type_of(ModelConfig(fields).architecture())
    if kind is not None:
        fields.setdefault("model_type", kind)
    made = loader.made_companions() | {"config.json": json.dumps(fields, indent=2) + "\n"}
    config, graph = ModelConfig(fields), output / _SINGLE
    return Companions(loader.directory, output, config, graph, made, loader.trust_remote_code)


def write_files(
    outputs: Sequence[Output], directory: Path, max_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Writes `model.safetensors`, or shards of at most `max_bytes` where it would be larger (one
    tensor is never split). Files get their names when all are complete.

    Raises:
        OSError: there is not enough space.
    """
    shards = _shards(outputs, max_bytes)
    written = _names(len(shards))
    _check_space(directory, sum(output.nbytes for output in outputs))
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(temporary_file(directory, name)) for name in written]
        for file, shard in zip(files, shards, strict=False):
            _write(file, shard)
        if len(shards) > 1:
            files[-1].write(_index(written, shards).encode())
            files[-1].flush()
        for file, name in zip(files, written, strict=True):
            os.replace(file.name, directory / name)
    return [directory / name for name in written]


def _shards(outputs: Sequence[Output], max_bytes: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    used = 0
    for output in outputs:
        if shards[-1] and used + output.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(output)
        used += output.nbytes
    return shards


def _names(num_shards: int) -> list[str]:
    """Of the files: those of the shards, then of the index where there are several."""
    if num_shards == 1:
        return [_SINGLE]
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    return [*names, _INDEX]


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"output is {str(directory)!r}, with {free} bytes free; {needed} are needed for the "
            "checkpoint"
        )


def _write(file: BinaryIO, shard: Sequence[Output]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in shard:
        header[output.name] = {
            "dtype": _NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [offset, offset + output.nbytes],
        }
        offset += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for output in shard:
        file.write(_bytes(output).data)
    file.flush()
    os.fsync(file.fileno())


def _bytes(output: Output) -> NDArray[np.uint8]:
    array = output.make()
    if array.shape != output.shape or array.dtype != ELEMENT_TYPES[output.dtype]:
        raise AssertionError(
            f"{output.name} was made as {array.dtype} {array.shape}, expected {output.dtype} "
            f"{output.shape}"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _index(names: Sequence[str], shards: Sequence[Sequence[Output]]) -> str:
    total = sum(output.nbytes for shard in shards for output in shard)
    weight_map = {
        output.name: name for name, shard in zip(names, shards, strict=False) for output in shard
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2)
