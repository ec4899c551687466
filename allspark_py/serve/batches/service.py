"""Batches: the batches of a server, which run one after the other below all other requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from allspark.error_text import shown
from allspark.serve.batches.record import BatchRecord, read_record
from allspark.serve.batches.requests import ENDPOINTS
from allspark.serve.batches.run import BatchRun
from allspark.serve.batches.store import FileStore
from allspark.serve.batches.validation import validate_file
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.ids import make_id
from allspark.serve.protocol.batches import BatchBody
from allspark.whole_file import write_whole

if TYPE_CHECKING:
    from allspark.serve.state import ServerState

logger = logging.getLogger("allspark.serve")

MAX_UNFINISHED = 100
MAX_KEPT = 1000


class Batches:
    """Creates, runs, ends and remembers batches. Used on the event loop alone.

    A batch is a record beside the files. Each change of its status is on the disk before it is
    seen, and its files tell which lines have an answer. So a server that starts on the same folder
    goes on where another one ended, whatever ended it.

    Raises:
        OSError, ValueError: the folder of the files cannot be used.
    """

    def __init__(self, state: ServerState):
        settings = state.settings
        self._state = state
        folder = Path(settings.files_dir) if settings.files_dir is not None else None
        self.files = FileStore(folder, settings.max_files, settings.max_stored_bytes)
        self._records: dict[str, BatchRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, str] = {}  # batch -> the status with which it is to end
        self._turn = asyncio.Lock()
        self._load()

    def _load(self) -> None:
        found = [
            read_record(path, BatchRecord) for path in self.files.folder.glob("batch_*.json")
        ]
        for record in sorted(found, key=lambda each: (each.created_at, each.id)):
            self._records[record.id] = record
        running = [record for record in found if not record.is_finished]
        self.files.remove_others(
            {name for record in running for name in (record.output_file, record.error_file)}
        )

    def start(self) -> None:
        """Goes on with batches that have not finished. Called once the event loop runs."""
        for record in self._records.values():
            if not record.is_finished:
                self._begin(record)

    async def stop(self) -> None:
        """Stops what runs; it can go on in another server."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def close(self) -> None:
        """Removes files in a temporary folder."""
        self.files.close()

    # What clients ask for.

    @property
    def records(self) -> list[BatchRecord]:
        """All of them, the oldest first."""
        return list(self._records.values())

    def get(self, batch_id: str) -> BatchRecord:
        """A batch. Raises ApiError where there is none."""
        record = self._records.get(batch_id)
        if record is None:
            message = f"there is no batch {shown(batch_id)}"
            raise ApiError(404, message, param="batch_id", code="batch_not_found")
        return record

    def create(self, body: BatchBody) -> BatchRecord:
        """A new batch, which then runs by itself. Raises ApiError where it is refused."""
        file = self.files.get(body.input_file_id)
        if body.endpoint not in ENDPOINTS:
            message = f"endpoint is {shown(body.endpoint)}; it must be one of {list(ENDPOINTS)}"
            raise invalid_value(message, "endpoint")
        if file.purpose != "batch":
            message = f"the purpose of the file is {file.purpose!r}; it must be 'batch'"
            raise invalid_value(message, "input_file_id")
        if len(self._tasks) >= MAX_UNFINISHED:
            message = f"{MAX_UNFINISHED} batches have not finished, the bound"
            raise ApiError(429, message, code="too_many_batches")
        now = int(time.time())
        record = BatchRecord(
            id=make_id("batch", "_"),
            input_file_id=file.id,
            endpoint=body.endpoint,
            created_at=now,
            expires_at=now + self._state.settings.batch_window,
            output_file=make_id("file"),
            error_file=make_id("file"),
            metadata=body.metadata,
        )
        self._save(record)
        self._records[record.id] = record
        self._forget_oldest()
        self._begin(record)
        return record

    def cancel(self, batch_id: str) -> BatchRecord:
        """Ends a batch; lines that have their answers keep them."""
        record = self.get(batch_id)
        if record.status == "cancelling":
            return record
        if record.status not in ("validating", "in_progress"):
            message = f"the batch is {record.status}; it cannot be cancelled"
            raise ApiError(409, message, code="invalid_status")
        record.enter("cancelling")
        self._save(record)
        self._end_with(record, "cancelled")
        return record

    def delete_file(self, file_id: str) -> None:
        """Removes a file. Raises ApiError where there is none, or a batch needs it."""
        for record in self._records.values():
            if record.input_file_id == file_id and not record.is_finished:
                message = f"{record.id} reads the file; cancel it, or wait for its end"
                raise ApiError(409, message, param="file_id", code="in_use")
        self.files.remove(file_id)

    # The life of a batch.

    def _begin(self, record: BatchRecord) -> None:
        task = asyncio.ensure_future(self._drive(record))
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))

    def _end_with(self, record: BatchRecord, status: str) -> None:
        task = self._tasks.get(record.id)
        if task is not None and record.id not in self._ends:
            self._ends[record.id] = status
            task.cancel()

    async def _drive(self, record: BatchRecord) -> None:
        try:
            if record.ending is None:
                await self._advance(record)
            if not record.is_finished:
                await self._finish(record)
        except Exception as error:  # of this batch alone
            logger.exception("%s failed", record.id)
            message = f"the server failed: {type(error).__name__}: {error}"
            self._fail(record, [{"code": "internal_error", "message": message}])
        finally:
            self._ends.pop(record.id, None)

    async def _advance(self, record: BatchRecord) -> None:
        """Runs a batch until it has failed, or it is certain how it ends."""
        ending = "cancelled" if record.status == "cancelling" else "completed"
        left = max(0.0, record.expires_at - time.time())
        timer = asyncio.get_running_loop().call_later(left, self._end_with, record, "expired")
        try:
            if record.status == "validating":
                await self._validate(record)
            if record.status == "in_progress":
                async with self._turn:
                    if self._has_changed(record):
                        ending = "failed"
                    else:
                        await self._answer_lines(record)
        except asyncio.CancelledError:
            if record.id not in self._ends:
                raise  # the server stops
            ending = self._ends[record.id]
        finally:
            timer.cancel()
        if not record.is_finished:
            record.ending = ending

    async def _validate(self, record: BatchRecord) -> None:
        path = self.files.path_of(record.input_file_id)
        names = {entry.name for entry in self._state.catalog.entries}
        found = await asyncio.to_thread(validate_file, path, record.endpoint, names)
        if found.errors:
            self._fail(record, found.errors)
            return
        record.total = found.num_lines
        record.fingerprints = self._fingerprints(found.models)
        record.enter("in_progress")
        self._save(record)

    def _fingerprints(self, names: Iterable[str | None]) -> dict[str, str]:
        """Of the models of these names, but for those that there are not."""
        found = {}
        for name in names:
            with contextlib.suppress(ApiError):
                entry = self._state.catalog.get(name)
                found[entry.name] = self._state.fingerprint(entry)
        return found

    def _has_changed(self, record: BatchRecord) -> bool:
        """Whether a model is another one than when the batch began. Its errors then say which."""
        now = self._fingerprints(record.fingerprints)
        record.errors = [
            {
                "code": "model_changed",
                "message": f"the model {name!r} is not the one with which the batch began: its "
                "weights, template, adapter, kernels or version are others. The answers from "
                "before are in the batch's files",
            }
            for name, digest in record.fingerprints.items()
            if now.get(name) != digest
        ]
        return bool(record.errors)

    async def _answer_lines(self, record: BatchRecord) -> None:
        run = BatchRun(self._state, self.files, record)
        try:
            await run.answer_lines()
        finally:
            run.close()

    async def _finish(self, record: BatchRecord) -> None:
        """Ends a batch whose lines no longer run."""
        assert record.ending is not None
        if record.status != "cancelling":
            record.enter("finalizing")
        self._save(record)
        run = BatchRun(self._state, self.files, record)
        try:
            if record.ending == "expired":
                await run.expire_lines()
            else:
                await run.count()
            await run.finish()
        finally:
            run.close()
        record.output_file_id = self._publish(record, record.output_file, "output")
        record.error_file_id = self._publish(record, record.error_file, "error")
        record.enter(record.ending)
        self._save(record)

    def _publish(self, record: BatchRecord, file_id: str, kind: str) -> str | None:
        """Makes a file of a batch known to clients, if it has a line."""
        path = self.files.path_of(file_id)
        if not path.stat().st_size:
            path.unlink()
            return None
        self.files.add(file_id, f"{record.id}_{kind}.jsonl", "batch_output")
        return file_id

    def _fail(self, record: BatchRecord, errors: list[dict[str, str]]) -> None:
        record.errors = errors
        record.enter("failed")
        self._save(record)

    def _save(self, record: BatchRecord) -> None:
        write_whole(self._path_of(record), json.dumps(asdict(record)).encode())

    def _path_of(self, record: BatchRecord) -> Path:
        return self.files.folder / f"{record.id}.json"

    def _forget_oldest(self) -> None:
        for record in self.records:
            if len(self._records) <= MAX_KEPT:
                return
            if record.is_finished:
                del self._records[record.id]
                self._path_of(record).unlink(missing_ok=True)
