"""Calls of extension modules in Rust that leave the GIL, made on threads that may outlive the
interpreter.

When such a thread comes back while the interpreter ends, Python up to 3.13 ends the thread by
unwinding it, and unwinding through Rust ends the process by a signal. So the interpreter waits at
its exit for those that are inside, and no thread but the main one enters any more.
csrc/python/gil.h does the same for the engine's own calls.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

# Longest that an exit waits. What compiles or computes masks has bounds of its own.
_MAX_SECONDS = 30.0


class _Gate:
    def __init__(self) -> None:
        self.exiting = False
        self._changed = threading.Condition()
        self._num_inside = 0

    @contextlib.contextmanager
    def passing(self, for_another: bool = False) -> Iterator[None]:
        """Inside, calls may leave the GIL. `for_another`: a thread inside waits for this one. A
        thread enters once."""
        with self._changed:
            # The main thread is the one that exits: nothing unwinds it.
            is_main = threading.current_thread() is threading.main_thread()
            stays = self.exiting and not (for_another or is_main)
            if not stays:
                self._num_inside += 1
        if stays:
            threading.Event().wait()  # until the process has ended
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.exiting = True
            self._changed.wait_for(lambda: self._num_inside == 0, _MAX_SECONDS)

    def reset(self) -> None:
        """In a fork: none of the threads is there any more."""
        self.__init__()  # type: ignore[misc]


_gate = _Gate()
atexit.register(_gate.close)
os.register_at_fork(after_in_child=_gate.reset)

passing = _gate.passing


def is_exiting() -> bool:
    """Whether threads may stay for ever where they would pass."""
    return _gate.exiting
