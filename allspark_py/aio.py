"""The bridge from completion sets to asyncio: one descriptor per event loop, no thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from typing import NamedTuple

from allspark._allspark import CompletionSet, NativeResultQueue


class _Attached(NamedTuple):
    """Whose set has a queue; a queue is in one at a time."""

    dispatcher: weakref.ref[_Dispatcher]
    only_end: bool  # whether the set hears of its end alone


_attaching = threading.Lock()
_attached: weakref.WeakKeyDictionary[NativeResultQueue, _Attached] = weakref.WeakKeyDictionary()
# By request: the dispatchers that had its queue, and were not woken since. Changed without the
# lock, too: one that is woken in vain looks, and waits again.
_former: dict[int, list[weakref.ref[_Dispatcher]]] = {}


class _Dispatcher:
    """Wakes the coroutines of one event loop whose queues changed.

    Several loops may wait for one queue: the last to wait takes it into its set, and wakes the
    others, too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._completions = CompletionSet()
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        loop.add_reader(self._completions.fileno(), self._drain)

    def _drain(self) -> None:
        for request_id in self._completions.drain():
            self._wake(request_id)
            _wake_former(request_id)

    def _wake(self, request_id: int) -> None:
        for waiter in self._waiters.pop(request_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def wake_soon(self, request_id: int) -> None:
        """From any thread."""
        if (loop := self._loop()) is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: nobody waits there
                loop.call_soon_threadsafe(self._wake, request_id)

    async def changed(self, queue: NativeResultQueue, only_end: bool = False) -> None:
        """Returns after the next change of `queue`; with `only_end` it may do so at its end alone.
        It may return sooner where other loops wait for the queue, too.

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
                    _wake_former(queue.request_id)  # this loop may be ending: one takes it back

    def _attach(self, queue: NativeResultQueue, only_end: bool) -> None:
        with _attaching:
            attached = _attached.get(queue)
            if attached is not None:
                only_end = only_end and attached.only_end
                holder = attached.dispatcher()
                if holder is self and only_end == attached.only_end:
                    return
                if holder is not self:
                    former = _former.get(queue.request_id, [])
                    _former[queue.request_id] = [*former, attached.dispatcher]
            self._completions.attach(queue, only_end)
            _attached[queue] = _Attached(weakref.ref(self), only_end)


def _renew() -> None:
    global _attaching
    _attaching = threading.Lock()  # a thread of the parent may hold it


os.register_at_fork(after_in_child=_renew)


def _wake_former(request_id: int) -> None:
    for reference in _former.pop(request_id, ()):
        if (dispatcher := reference()) is not None:
            dispatcher.wake_soon(request_id)


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
