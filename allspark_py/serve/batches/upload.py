"""Reads a form with a file from a request's body to the disk, piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from allspark.batch.off_loop import off_loop
from allspark.serve.batches.store import Upload
from allspark.serve.errors import ApiError, invalid_value
from starlette.requests import ClientDisconnect, Request

# The other fields of a form, and the headers of its parts.
MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
_BLOCK = 1 << 20


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Around the parser: raises ApiError where the body is no form, or its boundary none."""
    from python_multipart.exceptions import FormParserError

    try:
        yield
    except FormParserError as error:
        raise invalid_value(f"the body is no form: {error}") from None


class Form:
    """A form as it comes: the fields, and the name and content of `file`.

    Raises:
        ApiError: there is no such boundary.
    """

    def __init__(self, boundary: bytes):
        from python_multipart import MultipartParser

        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.content = bytearray()  # of the file: what was not taken yet
        self.has_ended = False
        self._name = ""
        self._is_file = False
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._num_parts = 0
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._grow(self._header, data[start:end]),
            "on_header_value": lambda data, start, end: self._grow(self._value, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        with _refusing():
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def put(self, data: bytes) -> None:
        """Adds a piece of the body. Raises ApiError where it is no form."""
        with _refusing():
            self._parser.write(data)

    def _grow(self, buffer: bytearray, data: bytes) -> None:
        buffer += data
        if len(buffer) > MAX_FIELD_BYTES:
            message = f"a field of the form has more than {MAX_FIELD_BYTES} bytes, the bound"
            raise invalid_value(message)

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise invalid_value(f"the form has more than {MAX_FIELDS} fields, the bound")
        self._disposition = b""

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise invalid_value("file is given twice; a request has one", "file")
            self.filename = options.get(b"filename", b"upload").decode("utf-8", "replace")

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.content += data[start:end]
        else:
            self._grow(self._value, data[start:end])

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
        self._value.clear()

    def _end(self) -> None:
        self.has_ended = True


async def receive_form(request: Request, upload: Upload, max_bytes: int) -> Form:
    """Reads a request's form, and writes its file to `upload`.

    Raises:
        ApiError: the body is no form with a file, the file has more than `max_bytes`, or the client
            went away.
    """
    form = Form(_boundary(request))
    declared = request.headers.get("content-length", "")
    room = max_bytes + MAX_FIELDS * 4 * MAX_FIELD_BYTES  # with all that is not the file
    if declared.isdigit() and int(declared) > room:
        raise _too_large(max_bytes)
    size = 0
    try:
        async for data in request.stream():
            size += len(data)
            form.put(data)
            if size > room or upload.num_bytes + len(form.content) > max_bytes:
                raise _too_large(max_bytes)
            if len(form.content) >= _BLOCK:
                await _write(form, upload)
    except ClientDisconnect:
        raise ApiError(499, "the client closed the connection") from None
    if not form.has_ended:
        raise invalid_value("the form ends before its last boundary")
    if form.filename is None:
        raise invalid_value("file is missing", "file")
    await _write(form, upload)
    await off_loop(upload.sync)
    return form


async def _write(form: Form, upload: Upload) -> None:
    data = bytes(form.content)
    form.content.clear()
    upload.reserve(len(data))
    await off_loop(lambda: upload.write(data))


def _boundary(request: Request) -> bytes:
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary: Any = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        message = "the content type must be multipart/form-data with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    return bytes(boundary)


def _too_large(bound: int) -> ApiError:
    message = f"file has more than {bound} bytes, the bound (--max-file-bytes)"
    return ApiError(413, message, param="file", code="file_too_large")
