"""Reads PyTorch ``.bin`` checkpoints without torch: the zip form that torch.save has written since
1.6, and the older form, five pickles followed by the data.

A pickle is a program. Here it is run by a small interpreter that knows the dozen operations a
state dict needs and can call only the functions below. Anything else that a file asks for is
refused by name, and is never imported or executed. Messages quote its objects shortened (reprlib):
a few bytes can describe an object whose full text would not fit into memory. The data of tensors is
not in the pickle; it stays in the file and is mapped.
"""

from __future__ import annotations

import math
import pickletools
import reprlib
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from .errors import CheckpointError
from .storage import ELEMENT_TYPES, MappedFile, TensorEntry, checked_shape

# The pickle holds names and shapes only; 700 tensors take about 100 KB and 22,000 operations. An
# operation of one byte can make an object of 64 bytes and a place for it.
MAX_PICKLE_BYTES = 64 << 20
MAX_OPERATIONS = 4 << 20

# The older form begins with two pickles: this number and a version.
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
# The first byte of every pickle of protocol 2 or later.
_PICKLE_BEGIN = b"\x80"

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str
    num_elements: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int  # elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(Exception):
    """The pickle uses something that a state dict does not need."""


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise _Refused("a tensor without a storage")
    numbers = (offset, *size, *stride)
    if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in numbers) or len(
        size
    ) != len(stride):
        raise _Refused(f"a tensor with the layout {reprlib.repr((offset, size, stride))}")
    return _Tensor(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: Any, *_: Any) -> _Tensor:
    if not isinstance(data, _Tensor):
        raise _Refused("a parameter without a tensor")
    return data


def _ordered_dict(*args: Any) -> OrderedDict[Any, Any]:
    if args and args != ([],):
        raise _Refused("an OrderedDict with arguments")
    return OrderedDict()


_CALLABLE: dict[str, Callable[..., Any]] = {
    "torch._utils _rebuild_tensor": _rebuild_tensor,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "collections OrderedDict": _ordered_dict,
}


def _find_global(name: str) -> Any:
    if name in _CALLABLE:
        return _CALLABLE[name]
    module, _, attribute = name.partition(" ")
    if module in ("torch", "torch.storage") and attribute in _STORAGES:
        return _StorageType(_STORAGES[attribute])
    raise _Refused(
        f"the global {name.replace(' ', '.')!r}, which a table of weights has no need of"
    )


def _load_storage(reference: Any) -> _Storage:
    # The older form has one more field: the storage that this one is a part of.
    if (
        not isinstance(reference, tuple)
        or len(reference) not in (5, 6)
        or reference[0] != "storage"
        or reference[5:] not in ((), (None,))
    ):
        raise _Refused(f"a persistent object {reprlib.repr(reference)}")
    _, kind, key, _, count, *_ = reference
    if (
        not isinstance(kind, _StorageType)
        or not isinstance(key, str)
        or not isinstance(count, int)
        or count < 0
    ):
        raise _Refused(f"a storage {reprlib.repr(reference)}")
    return _Storage(key, kind.dtype, count)


_MARK = object()


