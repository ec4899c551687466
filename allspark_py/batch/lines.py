"""Lines of an input file: read lazily, bounded in length, and parsed as JSON."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

# As a server's default bound for the body of a request.
MAX_LINE_BYTES = 32 << 20


class LineError(ValueError):
    """A line that cannot be answered, with a code for programs."""

    def __init__(self, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Line:
    """A line that is not blank."""

    number: int  # in its file, from 1; blank lines count
    data: bytes | None  # None: it is longer than MAX_LINE_BYTES

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return len(self.data or b"")

    def parse(self) -> Any:
        """The line's JSON value. Raises LineError where there is none."""
        if self.data is None:
            message = f"the line has more than {MAX_LINE_BYTES} bytes, the bound"
            raise LineError(message, "request_too_large")
        try:
            value = json.loads(
                self.data.decode(),
                parse_constant=_no_number,
                parse_float=_float,
                parse_int=_integer,
            )
            if b"\\u" in self.data:  # an escape may be half a character
                json.dumps(value, ensure_ascii=False).encode()
            return value
        except RecursionError:
            raise LineError("the line is nested too deep", "invalid_json") from None
        except ValueError as error:
            raise LineError(f"the line is no JSON: {error}", "invalid_json") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


# Numbers are read as the server's parser reads them in a body: an integer of more than 64 bits as a
# float, and none that is beyond those.


def _integer(text: str) -> int | float:
    if len(text) > 20:  # more than any of 64 bits has
        return _float(text)
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:100]} is beyond all floating-point numbers")
    return value


class LineReader:
    """The lines of a file that are not blank, in order. Used by one thread at a time."""

    def __init__(self, path: Path):
        self._file: BinaryIO = path.open("rb", buffering=1 << 20)
        self._number = 0
        self._digest = hashlib.sha256()

    def next(self) -> Line | None:
        """The next line; None at the end of the file."""
        while data := self._file.readline(MAX_LINE_BYTES + 1):
            self._digest.update(data)
            self._number += 1
            if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
                self._pass_line()
                return Line(self._number, None)
            if self._number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            data = data.strip()
            if data:
                return Line(self._number, data)
        return None

    def _pass_line(self) -> None:
        while data := self._file.readline(1 << 20):
            self._digest.update(data)
            if data.endswith(b"\n"):
                return

    def take(self, max_lines: int, max_bytes: int = 1 << 20) -> list[Line]:
        """Up to `max_lines` next lines: fewer where they have more than `max_bytes`, none at the
        end."""
        lines: list[Line] = []
        size = 0
        while len(lines) < max_lines and size < max_bytes and (line := self.next()) is not None:
            lines.append(line)
            size += line.num_bytes
        return lines

    def skip(self, count: int) -> None:
        """Passes over lines."""
        for _ in range(count):
            self.next()

    @property
    def digest(self) -> str:
        """Of all bytes that were read: their sha256."""
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class InputFacts:
    """What is known of an input file before a line is answered."""

    num_bytes: int
    sha256: str
    num_lines: int  # that are not blank


def scan(path: Path) -> InputFacts:
    """Reads a file once."""
    reader = LineReader(path)
    try:
        count = 0
        while reader.next() is not None:
            count += 1
        return InputFacts(os.fstat(reader._file.fileno()).st_size, reader.digest, count)
    finally:
        reader.close()
