"""ResponseStream: the events of a response, as a client takes them."""

from __future__ import annotations

from allspark.serve.responses.events import Events
from allspark.serve.responses.record import Record
from allspark.serve.responses.run import ResponseRun
from allspark.serve.sse import Writer, typed_frame


class ResponseStream:
    """The events of a response that runs or has ended.

    Args:
        run: None where it has ended.
        is_owner: the response ends with the client, unless it runs in the background.
    """

    def __init__(self, record: Record, run: ResponseRun | None, after: int, is_owner: bool):
        self._events = Events(record, after)
        self._run = run
        self._ends_run = is_owner and run is not None and not run.is_background
        self._writer: Writer | None = None

    def start(self, writer: Writer) -> None:
        """Writes what there is, then what comes as it comes."""
        self._writer = writer
        writer.on_free = self._write
        if self._run is not None:
            self._run.watch(self._write, writer.fail)
        self._write()

    def abort(self) -> None:
        """The client went away."""
        self._writer = None
        if self._run is not None:
            self._run.forget(self._write)
            if self._ends_run:
                self._run.cancel()

    def _write(self) -> None:
        writer = self._writer
        if writer is None or not writer.is_free or self._events.is_ended:
            return
        data = b"".join(map(typed_frame, self._events.take()))
        is_end = self._events.is_ended
        if data or is_end:
            writer.write(data, more=not is_end)
        if is_end and self._run is not None:
            self._run.forget(self._write)
        if self._events.has_more:
            writer.call_again()
