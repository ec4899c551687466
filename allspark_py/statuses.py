"""Statuses of native calls, with the messages of failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from allspark._allspark import AsStatus, RequestHandle, Status
from allspark.error_text import wrong_type
from allspark.errors import AllSparkError, OutOfMemoryError
from allspark.input_ids import BYTES

Handles: TypeAlias = "RequestHandle | Sequence[Handles]"


def to_exception(status: AsStatus, message: str) -> Exception:
    """The exception for a failure, of calls that return a value instead of a status."""
    if status in (AsStatus.ALLSPARK_PARAM_ERROR, AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR):
        return ValueError(message)
    if status in (AsStatus.ALLSPARK_MEMORY_ERROR, AsStatus.ALLSPARK_CACHE_MEMORY_OUT):
        return OutOfMemoryError(message)
    return AllSparkError(message)


def flattened(handles: Handles) -> list[RequestHandle]:
    """One handle, or those of a list, which may hold lists.

    Raises:
        TypeError: what is given is no handle, or an element is none.
    """
    if isinstance(handles, RequestHandle):
        return [handles]
    # A str is made of strs without end.
    if isinstance(handles, (str, *BYTES, Mapping)) or not isinstance(handles, Iterable):
        raise wrong_type("request_handle", handles, "a RequestHandle or a list of them")
    return [handle for element in handles for handle in flattened(element)]


class Statuses:
    """Turns what native calls return into AsStatus, and keeps each thread's last message."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def last_error(self) -> str:
        """The message of this thread's last failure; '' if nothing failed."""
        return getattr(self._thread, "message", "")

    def fail(self, status: AsStatus, message: str) -> AsStatus:
        """Keeps the message of a failure; returns its status."""
        self._thread.message = message
        return status

    def of(self, status: Status) -> AsStatus:
        """The status that a native call returned."""
        if status.ok:
            return AsStatus.ALLSPARK_SUCCESS
        return self.fail(status.as_status, status.message)

    def of_each(self, call: Callable[..., Status], model_name: str, handles: Handles) -> AsStatus:
        """Applies a call to one handle or to all of a list; the first failure is returned."""
        statuses = [call(model_name, handle) for handle in flattened(handles)]
        failures = [status for status in statuses if not status.ok]
        return self.of(failures[0]) if failures else AsStatus.ALLSPARK_SUCCESS
