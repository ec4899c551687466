"""Runs a function with a limit of time, on the thread that asks.

A chat template may loop for ever. One thread, shared by all callers, raises an exception in a
thread whose time is over. Only Python code can be interrupted: a long call of an extension module
ends first. Code of the function that catches BaseException, or holds a lock between two calls, is
not for this.

The exception must never come after `call_within` has returned. Caller and watchdog agree by two
flags. The watchdog sets `sending` and then reads `leaving`; the caller sets `leaving` and then
waits while `sending` is set. So one of them sees the other. After that the caller takes an
exception that was sent but did not arrive. All of it can be repeated, since the exception may
interrupt the caller there, too.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

# An exception is lost if it arrives in a finaliser, so it is sent again until the call is left. The
# time between is long: a further one in the few instructions from the arrival of the first to
# `leaving` is what could get through to the caller.
_RESEND_SECONDS = 1.0

# A function object of its own, since its types are a property of the object.
_set_async_exception = ctypes.pythonapi["PyThreadState_SetAsyncExc"]
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.c_void_p)
_set_async_exception.restype = ctypes.c_int


class TimeLimitError(ValueError):
    """A function did not end within its time."""


class _Stop(BaseException):
    """Raised in a thread whose time is over; `except Exception` lets it pass."""


class _Entry:
    """One running call."""

    __slots__ = ("deadline", "leaving", "num_sent", "sending", "thread_id", "watchdog")

    def __init__(self, watchdog: _Watchdog, seconds: float) -> None:
        self.watchdog = watchdog
        self.thread_id = threading.get_ident()
        self.deadline = time.monotonic() + seconds
        self.leaving = False  # written by the caller
        self.sending = False  # written by the watchdog
        self.num_sent = 0


class _Watchdog:
    """Knows all running calls. Its thread starts with the first of them, and then stays."""

    def __init__(self) -> None:
        self._added: deque[_Entry] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sleeps_until = -math.inf  # -inf: it is awake
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, entry: _Entry) -> None:
        """No lock is held after the entry is known, since the exception may come from then on."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._start()
        self._added.append(entry)
        # Most calls end long before the watchdog would look, and need not wake it.
        if entry.deadline < self._sleeps_until:
            self._wake.put(None)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._sleeps_until = -math.inf
                thread = threading.Thread(target=self._run, name="allspark-time-limit", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        running: list[tuple[float, int, _Entry]] = []  # a heap; the number makes pairs comparable
        numbers = itertools.count()
        while True:
            # First it says how long it will sleep, then it looks for new entries. So an entry that
            # comes too late for this look finds the time, and wakes it.
            self._sleeps_until = running[0][0] if running else math.inf
            is_new_first = False
            while self._added:
                entry = self._added.popleft()
                if not entry.leaving:
                    is_new_first |= entry.deadline < self._sleeps_until
                    heapq.heappush(running, (entry.deadline, next(numbers), entry))
            if not is_new_first:
                self._sleep()
            self._sleeps_until = -math.inf
            now = time.monotonic()
            while running and running[0][0] <= now:
                entry = heapq.heappop(running)[2]
                if _send(entry):
                    heapq.heappush(running, (now + _RESEND_SECONDS, next(numbers), entry))

    def _sleep(self) -> None:
        until = self._sleeps_until
        try:
            self._wake.get(
                timeout=None if until == math.inf else max(0.0, until - time.monotonic())
            )
            while True:  # Several may have asked.
                self._wake.get_nowait()
        except queue.Empty:
            pass


def _send(entry: _Entry) -> bool:
    """Returns whether the call was still running."""
    entry.sending = True
    try:
        if entry.leaving:
            return False
        entry.num_sent += 1
        _set_async_exception(entry.thread_id, id(_Stop))
        return True
    finally:
        entry.sending = False


def _leave(entry: _Entry) -> None:
    """Afterwards no exception comes for this entry. May be repeated after an interruption."""
    entry.leaving = True
    # The watchdog of a parent process may have been sending when the process was forked.
    while entry.sending and entry.watchdog is _watchdog:
        time.sleep(0)
    if entry.num_sent:
        _take(entry.thread_id)
        entry.num_sent = 0


def _take(thread_id: int) -> None:
    """Ends what was sent to this thread, arrived or not.

    Withdrawing it, by sending None, would leave the interpreter believing that one is to come:
    every call would look for it, and under a profiler or debugger Python 3.11 would do nothing
    else. So a last one is sent, in place of the one before, and taken here.
    """
    try:
        while True:  # Again, if it was lost in a finaliser.
            _set_async_exception(thread_id, id(_Stop))
            for _ in range(1000):
                pass
    except _Stop:
        pass


def call_within(seconds: float, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Returns what the function returns, or raises what it raises. Calls are not nested.

    Raises:
        TimeLimitError: it did not end within `seconds`.
    """
    entry = _Entry(_watchdog, seconds)
    try:
        try:
            try:
                entry.watchdog.add(entry)
                return function(*arguments)
            finally:
                _leave(entry)
        except _Stop:
            _leave(entry)
            raise TimeLimitError(f"it took longer than {seconds:g} s") from None
    finally:
        _leave(entry)


def _renew() -> None:
    global _watchdog
    _watchdog = _Watchdog()


_watchdog = _Watchdog()
os.register_at_fork(after_in_child=_renew)  # The thread of the parent does not live there.
