"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time


def wait_until(condition, seconds=60, what=""):
    """Returns the first true value of the condition; `what` is said where none comes."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.002)
    return found


def num_requests(model):
    """Those of a served model that run or wait: between two steps, none may run."""
    stat = model.engine.get_as_engine_stat(model.name)
    return stat.running_request + stat.pending_request + stat.blocked_request


def wait_for_requests(model, count):
    """A request ends after the step that runs."""
    wait_until(lambda: num_requests(model) == count, what=f"{count} requests")
