"""A series of measurements of one target."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from allspark.bench.load import Load, Target, run_load
from allspark.bench.outcome import Outcome
from allspark.bench.report import Measurement
from allspark.bench.workload import Request

# Descriptors of a process beside its connections.
_OTHER_FILES = 64


@dataclass(frozen=True)
class Case:
    """One measurement that is to be made.

    Args:
        of: what tells it from the others, as {"concurrency": 16}.
        warm_up: requests that are sent before, with the same concurrency, and are not counted.
    """

    of: Mapping[str, float | None]
    requests: Sequence[Request]
    load: Load
    warm_up: Sequence[Request] = field(default_factory=list)


async def measure(
    target: Target,
    cases: Sequence[Case],
    done: Callable[[Measurement], None],
    on_end: Callable[[], object] = lambda: None,
    more: Callable[[], dict[str, float]] = dict,
) -> None:
    """Makes one measurement after the other, and closes the target.

    Args:
        done: gets each as it is made.
        on_end: called whenever a request that is counted has ended.
        more: further figures of a measurement.

    Raises:
        RuntimeError: a request of the warm-up failed, so nothing was measured.
    """
    try:
        for case in cases:
            if case.warm_up:
                warm = await run_load(target, case.warm_up, Load(case.load.concurrency))
                _check_warm_up(warm.outcomes)
            run = await run_load(target, case.requests, case.load, on_end)
            done(Measurement.of_run(case.of, run, **more()))
    finally:
        await target.close()


def _check_warm_up(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise RuntimeError(
                f"the first requests, which are not counted, failed: {outcome.error}"
            )


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs it on a loop of uvloop, which takes less of a core, or on asyncio's."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def peak_rss() -> dict[str, float]:
    """The most memory that this process has had so far."""
    return {"peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}


def allow_connections(count: int, is_bound: bool = True) -> None:
    """Raises the limit of open files as far as so many connections need.

    Args:
        is_bound: False: there may be fewer, so as many as the system allows will do.

    Raises:
        ValueError: the system does not allow so many.
    """
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        if not is_bound:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return
        raise ValueError(
            f"{count} connections at a time need {needed} open files; this process may have {hard} "
            "(ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
