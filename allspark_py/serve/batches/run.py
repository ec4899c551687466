"""Runs the lines of one batch, from where its files end."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import TYPE_CHECKING

from allspark.batch.answer import Answer
from allspark.batch.lines import Line, LineReader
from allspark.batch.off_loop import off_loop
from allspark.batch.origin import Origin
from allspark.batch.output import OutputFile
from allspark.batch.window import Window
from allspark.serve.batches.record import BatchRecord
from allspark.serve.batches.requests import RequestLines, custom_id_of, failed_line
from allspark.serve.batches.store import FileStore
from allspark.serve.ids import make_id, origin
from allspark.serve.protocol.common import BATCH_PRIORITY

if TYPE_CHECKING:
    from allspark.serve.state import ServerState

# Lines are read so many at a time where they are not run.
_MANY = 1000
# Above this, parsing would hold up the event loop.
_LARGE = 64 << 10


class BatchRun:
    """The files of a batch while it runs. Used on the event loop alone."""

    def __init__(self, state: ServerState, files: FileStore, record: BatchRecord):
        self._state = state
        self._record = record
        self._input = files.path_of(record.input_file_id)
        self._output = OutputFile(files.path_of(record.output_file))
        try:
            self._errors = OutputFile(files.path_of(record.error_file))
        except BaseException:
            self._output.close()
            raise

    async def answer_lines(self) -> None:
        """Answers all lines that have no answer yet. Where it is cancelled, it can be called again,
        in another process, too."""
        reader = await self._open()
        record = self._record
        # Another one for each batch, and the same after a restart.
        seed = int(record.id[-15:], 16)
        requests = RequestLines(self._state, record.id, record.created_at, seed, BATCH_PRIORITY)

        async def answer(line: Line) -> Answer:
            value = line.parse() if line.num_bytes < _LARGE else await asyncio.to_thread(line.parse)
            return await requests.answer(line.number, value)

        try:
            await Window(answer, self._write, self._room()).run(reader)
        finally:
            reader.close()

    async def expire_lines(self) -> None:
        """Writes an error for each line that has no answer yet."""
        reader = await self._open()
        message = "the batch expired before this line was run"

        def expired(line: Line) -> Answer:
            token = origin.set(Origin(self._record.id, line.number, self._record.created_at))
            head = {"id": make_id("batch_req", "_"), "custom_id": custom_id_of(line.parse())}
            origin.reset(token)
            return failed_line(head, "batch_expired", message)

        try:
            while lines := await off_loop(lambda: reader.take(_MANY)):
                self._write([expired(line) for line in lines])
        finally:
            reader.close()

    async def _open(self) -> LineReader:
        """A reader of the lines without an answer. Each line has its own in one of the files, and
        they are written in the lines' order: so the files' lines are the first ones of the input.
        """
        await self.count()
        reader = LineReader(self._input)
        await off_loop(lambda: reader.skip(self._record.completed + self._record.failed))
        return reader

    async def count(self) -> None:
        """Counts the lines that have an answer. One that is not whole is cut off."""
        self._record.completed, self._record.failed = await off_loop(
            lambda: (self._output.cut(), self._errors.cut())
        )

    def _room(self) -> int:
        """Most lines that run: some places of a step stay free, since a request that came first
        keeps its place whatever its priority is."""
        slots = max(model.max_batch_size for model in self._state.catalog.models)
        return max(1, slots - max(1, slots // 8))

    def _write(self, answers: list[Answer]) -> None:
        for is_error, group in groupby(answers, lambda answer: answer.is_error):
            lines = list(group)
            data = b"".join(answer.data for answer in lines)
            if is_error:
                self._errors.write(data)
                self._record.failed += len(lines)
            else:
                self._output.write(data)
                self._record.completed += len(lines)

    async def finish(self) -> None:
        """Waits for the disk."""
        await off_loop(self._output.finish)
        await off_loop(self._errors.finish)

    def close(self) -> None:
        """Closes the files; a second call has no effect."""
        self._output.close()
        self._errors.close()
