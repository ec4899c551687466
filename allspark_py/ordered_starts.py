"""Starts requests off the event loop, since a start may wait for room."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
# A start and where its result goes; None ends the thread.
_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]] | None"
_Jobs: TypeAlias = "SimpleQueue[_Job]"


class OrderedStarts:
    """One thread for each installed model: its requests start in the order of the calls, and do not
    wait for those of another model. No start holds up the interpreter's exit."""

    def __init__(self, is_installed: Callable[[str], bool]) -> None:
        self._is_installed = is_installed
        self._lock = threading.Lock()
        self._jobs: dict[str, _Jobs] = {}
        weakref.finalize(self, _end_all, self._jobs).atexit = False

    async def run(
        self,
        model_name: str,
        start: Callable[[Callable[[], bool]], T],
        undo: Callable[[T], object],
    ) -> T:
        """Calls start(gives_up) on the model's thread. Once the caller is cancelled, gives_up()
        returns True; what was started nevertheless is passed to `undo`. For a model that is not
        installed it is called at once, and must not wait."""
        cancelled = threading.Event()
        future: Future[T] = Future()
        if not self._put(model_name, (future, lambda: start(cancelled.is_set))):
            return start(lambda: True)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:  # cancelled, or dropped with its loop; or of `start` itself
            cancelled.set()

            def discard(done: Future[T]) -> None:
                if not done.cancelled() and done.exception() is None:
                    undo(done.result())

            future.add_done_callback(discard)
            raise

    def end(self, model_name: str) -> None:
        """Ends the thread of a model that is installed no more, after the starts that it has."""
        with self._lock:
            jobs = self._jobs.pop(model_name, None)
            if jobs is not None:
                jobs.put(None)

    def _put(self, model_name: str, job: _Job) -> bool:
        """False where the model is not installed."""
        with self._lock:
            jobs = self._jobs.get(model_name)
            if jobs is None:
                # Under the lock: where the model is released after this look, `end` comes later.
                if not self._is_installed(model_name):
                    return False
                jobs = SimpleQueue()
                # A daemon, as the interpreter waits for any other, and a start may wait for ever.
                threading.Thread(
                    target=_run_all, args=(jobs,), name="allspark-start", daemon=True
                ).start()
                self._jobs[model_name] = jobs
            jobs.put(job)
        return True


def _run_all(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        _run(*job)
        del job  # it keeps the engine


def _run(future: Future[Any], start: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = start()
    except BaseException as error:
        future.set_exception(error)
        del future, start  # which the exception's traceback would keep
    else:
        future.set_result(result)


def _end_all(jobs_of_models: dict[str, _Jobs]) -> None:
    for jobs in jobs_of_models.values():
        jobs.put(None)
