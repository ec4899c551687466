"""The bridge from completion sets to asyncio: one descriptor per event loop, no thread."""

from __future__ import annotations

import asyncio
import weakref

from allspark._allspark import CompletionSet, NativeResultQueue


class _Dispatcher:
    """Wakes the coroutines of one event loop whose queues changed."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._completions = CompletionSet()
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        # The queues of the set, and whether it hears of their ends alone.
        self._attached_for_end: weakref.WeakKeyDictionary[NativeResultQueue, bool] = (
            weakref.WeakKeyDictionary()
        )
        loop.add_reader(self._completions.fileno(), self._drain)

    def _drain(self) -> None:
        for request_id in self._completions.drain():
            for waiter in self._waiters.pop(request_id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    async def changed(self, queue: NativeResultQueue, only_end: bool = False) -> None:
        """Returns after the next change of `queue`. With `only_end` it may return at its end alone.

        The caller checks the queue and then calls this, with no await in between. Completions are
        drained on this event loop, so a change after that check is seen only once the waiter below
        is registered.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(queue.request_id, []).append(waiter)
        self._attach(queue, only_end)
        try:
            await waiter
        finally:
            waiters = self._waiters.get(queue.request_id)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[queue.request_id]

    def _attach(self, queue: NativeResultQueue, only_end: bool) -> None:
        attached = self._attached_for_end.get(queue)
        if attached is None or (attached and not only_end):
            self._attached_for_end[queue] = only_end
            self._completions.attach(queue, only_end)


_dispatchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Dispatcher] = (
    weakref.WeakKeyDictionary()
)


async def wait_changed(queue: NativeResultQueue) -> None:
    """Waits, on the running loop, until `queue` has something new or its status is terminal."""
    await _dispatcher().changed(queue)


async def wait_end(queue: NativeResultQueue) -> None:
    """Waits, on the running loop, until the status of `queue` is terminal. Its tokens wake
    nobody, unless another waits for them."""
    while not queue.is_terminal:
        await _dispatcher().changed(queue, only_end=True)


def _dispatcher() -> _Dispatcher:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    dispatcher = _dispatchers.get(loop)
    if dispatcher is None:
        dispatcher = _dispatchers[loop] = _Dispatcher(loop)
    return dispatcher
