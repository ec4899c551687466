"""Runs a file of lines into an output file, from where the output ends."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspark.batch.answer import Answer
from allspark.batch.lines import InputFacts, Line, LineReader
from allspark.batch.output import OutputFile
from allspark.batch.window import Window


@dataclass
class Totals:
    """What a run has done."""

    num_lines: int = 0  # that this run has written
    num_before: int = 0  # that were there
    num_errors: int = 0  # of this run
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: Answer) -> None:
        """Counts an answer."""
        self.num_lines += 1
        self.num_errors += answer.is_error
        self.num_prompt_tokens += answer.num_prompt_tokens
        self.num_output_tokens += answer.num_output_tokens

    def __str__(self) -> str:
        before = f" and {self.num_before} from before" if self.num_before else ""
        return (
            f"{self.num_lines} lines{before}, {self.num_errors} errors, {self.num_prompt_tokens} "
            f"prompt tokens, {self.num_output_tokens} output tokens, {self.seconds:.1f} s"
        )


async def run_file(
    source: Path,
    facts: InputFacts,
    output: OutputFile,
    totals: Totals,
    answer: Callable[[Line], Awaitable[Answer]],
    room: int,
    written: Callable[[int], Any] = lambda count: None,
) -> None:
    """Answers the lines of a file that an output does not have yet.

    Args:
        totals: `num_before` lines are there; what is done is added, also where this is cancelled.
        room: most lines that run at a time.
        written: called with the number of lines that were written.

    Raises:
        OSError: a file cannot be read or written, or the input changed meanwhile.
    """
    begin = time.monotonic()
    reader = LineReader(source)

    def write(answers: list[Answer]) -> None:
        output.write(b"".join(each.data for each in answers))
        for each in answers:
            totals.add(each)
        written(len(answers))

    try:
        reader.skip(totals.num_before)
        await Window(answer, write, room).run(reader)
        if reader.digest != facts.sha256:
            raise OSError(f"{source} was changed while it was read; {output.path} is of no use")
    finally:
        totals.seconds = time.monotonic() - begin
        reader.close()
