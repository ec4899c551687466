"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever its main thread is. A package that is just being imported
may swallow it, and compiled code may make another error of it. That the user pressed Ctrl-C is
therefore kept here as well.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_is_pending = False


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Notes each Ctrl-C in the block, and raises KeyboardInterrupt as Python does. It leaves
    handlers alone that are not Python's own, and threads other than the main one."""
    global _is_pending
    _is_pending = False
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_pending() -> bool:
    """Whether Ctrl-C was pressed and nobody has taken it."""
    return _is_pending


def take() -> None:
    """Ctrl-C has done what it is for: the command goes on."""
    global _is_pending
    _is_pending = False


def check() -> None:
    """Raises KeyboardInterrupt where one was swallowed."""
    if _is_pending:
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _is_pending
    _is_pending = True
    raise KeyboardInterrupt
