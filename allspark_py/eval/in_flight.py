"""Runs many requests of one model, a window of them at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

from allspark._allspark import AsStatus, GeneratedElements
from allspark.errors import AllSparkError
from allspark.pipeline.served_model import ServedModel
from allspark.statuses import to_exception

_T = TypeVar("_T")
# What Engine.start_request_ids returns.
Started: TypeAlias = "tuple[AsStatus, Any, Any]"


def for_adapter(adapter: str | None, **fields: Any) -> dict[str, Any]:
    """The fields of a request, to an adapter where one is given."""
    return {**fields, "lora_name": adapter} if adapter else fields


def results(
    model: ServedModel,
    items: Iterable[_T],
    start: Callable[[_T], Started],
) -> Iterator[tuple[_T, GeneratedElements]]:
    """Each item with what its request gave, in order. Twice as many requests as fit in a step run
    at a time, so that the engine always has the next one.

    Args:
        start: starts the request of an item.

    Raises:
        ValueError, OutOfMemoryError, AllSparkError: a request was refused or failed; the message
            begins with the item.
    """
    room = 2 * model.max_batch_size
    running: deque[tuple[_T, Any, Any]] = deque()
    try:
        for item in items:
            if len(running) == room:
                yield _finish(model, *running.popleft())
            status, handle, queue = start(item)
            while status == AsStatus.ALLSPARK_REQUEST_DENIED and running:  # too many wait
                yield _finish(model, *running.popleft())
                status, handle, queue = start(item)
            if status != AsStatus.ALLSPARK_SUCCESS:
                raise to_exception(status, f"{item}: {model.engine.last_error()}")
            running.append((item, handle, queue))
        while running:
            yield _finish(model, *running.popleft())
    finally:
        model.engine.release_request(model.name, [handle for _, handle, _ in running])


def _finish(model: ServedModel, item: _T, handle: Any, queue: Any) -> tuple[_T, GeneratedElements]:
    """Waits for a request. All of it comes at once, since nothing was read before its end."""
    try:
        model.engine.sync_request(model.name, handle)
        elements = queue.Get()
        reason = queue.finish_reason
    finally:
        model.engine.release_request(model.name, handle)
    if elements is None or reason != "length":
        raise AllSparkError(f"{item} ended with {reason!r}: {queue.error or ''}")
    return item, elements
