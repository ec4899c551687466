"""The log of a pipeline: how much is said, and where it goes if the program says nothing of it."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
logger = logging.getLogger("allspark")


class _Stderr(logging.Handler):
    """Writes to stderr, unless the program has set up a log of its own. Python itself shows nothing
    below WARNING then."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and logger.handlers == [self]:
            print(self.format(record), file=sys.stderr)


_stderr = _Stderr()
_stderr.setFormatter(logging.Formatter(FORMAT))


def check_level(level: str) -> None:
    """Raises ValueError if `level` is none of LEVELS."""
    if level not in LEVELS:
        raise ValueError(f"log_level is {level!r}; it must be one of {', '.join(LEVELS)}")


def set_log_level(level: str) -> None:
    """Sets the level of the logger "allspark"; raises as check_level."""
    check_level(level)
    logger.setLevel(level)
    if logger.level < logging.WARNING and _stderr not in logger.handlers:
        logger.addHandler(_stderr)