class _Machine:
    """The stack machine: one method for each operation that changes the stack."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.operations = 0

    def run(self, data: bytes | _Pickles) -> Any:
        """Runs one pickle; in a stream, the one at the current position."""
        for opcode, argument, _ in pickletools.genops(cast(Any, data)):
            name = opcode.name
            self.operations += 1
            if self.operations > MAX_OPERATIONS:
                raise _Refused(f"more than {MAX_OPERATIONS} operations")
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                return self.stack.pop()
            if name in _PUSH_ARGUMENT:
                self.stack.append(argument)
            elif name in _PUSH_NEW:
                self.stack.append(_PUSH_NEW[name]())
            else:
                operation = _OPERATIONS.get(name)
                if operation is None:
                    raise _Refused(f"the pickle operation {name}")
                operation(self, argument)
        raise _Refused("a pickle without an end")

    def _since_mark(self) -> list[Any]:
        for position in range(len(self.stack) - 1, -1, -1):
            if self.stack[position] is _MARK:
                items = self.stack[position + 1 :]
                del self.stack[position:]
                return items
        raise _Refused("an operation without its mark")

    def _tuple(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise _Refused("an operation without its operands")
        del self.stack[-count:]
        self.stack.append(items)

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if function not in _CALLABLE.values() or not isinstance(arguments, tuple):
            raise _Refused(f"a call of {reprlib.repr(function)}")
        self.stack.append(function(*arguments))

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _Refused("items set on something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a deeply nested tuple as a key could take forever.
            if not isinstance(key, (str, int)):
                raise _Refused(f"a key of type {type(key).__name__}")
            if isinstance(key, str) and isinstance(value, _Tensor) and key in target:
                raise _Refused(f"the key {key!r} twice")
            target[key] = value

    def _append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _Refused("items appended to something that is no list")
        self.stack[-1].extend(items)

    def _build(self) -> None:
        # The only state in a state dict is the versions of its modules, which do not matter for
        # weights.
        self.stack.pop()
        if not isinstance(self.stack[-1], OrderedDict):
            raise _Refused("state given to something that is no OrderedDict")

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_find_global(f"{module} {name}"))


# Python 2 wrote BINSTRING and SHORT_BINSTRING.
_PUSH_ARGUMENT = {
    "BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINSTRING", "SHORT_BINSTRING",
}  # fmt: skip
_PUSH_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "GLOBAL": lambda m, name: m.stack.append(_find_global(name)),
    "STACK_GLOBAL": lambda m, _: m._stack_global(),
    "BINPERSID": lambda m, _: m.stack.append(_load_storage(m.stack.pop())),
    "REDUCE": lambda m, _: m._reduce(),
    "BUILD": lambda m, _: m._build(),
    "BINPUT": lambda m, index: m._put(index),
    "LONG_BINPUT": lambda m, index: m._put(index),
    "MEMOIZE": lambda m, _: m._put(len(m.memo)),
    "BINGET": lambda m, index: m.stack.append(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.stack.append(m.memo[index]),
    "TUPLE": lambda m, _: m.stack.append(tuple(m._since_mark())),
    "TUPLE1": lambda m, _: m._tuple(1),
    "TUPLE2": lambda m, _: m._tuple(2),
    "TUPLE3": lambda m, _: m._tuple(3),
    "SETITEM": lambda m, _: m._set_items([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, _: m._set_items(m._since_mark()),
    "APPEND": lambda m, _: m._append([m.stack.pop()]),
    "APPENDS": lambda m, _: m._append(m._since_mark()),
}


class _Pickles:
    """The pickles at the beginning of a file, in the form that pickletools reads."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, count: int) -> bytes:
        if self.tell() + count > MAX_PICKLE_BYTES:
            raise _Refused(f"more than {MAX_PICKLE_BYTES} bytes of pickles")
        return self._stream.read(count)

    def readline(self) -> bytes:
        return self._stream.readline(max(MAX_PICKLE_BYTES - self.tell(), 0))


def read_pickle(path: Path) -> list[TensorEntry]:
    """The tensors of a ``.bin`` file in the order of their data."""
    file = MappedFile(path)
    with open(path, "rb") as stream:
        is_legacy = stream.read(len(_PICKLE_BEGIN)) == _PICKLE_BEGIN
    try:
        table, places = _read_legacy(file) if is_legacy else _read_zip(file)
    except zipfile.BadZipFile as error:
        if tarfile.is_tarfile(path):
            raise CheckpointError(
                f"{path}: a tar archive, as PyTorch wrote before 0.2; save it again as safetensors"
            ) from None
        raise CheckpointError(f"{path}: in neither of PyTorch's forms: {error}; damaged?") from None
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, EOFError, OSError, struct.error) as error:
        raise CheckpointError(f"{path}: the archive cannot be read: {error}") from None
    entries = [
        _entry(file, name, tensor, *places[tensor.storage.key]) for name, tensor in table.items()
    ]
    entries.sort(key=lambda entry: entry.offset)
    return entries


# The place of each storage's data: first byte and number of bytes, by the storage's key.
_Places = dict[str, tuple[int, int]]


def _read_zip(file: MappedFile) -> tuple[dict[str, _Tensor], _Places]:
    path = file.path
    places: _Places = {}
    with zipfile.ZipFile(path) as archive:
        members = _members(archive, path)
        table = _run(archive.read(members["data.pkl"]), path, "data.pkl")
    for name, tensor in table.items():
        key = tensor.storage.key
        if key in places:
            continue
        member = members.get(f"data/{key}")
        if member is None:
            raise CheckpointError(
                f"{path}: tensor {name!r}: its data, member {f'data/{key}'!r}, is missing from "
                "the archive"
            )
        places[key] = _data_begin(file, member), member.file_size
    return table, places


