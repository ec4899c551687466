"""Text that is Unicode: of files, and of callers, whose strings may hold halves of characters."""

from __future__ import annotations

from pathlib import Path


def check_unicode(text: str) -> None:
    """Raises ValueError where a text has a lone surrogate, with which tokenizers and protocols end
    in errors of their own."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at character {error.start}") from None


def decode(path: Path, data: bytes) -> str:
    """The text of a file's bytes. Raises ValueError, with the file and the byte, where they are no
    UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} is {data[error.start]:#04x} ({error.reason}); the file "
            "must be a text in UTF-8"
        ) from None


def read_text(path: Path) -> str:
    """The text of a file that a person or another program wrote: without a byte order mark, and
    with "\\n" at the ends of its lines.

    Raises:
        OSError: it cannot be read. ValueError: it is no UTF-8.
    """
    return plain(decode(path, path.read_bytes()))


def plain(text: str) -> str:
    """The text of a file without a byte order mark, and with "\\n" at the ends of its lines."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
