"""What the checkpoint readers share: element types, mapped files, and a tensor's place in one.

A file is mapped read-only and tensors are views of the mapping. After a tensor was used its pages
are released, so a conversion holds one source tensor at a time, however large the checkpoint. A
file that becomes shorter meanwhile is an error, not the end of the process.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .errors import CheckpointError
from .files import check_no_pointer, file_size
from .native import native

# Element types that a checkpoint may have, and the NumPy type of their bytes. NumPy has no bfloat16
# and no float8: their bits are unsigned integers, with the name of the type beside them.
ELEMENT_TYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3": np.dtype("u1"),
    "float8_e5m2": np.dtype("u1"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint64": np.dtype("<u8"),
    "uint32": np.dtype("<u4"),
    "uint16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("u1"),
}

# Those of weights and scales that are not quantised; the writer converts them to the stored type.
FLOATS = ("float32", "float16", "bfloat16")

# Tensors of models have few dimensions; more mean a damaged header.
MAX_RANK = 8

# A weight and a copy of it are compared this many elements at a time.
_COMPARED_ELEMENTS = 1 << 20


class MappedFile:
    """A file that is mapped when its first tensor is read. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = file_size(path)
        check_no_pointer(path)
        self._map: mmap.mmap | None = None
        self._watch: Any = None

    def map(self) -> mmap.mmap:
        """The mapping; what is read of it is used under ``checked`` alone."""
        if self._map is None:
            size = file_size(self.path)
            if size < self.size:
                raise CheckpointError(f"{self.path}: became shorter ({self.size} -> {size} bytes)")
            with open(self.path, "rb") as file:
                try:
                    # Of the size that was looked at: a file that grows is another one's work.
                    self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
                except ValueError:
                    raise CheckpointError(f"{self.path}: became shorter") from None
                except OSError as error:
                    raise CheckpointError(f"{self.path}: {_no_mapping(size, error)}") from None
            self._watch = native().MappingWatch(self._map)
        return self._map

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Where the file became shorter while the body read it, that is the error, not what the
        body made of the zeros in its place."""
        try:
            yield
        finally:
            if self._watch is not None and self._watch.broken:
                raise CheckpointError(
                    f"{self.path}: became shorter, or could not be read, while it was being read"
                )

    def release_pages(self, begin: int, end: int) -> None:
        """Releases the pages of [begin, end); they may still be read again."""
        if self._map is None:
            return
        first = begin - begin % mmap.PAGESIZE
        last = min(end, len(self._map))
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor. ``strides`` are in elements; None: row-major without gaps."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int  # bytes, from the beginning of the file
    nbytes: int  # from the first element to the end of the last
    strides: tuple[int, ...] | None = None
    # True: a matrix is [out_features, in_features] even if its module usually stores the transpose.
    has_outputs_first: ClassVar[bool] = False

    @property
    def where(self) -> str:
        return f"{self.file.path}: tensor {self.name!r}"

    def pieces(self) -> Iterator[tuple[int, TensorEntry]]:
        """Ranges of rows to read at a time, with the first row of each; by default a single one."""
        yield 0, self

    @contextlib.contextmanager
    def open(self) -> Iterator[NDArray[Any]]:
        """The tensor as a C-contiguous array, a view of the file where its layout allows it."""
        with self.file.checked():
            try:
                yield self._array()
            finally:
                self.file.release_pages(self.offset, self.offset + self.nbytes)

    def _array(self) -> NDArray[Any]:
        element = ELEMENT_TYPES[self.dtype]
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, element)
        count = self.nbytes // element.itemsize
        flat = np.frombuffer(self.file.map(), element, count, self.offset)
        if self.strides is None:
            array = flat.reshape(self.shape)
        else:
            byte_strides = tuple(stride * element.itemsize for stride in self.strides)
            array = np.lib.stride_tricks.as_strided(flat, self.shape, byte_strides, writeable=False)
        # A copy is made only of a tensor saved transposed, or at an unaligned address of the file.
        return np.require(array, requirements=["C", "A"])


Tensors = Mapping[str, TensorEntry]  # by name


def _no_mapping(size: int, error: OSError) -> str:
    """Why a file of ``size`` bytes is not mapped."""
    text = f"{size} bytes cannot be mapped: {error.strerror}"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if error.errno == errno.ENOMEM and limit != resource.RLIM_INFINITY:
        text += f"; the limit of address space (ulimit -v) is {limit} bytes"
    return text


@dataclass(frozen=True)
class OutputsFirst(TensorEntry):
    """A matrix that is [out_features, in_features] although those of its module usually are not."""

    has_outputs_first: ClassVar[bool] = True


def as_float32(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The values of a float32, float16 or bfloat16 array, exactly."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def round_float32(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rounds finite float32 values to the nearest value of ``dtype``; returns float32."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return values


def same_values(copy: TensorEntry, original: TensorEntry) -> bool:
    """Whether ``copy``, of the same shape, is ``original`` in the precision of the copy. Reads no
    further than the first difference, and nothing where both are one tensor of the file.
    """
    if replace(copy, name=original.name) == original:
        return True
    with copy.open() as ours, original.open() as theirs:
        ours, theirs = ours.reshape(-1), theirs.reshape(-1)
        for begin in range(0, len(ours), _COMPARED_ELEMENTS):
            part = slice(begin, begin + _COMPARED_ELEMENTS)
            expected = round_float32(as_float32(theirs[part], original.dtype), copy.dtype)
            if not np.array_equal(as_float32(ours[part], copy.dtype), expected):
                return False
    return True


def checked_shape(value: Any, where: str) -> tuple[int, ...]:
    """``value`` as a shape: at most MAX_RANK dimensions, none negative, and the product of those
    that are not 0 below 2^59, so that the bytes can be counted even of the largest type.
    """
    if not isinstance(value, (list, tuple)) or len(value) > MAX_RANK:
        raise CheckpointError(
            f"{where} has shape {shorten(value)}, expected at most {MAX_RANK} dimensions"
        )
    for dimension in value:
        if isinstance(dimension, bool) or not isinstance(dimension, int) or dimension < 0:
            raise CheckpointError(
                f"{where} has shape {shorten(value)}, expected dimensions of 0 or more"
            )
    if math.prod(dimension or 1 for dimension in value) >= 1 << 59:
        raise CheckpointError(f"{where} has shape {shorten(value)}: too many elements")
    return tuple(value)


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
