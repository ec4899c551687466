"""Reads the headers of GGUF files and trusts nothing in them.

Every field is checked before it is used, so for a damaged or hostile file the error names the file
and the offset or the tensor. The data itself is read later, through TensorEntry.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspark.error_text import needs_extra

from ..errors import CheckpointError, CheckpointNotFoundError, ModelSerializerException
from ..storage import MappedFile, TensorEntry

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_RANK = 4
# Keys and names are identifiers.
_MAX_NAME_BYTES = 1 << 16
# Most of a header is the vocabulary: with the 262,144 tokens of Gemma 3, arrays of 786,432
# elements; some files have all of tokenizer.json, too. In Python an element takes up to 100 bytes,
# a tensor 700 (tracemalloc).
_MAX_HEADER_BYTES = 256 << 20
_MAX_ELEMENTS = 4 << 20  # of all arrays
_MAX_RECORDS = 1 << 17  # keys, and as many tensors; kMaxTensorRecords of csrc/weights/format.h

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class BlockType:
    """How ``elements`` consecutive values of a row are stored in ``nbytes`` bytes."""

    code: int
    name: str
    elements: int
    nbytes: int


# The types that are read here. The package 'gguf' knows the others.
_BLOCK_TYPES = {
    block.code: block
    for block in (
        BlockType(0, "F32", 1, 4),
        BlockType(1, "F16", 1, 2),
        BlockType(30, "BF16", 1, 2),
        BlockType(2, "Q4_0", 32, 18),
        BlockType(3, "Q4_1", 32, 20),
        BlockType(6, "Q5_0", 32, 22),
        BlockType(7, "Q5_1", 32, 24),
        BlockType(8, "Q8_0", 32, 34),
        BlockType(10, "Q2_K", 256, 84),
        BlockType(11, "Q3_K", 256, 110),
        BlockType(12, "Q4_K", 256, 144),
        BlockType(13, "Q5_K", 256, 176),
        BlockType(14, "Q6_K", 256, 210),
        BlockType(20, "IQ4_NL", 32, 18),
        BlockType(23, "IQ4_XS", 256, 136),
        BlockType(39, "MXFP4", 32, 17),
        BlockType(40, "NVFP4", 64, 36),
    )
}


@dataclass(frozen=True)
class GgufTensor:
    """``raw`` is uint8 [rows, bytes of a row]; the tensor has ``shape``."""

    block: BlockType
    shape: tuple[int, ...]
    raw: TensorEntry


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file; of several files, the first one's metadata and all tensors."""

    paths: list[Path]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_first(path: Path) -> bool:
    """Whether a file of this name is the first file of a model."""
    shard = _SHARD.fullmatch(path.name)
    return shard is None or int(shard[2]) == 1


