"""Guided requests that go on as the test says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

from allspark import guided


@contextlib.contextmanager
def held_masks() -> Iterator[threading.Semaphore]:
    """Makes a mask, and so a token of a guided request, each time the semaphore is released.

    Where several requests run, one mask may be that of several of them.
    """
    free, answer = threading.Semaphore(0), guided._answer

    def answer_late(*arguments):
        assert free.acquire(timeout=60)
        answer(*arguments)

    with mock.patch.object(guided, "_answer", answer_late):
        try:
            yield free
        finally:
            free.release(1_000_000)
