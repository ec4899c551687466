"""Window: which lines of a batch run at a time, and how many wait to be written in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from allspark.batch.answer import Answer
from allspark.batch.lines import Line
from allspark.batch.off_loop import off_loop

# What lines may hold: those that run, and answers that wait for an earlier one. A line that takes
# long would otherwise collect all answers behind it in memory.
MAX_HELD_BYTES = 48 << 20
# Of a waiting answer, beside its bytes.
_ANSWER_BYTES = 512


class Source(Protocol):
    """Where lines come from. `take` is called on a thread, one call at a time."""

    def take(self, max_lines: int) -> list[Line]: ...


class _Slot:
    """The place of a line among the answers."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: Answer | None = None


class Window:
    """Answers lines, many at a time, and hands the answers on in the lines' order.

    So many lines run that the engine always has the next one, whatever an earlier line takes: the
    bound of what waits is of bytes, not of lines.

    Args:
        answer: answers a line; what it raises ends the run.
        write: takes answers, in order.
        room: most lines that run.
        max_held_bytes: no line is started while lines that run and answers that wait have more.
    """

    def __init__(
        self,
        answer: Callable[[Line], Awaitable[Answer]],
        write: Callable[[list[Answer]], None],
        room: int,
        max_held_bytes: int = MAX_HELD_BYTES,
    ):
        self._answer = answer
        self._write = write
        self._room = room
        self._max_held_bytes = max_held_bytes
        self._slots: deque[_Slot] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._next: deque[Line] = deque()  # read, and not started
        self._held_bytes = 0
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    async def run(self, source: Source) -> None:
        """Returns when all lines are written. If it is cancelled, or a line or a write raises, no
        line runs on."""
        try:
            while True:
                await self._start(source)
                if not self._slots:
                    return
                await self._changed.wait()
                self._changed.clear()
                if self._error is not None:
                    raise self._error
                self._flush()
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)

    async def _start(self, source: Source) -> None:
        while len(self._running) < self._room and (
            self._held_bytes < self._max_held_bytes or not self._running
        ):
            if not self._next:
                self._next.extend(await off_loop(lambda: source.take(self._room)))
                if not self._next:
                    return
            line, slot = self._next.popleft(), _Slot()
            self._held_bytes += line.num_bytes
            self._slots.append(slot)
            task = asyncio.ensure_future(self._run(line, slot))
            self._running.add(task)
            task.add_done_callback(self._done)

    async def _run(self, line: Line, slot: _Slot) -> None:
        slot.answer = await self._answer(line)
        self._held_bytes += len(slot.answer.data) + _ANSWER_BYTES - line.num_bytes

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and self._error is None:
            self._error = task.exception()
        self._changed.set()

    def _flush(self) -> None:
        """Writes the answers for which none before them is missing."""
        ready: list[Answer] = []
        while self._slots and (answer := self._slots[0].answer) is not None:
            self._slots.popleft()
            self._held_bytes -= len(answer.data) + _ANSWER_BYTES
            ready.append(answer)
        if ready:
            self._write(ready)
