"""Regular expressions that a checkpoint or an adapter brings along.

They are RE2's, whose time is linear in the text: one of Python's may never return.
"""

from __future__ import annotations

from typing import Any

from .config import ModelConfig

# Of one configuration. Each is compared with each module.
MAX_PATTERNS = 10_000


def compile_pattern(config: ModelConfig, field: str, pattern: str, instead: str) -> Any:
    """The compiled ``pattern`` of ``field``; ``instead`` ends the error's advice."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = "half of a character"
        if isinstance(error, re2.error):
            reason = b"".join(error.args[:1]).decode(errors="replace")
        raise config.error(
            field,
            f"has {pattern!r}, no regular expression: {reason} (look-around and references back "
            f"are not supported; {instead})",
        ) from None


def check_pattern_count(config: ModelConfig, field: str, count: int) -> None:
    if count > MAX_PATTERNS:
        raise config.error(field, f"has {count} patterns, expected at most {MAX_PATTERNS}")


class ModulePattern:
    """A pattern for names of modules."""

    def __init__(self, config: ModelConfig, field: str, pattern: str, instead: str) -> None:
        self._compiled = compile_pattern(config, field, pattern, instead)

    def begins(self, name: str) -> bool:
        """Whether it matches the beginning of ``name``."""
        return self._compiled.match(_encodable(name)) is not None

    def is_in(self, name: str) -> bool:
        return self._compiled.search(_encodable(name)) is not None


def _encodable(name: str) -> str:
    """``name`` without halves of characters, which JSON may have and RE2 does not take."""
    return name.encode("utf-8", "replace").decode()
