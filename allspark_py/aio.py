"""The bridge from completion sets to asyncio: one descriptor per event loop, no thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from allspark._allspark import CompletionSet, NativeResultQueue


class _Dispatcher:
    """Wakes the coroutines of one event loop whose queues changed."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._completions = CompletionSet()
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        # Called at each change of a request, until they return True.
        self._checks: dict[int, Callable[[], bool]] = {}
        self._attached: weakref.WeakSet[NativeResultQueue] = weakref.WeakSet()
        loop.add_reader(self._completions.fileno(), self._drain)

    def _drain(self) -> None:
        for request_id in self._completions.drain():
            for waiter in self._waiters.pop(request_id, ()):
                if not waiter.done():
                    waiter.set_result(None)
            check = self._checks.get(request_id)
            if check is not None and check():
                del self._checks[request_id]

    async def changed(self, queue: NativeResultQueue) -> None:
        """Returns after the next change of `queue`.

        The caller checks the queue and then calls this, with no await in between. Completions are
        drained on this event loop, so a change after that check is seen only once the waiter below
        is registered.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(queue.request_id, []).append(waiter)
        self._attach(queue)
        try:
            await waiter
        finally:
            waiters = self._waiters.get(queue.request_id)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[queue.request_id]

    async def until(self, queue: NativeResultQueue, is_reached: Callable[[], bool]) -> None:
        """Returns once `is_reached` is True after a change. No task is woken before."""
        waiter = asyncio.get_running_loop().create_future()

        def check() -> bool:
            if not waiter.done() and is_reached():
                waiter.set_result(None)
            return waiter.done()

        self._attach(queue)
        if check():
            return
        self._checks[queue.request_id] = check
        try:
            await waiter
        finally:
            self._checks.pop(queue.request_id, None)

    def _attach(self, queue: NativeResultQueue) -> None:
        if queue not in self._attached:
            self._attached.add(queue)
            self._completions.attach(queue)


_dispatchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Dispatcher] = (
    weakref.WeakKeyDictionary()
)


async def wait_changed(queue: NativeResultQueue) -> None:
    """Waits, on the running loop, until `queue` has something new or its status is terminal."""
    await _dispatcher().changed(queue)


async def wait_until(queue: NativeResultQueue, is_reached: Callable[[], bool]) -> None:
    """Waits, on the running loop, until `is_reached`, which is asked whenever `queue` changes. One
    call at a time for a queue."""
    await _dispatcher().until(queue, is_reached)


def _dispatcher() -> _Dispatcher:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    dispatcher = _dispatchers.get(loop)
    if dispatcher is None:
        dispatcher = _dispatchers[loop] = _Dispatcher(loop)
    return dispatcher
