"""CallCheck: validates the calls of an output for tools whose schemas could not be enforced.

A call that is not valid is delivered as the model wrote it, and named beside it: what a wrong call
is worth, its client alone can tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from allspark.own_threads import schema_threads
from allspark.serve.parsers import Tool
from allspark.serve.parsers.json_texts import is_json_object
from allspark.serve.parsers.validation import argument_problem
from allspark.serve.text_work import begin

logger = logging.getLogger("allspark.serve")

# (name, arguments) of a call.
Call = tuple[str, str]
# Calls of one output that are validated; a model that repeats itself writes thousands.
MAX_CALLS = 64


class CallCheck:
    """The validation of one output's calls. It runs on a thread: a schema may take a second.

    Args:
        tools: those whose calls are validated; of others, and of calls that were cut off, nothing
            is said.
    """

    def __init__(self, tools: Collection[Tool] = ()):
        self._tools = {tool.name: tool for tool in tools}
        self._task: asyncio.Task[list[dict[str, Any]]] | None = None

    def problems(
        self, calls: Sequence[Call], changed: Callable[[], None]
    ) -> list[dict[str, Any]] | None:
        """What is wrong with the calls of an output that has ended, as {"index", "message"}; None
        while that is found out: `changed` is called once it was."""
        if self._task is None:
            checked = [
                (index, self._tools[name], arguments)
                for index, (name, arguments) in enumerate(calls)
                if name in self._tools
            ]
            if not checked:
                return []
            self._task = begin(schema_threads.run(_problems, checked), changed)
        return self._task.result() if self._task.done() else None

    async def wait(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """As `problems`, once they are known."""
        found = self.problems(calls, lambda: None)
        if found is None:
            assert self._task is not None
            found = await self._task
        return found

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._task is not None:
            self._task.cancel()


def _problems(calls: Sequence[tuple[int, Tool, str]]) -> list[dict[str, Any]]:
    found = []
    for index, tool, arguments in calls[:MAX_CALLS]:
        if not is_json_object(arguments):
            continue  # cut off, as the finish reason says
        try:
            message = argument_problem(tool, arguments)
        except Exception:
            logger.exception("the arguments of a call could not be validated")
            message = "the arguments could not be validated"
        if message is not None:
            found.append({"index": index, "message": message})
    if len(calls) > MAX_CALLS:
        message = f"only the first {MAX_CALLS} calls were validated"
        found.append({"index": calls[MAX_CALLS][0], "message": message})
    return found