def read_gguf(path: Path) -> GgufFile:
    """The file at ``path``; if it is one of several (``-00001-of-00003``), all of them."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return _Reader(path).read()
    stem, _, count = shard.groups()
    paths = [path.with_name(f"{stem}-{i + 1:05d}-of-{count}.gguf") for i in range(int(count))]
    for own in paths:
        if not own.exists():
            raise CheckpointNotFoundError(f"{own}: missing, {path.name} is one of {count} files")
    if not paths:
        raise CheckpointError(f"{path}: a file of none, according to its name")
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for number, own in enumerate(paths):
        part = _Reader(own).read()
        metadata = metadata or part.metadata
        for key, expected in (("split.no", number), ("split.count", len(paths))):
            if part.metadata.get(key) != expected:
                raise CheckpointError(
                    f"{own}: {key} is {part.metadata.get(key)!r}, expected {expected}"
                )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{tensor.raw.where} is also in {tensors[name].raw.file.path}"
                )
            tensors[name] = tensor
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{paths[0]}: split.tensors.count is {total}, but the files hold {len(tensors)}"
        )
    return GgufFile(paths, metadata, tensors)


class _Reader:
    """One pass over a header; ``position`` is never past the end of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        self.data = self.file.map()
        self.position = 0
        self.elements = 0  # of the arrays so far

    def read(self) -> GgufFile:
        with self.file.checked():
            return self._read()

    def _read(self) -> GgufFile:
        num_tensors, num_fields = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._name("a key")
            if key in metadata:
                raise self._error(f"the key {key!r} appears twice")
            metadata[key] = self._value(key, self._number("I", f"the type of {key!r}"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r}, expected a power of two from 8"
            )
        return GgufFile([self.path], metadata, self._tensors(infos, alignment))

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: offset {self.position}: {message}")

    def _take(self, count: int, what: str) -> int:
        """Skips ``count`` bytes; returns the position of the first."""
        left = self.file.size - self.position
        if count > left:
            raise self._error(f"{what} takes {count} bytes, but {left} follow; truncated?")
        if self.position + count > _MAX_HEADER_BYTES:
            raise self._error(
                f"{what} takes {count} bytes; a header has at most {_MAX_HEADER_BYTES}"
            )
        self.position += count
        return self.position - count

    def _number(self, kind: str, what: str) -> Any:
        layout = "<" + kind
        return struct.unpack_from(layout, self.data, self._take(struct.calcsize(layout), what))[0]

    def _text(self, what: str, most: int | None = None) -> str:
        length = self._number("Q", f"the length of {what}")
        if most is not None and length > most:
            raise self._error(f"{what} is of {length} bytes, expected at most {most}")
        begin = self._take(length, what)
        # Tokens of a vocabulary may be parts of characters.
        return self.data[begin : begin + length].decode("utf-8", "replace")

    def _name(self, what: str) -> str:
        return self._text(what, _MAX_NAME_BYTES)

    def _preamble(self) -> tuple[int, int]:
        begin = self._take(4, "the magic")
        magic = self.data[begin : begin + 4]
        if magic != _MAGIC:
            raise CheckpointError(f"{self.path}: offset 0: begins with {magic!r}, not a GGUF file")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            hint = "; big-endian?" if version & 0xFFFF == 0 else ""
            supported = ", ".join(map(str, _VERSIONS))
            raise CheckpointError(
                f"{self.path}: offset 4: GGUF version is {version}, supported are {supported}{hint}"
            )
        return self._count("tensors"), self._count("keys")

    def _count(self, what: str) -> int:
        count: int = self._number("Q", f"the number of {what}")
        if count > _MAX_RECORDS:
            raise self._error(f"there are {count} {what}, expected at most {_MAX_RECORDS}")
        return count

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], repr(key))
        if kind == _STRING:
            return self._text(repr(key))
        if kind != _ARRAY:
            raise self._error(f"{key!r} is of type {kind}, expected 0 to 12")
        item = self._number("I", f"the type of {key!r}")
        count = self._number("Q", f"the size of {key!r}")
        if item in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[item])
            begin = self._take(count * size, repr(key))
            self._add_elements(key, count)
            return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, begin))
        if item != _STRING:
            raise self._error(f"{key!r} is an array of type {item}, expected numbers or strings")
        if 8 * count > self.file.size - self.position:
            raise self._error(f"{key!r} has {count} strings, more than the file; truncated?")
        self._add_elements(key, count)
        return [self._text(repr(key)) for _ in range(count)]

    def _add_elements(self, key: str, count: int) -> None:
        self.elements += count
        if self.elements > _MAX_ELEMENTS:
            raise self._error(
                f"the arrays up to {key!r} have {self.elements} elements, expected at most "
                f"{_MAX_ELEMENTS}"
            )

    def _tensor_info(self) -> tuple[str, list[int], int, int]:
        name = self._name("a tensor's name")
        rank = self._number("I", f"the rank of {name!r}")
        if not 1 <= rank <= _MAX_RANK:
            raise self._error(f"tensor {name!r} has {rank} dimensions, expected 1 to {_MAX_RANK}")
        # The innermost dimension comes first.
        shape = [self._number("Q", f"the shape of {name!r}") for _ in range(rank)][::-1]
        if 0 in shape or math.prod(shape) >= 1 << 62:
            raise self._error(f"tensor {name!r} has shape {shape}")
        kind = self._number("I", f"the type of {name!r}")
        return name, shape, kind, self._number("Q", f"the offset of {name!r}")

    def _tensors(
        self, infos: list[tuple[str, list[int], int, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """Checks that the data of the tensors follow in the order of the header, each one
        aligned."""
        data_begin = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = expected = data_begin
        for name, shape, kind, offset in infos:
            where = f"{self.path}: tensor {name!r}"
            if name in tensors:
                raise CheckpointError(f"{where} appears twice")
            if data_begin + offset != expected:
                raise CheckpointError(
                    f"{where} is at offset {offset} of the data, expected {expected - data_begin}"
                )
            block = _block_type(kind, where)
            if shape[-1] % block.elements:
                raise CheckpointError(
                    f"{where} has rows of {shape[-1]} elements, but {block.name} has blocks of "
                    f"{block.elements}"
                )
            row_bytes = shape[-1] // block.elements * block.nbytes
            rows = math.prod(shape[:-1])
            end = expected + rows * row_bytes
            if end > self.file.size:
                raise CheckpointError(
                    f"{where} ends at offset {end}, but the file has {self.file.size} bytes; "
                    "truncated?"
                )
            raw = TensorEntry(
                name, "uint8", (rows, row_bytes), self.file, expected, rows * row_bytes
            )
            tensors[name] = GgufTensor(block, tuple(shape), raw)
            expected = -(-end // alignment) * alignment
        if self.file.size > expected:
            raise CheckpointError(
                f"{self.path}: data ends at offset {end}, but the file has {self.file.size} bytes; "
                "damaged?"
            )
        return tensors


def _block_type(code: int, where: str) -> BlockType:
    if code in _BLOCK_TYPES:
        return _BLOCK_TYPES[code]
    constants = library(f"{where} is of GGUF type {code}").constants
    try:
        kind = constants.GGMLQuantizationType(code)
        return BlockType(code, kind.name, *constants.GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        raise CheckpointError(f"{where} has GGUF type {code}, which is not known") from None


def library(problem: str) -> Any:
    """The package 'gguf', which knows all block types."""
    try:
        import gguf
        import gguf.constants
        import gguf.quants
    except ImportError as error:
        needed = needs_extra(f"{problem}, which", "gguf")
        raise ModelSerializerException(f"{needed}: {error}") from error
    return gguf
