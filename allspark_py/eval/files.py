"""Texts for evaluation: files in UTF-8, also compressed by bzip2, and what identifies them."""

from __future__ import annotations

import bz2
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from allspark.error_text import wrong_type
from allspark.unicode_text import decode


@dataclass(frozen=True)
class TextFacts:
    """What identifies a text."""

    name: str
    num_bytes: int
    sha256: str  # of the file as it is, compressed or not


@dataclass(frozen=True)
class Text:
    """A text and where it is from."""

    content: str
    facts: TextFacts

    @classmethod
    def of(cls, content: str, name: str = "text") -> Text:
        """A text that is in no file."""
        data = content.encode()
        return cls(content, TextFacts(name, len(data), hashlib.sha256(data).hexdigest()))

    @classmethod
    def read(cls, path: str | Path) -> Text:
        """A file, which bzip2 may have compressed (its name then ends in .bz2).

        Raises:
            OSError: it cannot be read. ValueError: it is empty, or no text in UTF-8.
        """
        path = Path(path).expanduser()
        data = path.read_bytes()
        facts = TextFacts(str(path), len(data), hashlib.sha256(data).hexdigest())
        if path.suffix == ".bz2":
            data = _decompressed(path, data)
        return cls(_decoded(path, data), facts)


Texts: TypeAlias = "str | Path | Text | Iterable[str | Path | Text]"


def to_texts(texts: Texts) -> list[Text]:
    """Files by their paths and texts, one or many, as texts.

    Raises:
        TypeError: there is something else. ValueError, OSError: as Text.read, or there is none.
    """
    items = [texts] if isinstance(texts, (str, Path, Text)) else list(texts)
    if not items:
        raise ValueError("texts is empty; it must have at least one path or Text")
    found = []
    for index, item in enumerate(items):
        if not isinstance(item, (str, Path, Text)):
            raise wrong_type(f"texts[{index}]", item, "a path or a Text")
        found.append(item if isinstance(item, Text) else Text.read(item))
    return found


def _decompressed(path: Path, data: bytes) -> bytes:
    try:
        return bz2.decompress(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not compressed by bzip2, as its name says: {error}") from None


def _decoded(path: Path, data: bytes) -> str:
    if not data:
        raise ValueError(f"{path}: the file is empty; it must be a text in UTF-8")
    if (place := data.find(0)) >= 0:
        raise ValueError(f"{path}: byte {place} is 0; the file must be a text in UTF-8")
    return decode(path, data)
