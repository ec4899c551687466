"""Library: the responses of a server, those that run and those that are stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from allspark.error_text import shown
from allspark.serve.errors import ApiError
from allspark.serve.responses.record import Record
from allspark.serve.responses.shelf import FileShelf, MemoryShelf, Shelf
from allspark.serve.responses.store import Bounds, NoRoomError, ResponseStore
from allspark.serve.settings import ServerSettings

if TYPE_CHECKING:
    from allspark.serve.responses.run import ResponseRun

logger = logging.getLogger("allspark.serve")

Result = TypeVar("Result")
_LOST = "the server ended while the response ran"


class Library:
    """Finds and keeps responses. Used on the event loop; the store has a thread of its own, since
    it may be a file.

    Raises:
        ValueError: a bound makes no sense, or the store's file cannot be used.
    """

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.time):
        bounds = Bounds(
            settings.max_stored_responses,
            settings.max_stored_response_bytes,
            settings.response_lifetime,
        )
        path = settings.response_store
        shelf: Shelf = MemoryShelf() if path is None else FileShelf(path)
        self.is_storing = bounds.entries > 0
        self.running: dict[str, ResponseRun] = {}  # and what ended and is not stored yet
        self._store = ResponseStore(shelf, bounds, clock)
        self._thread = ThreadPoolExecutor(1, "responses")
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._sweep_s = max(1.0, bounds.lifetime_s / 10)
        self._sweeper: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self._has_lifetime = bounds.lifetime_s > 0

    async def find(self, id: str) -> Record:
        """A response. Raises ApiError if there is none."""
        run = self.running.get(id)
        record = await self._do(self._load, id) if run is None else run.record
        if record is None:
            raise _not_found(id, "response_id")
        return record

    async def conversation(self, id: str) -> list[Record]:
        """A response and those it goes on from, the oldest first.

        Raises:
            ApiError: one of them is not there.
        """
        records: list[Record] = []
        next_id: str | None = id
        while next_id is not None and next_id in self.running:
            records.append(self.running[next_id].record)
            next_id = records[-1].previous
        if next_id is not None:
            rest, missing = await self._do(self._load_chain, next_id)
            records += rest
            if missing is not None:
                beside = f", which {records[-1].id!r} goes on from" if records else ""
                raise _not_found(missing, "previous_response_id", beside)
        return records[::-1]

    async def reserve(self, record: Record) -> None:
        """Stores a response that begins to run in the background.

        Raises:
            ApiError: there is no room, or the store's file cannot be written.
        """
        try:
            await self._do(self._save, record)
        except NoRoomError as error:
            message = f"the response cannot be stored: {error}"
            raise ApiError(429, message, code="response_store_full") from None
        except Exception:
            logger.exception("the response %s cannot be stored", record.id)
            message = "the response cannot be stored; the server's log says why"
            raise ApiError(503, message, code="response_store_failed") from None

    def keep(self, run: ResponseRun) -> None:
        """Stores a response that has ended. Until that is done it is among those that run."""
        self._saving[run.record.id] = asyncio.ensure_future(self._keep(run.record))

    async def delete(self, id: str) -> None:
        """Ends a response that runs, and forgets it. Raises ApiError if there is none."""
        run = self.running.get(id)
        if run is not None:
            run.cancel()
            await run.ended()
        if id in self._saving:
            await asyncio.wait({self._saving[id]})
        is_stored = await self._do(self._store.delete, id)
        if run is None and not is_stored:
            raise _not_found(id, "response_id")

    async def end(self) -> None:
        """Ends what runs, and stores it as failed: the server ends."""
        for run in list(self.running.values()):
            run.cancel(_LOST)
            await run.ended()
        while self._saving:
            await asyncio.wait(self._saving.values())

    def close(self) -> None:
        """Ends the use of the store, once the loop has ended."""
        self._thread.shutdown()
        self._store.close()

    async def _do(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _keep(self, record: Record) -> None:
        try:
            await self._do(self._save_ended, record)
            self._sweep_later()
        except Exception:
            logger.exception("the response %s cannot be stored", record.id)
        finally:
            self.running.pop(record.id, None)
            del self._saving[record.id]

    # On the store's thread.

    def _save(self, record: Record) -> None:
        self._store.put(record.id, record.to_bytes(), is_running=not record.is_ended)

    def _save_ended(self, record: Record) -> None:
        try:
            self._save(record)
        except NoRoomError as error:
            logger.warning("the response %s is not stored: %s", record.id, error)
            if record.head["background"]:  # nobody has seen it; there is room without its output
                rest = Record(record.head, record.input)
                rest.fail(f"the response cannot be stored: {error}")
                self._save(rest)

    def _load(self, id: str) -> Record | None:
        data = self._store.get(id)
        if data is None:
            return None
        try:
            record = Record.from_bytes(data)
        except (KeyError, TypeError, ValueError):
            logger.exception("the stored response %s cannot be read, and is removed", id)
            self._store.delete(id)
            return None
        if not record.is_ended and id not in self.running:
            record.fail(_LOST)
        return record

    def _load_chain(self, id: str | None) -> tuple[list[Record], str | None]:
        """A response and those it goes on from, and the id at which there is none."""
        records: list[Record] = []
        while id is not None:
            record = self._load(id)
            if record is None:
                return records, id
            records.append(record)
            id = record.previous
        return records, None

    # The bounds hold at every use. Where there is none, this removes what has expired.

    def _sweep_later(self) -> None:
        if self._has_lifetime and self._sweeper is None:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(self._sweep_s, self._begin_sweep)

    def _begin_sweep(self) -> None:
        self._sweeper = asyncio.ensure_future(self._sweep())

    async def _sweep(self) -> None:
        num_left = await self._do(self._store.expire)
        self._sweeper = None
        if num_left:
            self._sweep_later()


def _not_found(id: str, param: str, beside: str = "") -> ApiError:
    code = f"{param.removesuffix('_id')}_not_found"
    message = f"there is no response {shown(id)}{beside}"
    return ApiError(404, message, param=param, code=code)
