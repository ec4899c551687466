"""The threads that quantise weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def workers(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of `threads` (0: one for each core), and meanwhile one thread of linear algebra for
    each of them: with more, sums could change their order."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1), ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        yield pool