def _read_legacy(file: MappedFile) -> tuple[dict[str, _Tensor], _Places]:
    """The form before 1.6: five pickles (a number, a version, the machine, the state dict, the keys
    of its storages), then for each key the number of elements and the elements.
    """
    path = file.path
    with open(path, "rb") as stream:
        pickles = _Pickles(stream)
        if _value(pickles, path, "its first pickle") != _LEGACY_MAGIC:
            raise CheckpointError(
                f"{path}: a pickle, but not one of torch.save's; expected a model's state dict"
            )
        version = _value(pickles, path, "its version")
        if version != _LEGACY_VERSION:
            raise CheckpointError(
                f"{path}: version {reprlib.repr(version)} of PyTorch's form before 1.6, expected "
                f"{_LEGACY_VERSION}"
            )
        machine = _value(pickles, path, "its description of the machine")
        if not isinstance(machine, dict) or machine.get("little_endian") is not True:
            raise CheckpointError(f"{path}: the data is not little-endian")
        table = _run(pickles, path, "its state dict")
        keys = _value(pickles, path, "its list of storages")
        storages = {tensor.storage.key: tensor.storage for tensor in table.values()}
        if (
            not isinstance(keys, list)
            or not all(isinstance(key, str) for key in keys)
            or sorted(keys) != sorted(storages)
        ):
            raise CheckpointError(
                f"{path}: its list of storages is not that of its tensors' {len(storages)}"
            )
        places: _Places = {}
        begin = stream.tell()
        for key in keys:
            item = ELEMENT_TYPES[storages[key].dtype].itemsize
            stream.seek(begin)
            raw = stream.read(8)
            count = struct.unpack("<q", raw)[0] if len(raw) == 8 else -1
            if count != storages[key].num_elements or begin + 8 + count * item > file.size:
                raise CheckpointError(
                    f"{path}: offset {begin}: storage {key!r} should have "
                    f"{storages[key].num_elements} elements, the file has {count} in "
                    f"{file.size - begin - 8} bytes; truncated or damaged"
                )
            places[key] = begin + 8, count * item
            begin += 8 + count * item
    if begin != file.size:
        raise CheckpointError(
            f"{path}: data ends at offset {begin}, but the file has {file.size} bytes"
        )
    return table, places


def _members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """The archive's members, by name without the leading folder."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.partition("/")[2]
        if name in members:
            raise CheckpointError(f"{path}: member {info.filename!r} appears twice")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(f"{path}: member {info.filename!r} is compressed or encrypted")
        members[name] = info
    if "constants.pkl" in members:
        raise CheckpointError(
            f"{path}: a TorchScript program, which holds code; expected a table of tensors (a "
            "model's state dict)"
        )
    if "data.pkl" not in members:
        raise CheckpointError(
            f"{path}: a zip file, but not one of PyTorch's: member 'data.pkl' is missing"
        )
    if members["data.pkl"].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: member 'data.pkl' is larger than {MAX_PICKLE_BYTES} bytes")
    if "byteorder" in members and archive.read(members["byteorder"]).strip() != b"little":
        raise CheckpointError(f"{path}: the data is not little-endian")
    return members


def _value(data: bytes | _Pickles, path: Path, what: str) -> Any:
    try:
        return _Machine().run(data)
    except _Refused as error:
        raise CheckpointError(f"{path}: refused: {what} asks for {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {what} is damaged: {error!r}") from None


def _run(data: bytes | _Pickles, path: Path, what: str) -> dict[str, _Tensor]:
    """The tensors in a pickle; ``what`` is its name in messages."""
    value = _value(data, path, what)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type(value).__name__}, expected a table of tensors"
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is no tensor; expected a flat table of tensors (a model's "
                "state dict)"
            )
    return value


def _data_begin(file: MappedFile, member: zipfile.ZipInfo) -> int:
    """The position of a stored member's bytes: after its local header, whose name and extra field
    vary in length.
    """
    where = f"{file.path}: member {member.filename!r}"
    with open(file.path, "rb") as stream:
        stream.seek(member.header_offset)
        header = stream.read(30)
    if len(header) != 30 or header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{where}: no local header at offset {member.header_offset}")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    begin: int = member.header_offset + 30 + name_bytes + extra_bytes
    if begin + member.file_size > file.size:
        raise CheckpointError(
            f"{where}: ends at offset {begin + member.file_size}, past the end of the file"
        )
    return begin


def _entry(file: MappedFile, name: str, tensor: _Tensor, begin: int, size: int) -> TensorEntry:
    where = f"{file.path}: tensor {name!r}"
    shape = checked_shape(tensor.shape, where)
    item = ELEMENT_TYPES[tensor.storage.dtype].itemsize
    if tensor.storage.num_elements * item > size:
        raise CheckpointError(
            f"{where}: its storage should have {tensor.storage.num_elements * item} bytes, the "
            f"archive has {size}"
        )
    empty = math.prod(shape) == 0
    span = (
        0
        if empty
        else 1 + sum((n - 1) * stride for n, stride in zip(shape, tensor.strides, strict=True))
    )
    if tensor.offset + span > tensor.storage.num_elements:
        raise CheckpointError(
            f"{where}: elements {tensor.offset} to {tensor.offset + span} of a storage of "
            f"{tensor.storage.num_elements}"
        )
    # A stride of 0 would make any number of elements of one, and reading them is a copy.
    if math.prod(shape) > tensor.storage.num_elements:
        raise CheckpointError(
            f"{where} has {math.prod(shape)} elements; its storage has "
            f"{tensor.storage.num_elements}"
        )
    row_major = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    contiguous = empty or all(
        n == 1 or a == b for n, a, b in zip(shape, tensor.strides, row_major, strict=True)
    )
    strides = None if contiguous else tensor.strides
    return TensorEntry(
        name, tensor.storage.dtype, shape, file, begin + tensor.offset * item, span * item, strides
    )
