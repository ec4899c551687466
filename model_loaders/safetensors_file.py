"""Reads the header of a safetensors file and trusts nothing in it.

Every field is checked before a byte of data is used, so for a damaged or hostile file the error
names the file, the tensor and the offset. The data itself is read later, through TensorEntry.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .storage import ELEMENT_TYPES, MappedFile, TensorEntry, checked_shape

# The limit of the format's own implementation.
MAX_HEADER_BYTES = 100_000_000

# Names of element types in headers, and ours.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def read_safetensors(path: Path) -> list[TensorEntry]:
    """The tensors of a file in the order of their data."""
    file = MappedFile(path)
    header, data_begin = _read_header(file)
    entries = [
        _entry(file, name, fields, data_begin)
        for name, fields in header.items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_coverage(file, entries, data_begin)
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise CheckpointError(f"{key!r} appears twice")
        result[key] = value
    return result


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.size < 8:
        raise CheckpointError(f"{file.path}: {file.size} bytes, too short for a safetensors file")
    with open(file.path, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file.path}: offset 0: header length is {length}, the format's limit is "
                f"{MAX_HEADER_BYTES}; "
                "not a safetensors file, or damaged"
            )
        if length > file.size - 8:
            raise CheckpointError(
                f"{file.path}: offset 0: header length is {length}, but {file.size - 8} bytes "
                "follow; truncated?"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: header: {error.message}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also a number with too many digits
        raise CheckpointError(f"{file.path}: offset 8: header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.path}: offset 8: header is not a JSON object")
    return header, 8 + length


def _entry(file: MappedFile, name: str, fields: Any, data_begin: int) -> TensorEntry:
    where = f"{file.path}: tensor {name!r}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise CheckpointError(f"{where}: header entry lacks dtype, shape or data_offsets")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{where} has dtype {fields['dtype']!r}, known are {', '.join(DTYPES)}"
        )
    shape = checked_shape(fields["shape"], where)
    offsets = fields["data_offsets"]
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(isinstance(x, int) and not isinstance(x, bool) for x in offsets)
    ):
        raise CheckpointError(f"{where} has data_offsets {offsets!r}, expected two integers")
    begin, end = offsets
    data_bytes = file.size - data_begin
    if not 0 <= begin <= end <= data_bytes:
        raise CheckpointError(
            f"{where} has data_offsets [{begin}, {end}], outside the {data_bytes} bytes of data; "
            "truncated?"
        )
    expected = math.prod(shape) * ELEMENT_TYPES[dtype].itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{where} has {end - begin} bytes at offset {data_begin + begin}, "
            f"but {fields['dtype']} {list(shape)} takes {expected}"
        )
    return TensorEntry(name, dtype, shape, file, data_begin + begin, expected)


def _check_coverage(file: MappedFile, entries: list[TensorEntry], data_begin: int) -> None:
    """The data must follow each other without overlap or gap, to the end of the file."""
    position = data_begin
    for entry in entries:
        if entry.offset != position:
            problem = (
                "overlaps the tensor before it"
                if entry.offset < position
                else "leaves a hole before it"
            )
            raise CheckpointError(
                f"{entry.where} at offset {entry.offset} {problem} (expected {position})"
            )
        position += entry.nbytes
    if position != file.size:
        raise CheckpointError(
            f"{file.path}: data ends at offset {position}, but the file has {file.size} bytes; "
            "truncated or damaged"
        )
