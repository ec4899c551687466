"""Runs one prompt on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

from allspark._allspark import AsStatus
from allspark.aio import wait_changed, wait_end
from allspark.pipeline.response import Response
from allspark.pipeline.runs import Job, Running, plan
from allspark.pipeline.served_model import ServedModel


async def run_async(model: ServedModel, job: Job, stream: bool) -> AsyncIterator[Response]:
    """The pieces of a response as they come, or with `stream` False the whole. When the iteration
    ends early, the request is stopped."""
    request = plan(model, job, stream)
    if isinstance(request, Response):
        yield request
        return
    engine = model.engine
    status, handle, queue = await engine.start_request_ids_async(
        model.name, model.loader, request.ids, request.fields
    )
    if status != AsStatus.ALLSPARK_SUCCESS:
        yield request.refused(status, engine.last_error())
        return
    try:
        if job.started is not None:
            job.started(handle)
        running = Running(request, handle, queue)
        if running.is_read_at_end:
            await wait_end(queue._native)
        while not running.is_done:
            piece = running.read()
            if piece is not None:
                yield piece
            elif not running.is_done:
                await wait_changed(queue._native)
    finally:
        engine.release_request(model.name, handle)
