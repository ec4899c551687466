"""Sends requests to a target, as many at a time as are wanted or when they are due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from allspark.bench.outcome import Outcome, RequestFailed
from allspark.bench.workload import Request

# Seconds since the run began.
Now = Callable[[], float]


class Target(Protocol):
    """What answers requests."""

    async def serve(self, request: Request, outcome: Outcome, now: Now) -> None:
        """Sends a request, and notes in `outcome` the times of its chunks, the counts of its
        tokens, and its end where that is known better than when this returns.

        Raises:
            RequestFailed: it got no answer, or not all of it.
        """

    async def close(self) -> None:
        """Frees what it keeps between requests."""


@dataclass(frozen=True)
class Run:
    """What became of the requests, in their order."""

    outcomes: list[Outcome]
    client_cpu_s: float  # of the thread that sent them and read the answers


@dataclass(frozen=True)
class Load:
    """How requests are sent.

    Args:
        concurrency: most of them at a time; None: as many as are due.
        due: when each is due, in seconds; None: as soon as there is room for it.
    """

    concurrency: int | None = None
    due: Sequence[float] | None = None


async def run_load(
    target: Target,
    requests: Sequence[Request],
    load: Load,
    on_end: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Run:
    """Sends all requests and waits for all answers. A request that fails ends no other one.

    Args:
        on_end: called whenever one has ended.
    """
    outcomes = [Outcome(request.num_output) for request in requests]
    cpu_begin, begin = time.thread_time(), clock()

    def now() -> float:
        return clock() - begin

    async def serve(request: Request, outcome: Outcome, due: float | None = None) -> None:
        outcome.sent = now()
        outcome.due = outcome.sent if due is None else due
        try:
            await target.serve(request, outcome, now)
        except RequestFailed as error:
            outcome.error = str(error)
        outcome.end = outcome.end or now()
        on_end()

    pairs = list(zip(requests, outcomes, strict=True))
    if load.due is None:
        waiting = iter(pairs)

        async def take_turns() -> None:
            for request, outcome in waiting:
                await serve(request, outcome)

        await _all(take_turns() for _ in range(min(load.concurrency or len(pairs), len(pairs))))
    else:
        room = asyncio.Semaphore(load.concurrency or len(pairs))

        async def serve_in_time(request: Request, outcome: Outcome, due: float) -> None:
            # What the bound holds back has waited since it was due.
            async with room:
                await serve(request, outcome, due)

        async def start_in_time(tasks: list[asyncio.Task[None]]) -> None:
            for (request, outcome), due in zip(pairs, load.due or (), strict=True):
                await sleep(max(0.0, due - now()))
                tasks.append(asyncio.ensure_future(serve_in_time(request, outcome, due)))

        started: list[asyncio.Task[None]] = []
        try:
            await start_in_time(started)
            await _all(started)
        finally:
            await _cancel(started)
    return Run(outcomes, time.thread_time() - cpu_begin)


async def _all(work: Iterable[Coroutine[Any, Any, None] | asyncio.Task[None]]) -> None:
    """Waits for all; if one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
