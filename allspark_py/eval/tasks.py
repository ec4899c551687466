"""Multiple-choice tasks in files: llama.cpp's HellaSwag text, and JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allspark.error_text import shown
from allspark.eval.files import Text, TextFacts
from allspark.unicode_text import plain

NUM_ENDINGS = 4  # of the text format
_LINES = NUM_ENDINGS + 2
_KEYS = ("context", "choices", "label", "delimiter", "id")


@dataclass(frozen=True)
class Task:
    """A text and its possible continuations."""

    context: str
    choices: tuple[str, ...]
    label: int  # the index of the right one
    delimiter: str = " "  # between the context and a choice

    def __post_init__(self) -> None:
        _check_text("context", self.context)
        if not isinstance(self.choices, tuple) or len(self.choices) < 2:
            raise ValueError(f"choices is {shown(self.choices)}; it must have at least two texts")
        for index, choice in enumerate(self.choices):
            _check_text(f"choices[{index}]", choice)
        most = len(self.choices) - 1
        if not isinstance(self.label, int) or isinstance(self.label, bool):
            raise TypeError(f"label is {shown(self.label)}; it must be an integer in [0, {most}]")
        if not 0 <= self.label <= most:
            raise ValueError(f"label is {shown(self.label)}; it must be an integer in [0, {most}]")
        if not isinstance(self.delimiter, str):
            raise TypeError(f"delimiter is {shown(self.delimiter)}; it must be a str")


@dataclass(frozen=True)
class TaskFile:
    """The tasks of a file, and what identifies it."""

    tasks: list[Task]
    facts: TextFacts


def read_tasks(path: str | Path) -> TaskFile:
    """Reads a file of tasks, which bzip2 may have compressed (its name then ends in .bz2).

    - JSON lines: {"context": ..., "choices": [...], "label": index}, with "delimiter" (a space
      where it is missing) and "id", which is ignored.
    - Any other text is in the HellaSwag format: six lines for each task, which are the context,
      the index of the right ending, and four endings.

    Raises:
        OSError: it cannot be read. ValueError, TypeError: it is no file of tasks; the message
            names file, line, field and value.
    """
    text = Text.read(path)
    text = replace(text, content=plain(text.content))
    is_json = text.content.lstrip()[:1] == "{"
    tasks = (_from_json if is_json else _from_text)(text)
    if not tasks:
        raise ValueError(f"{text.facts.name} has no task; it must have at least one")
    return TaskFile(tasks, text.facts)


def _from_text(text: Text) -> list[Task]:
    lines = text.content.removesuffix("\n").split("\n")
    name = text.facts.name
    if len(lines) % _LINES:
        raise ValueError(
            f"{name} has {len(lines)} lines; it must have {_LINES} for each task: the context, the "
            f"index of the right ending, and {NUM_ENDINGS} endings"
        )
    tasks = []
    for begin in range(0, len(lines), _LINES):
        context, label, *endings = lines[begin : begin + _LINES]
        if not (label.isascii() and label.isdigit()):
            raise ValueError(
                f"{name}: line {begin + 2} is {shown(label)}; it must be the index of the right "
                f"ending, 0 to {NUM_ENDINGS - 1}"
            )
        place = f"{name}: task of line {begin + 1}"
        tasks.append(_task(place, context, tuple(endings), int(label)))
    return tasks


def _from_json(text: Text) -> list[Task]:
    tasks = []
    for number, line in enumerate(text.content.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{text.facts.name}: line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise TypeError(f"{place} is {shown(fields)}; it must be an object")
        tasks.append(_from_fields(place, fields))
    return tasks


def _from_fields(place: str, fields: dict[str, Any]) -> Task:
    for name in fields:
        if name not in _KEYS:
            raise ValueError(f"{place} has {shown(name)}; its keys must be of {', '.join(_KEYS)}")
    for name in ("context", "choices", "label"):
        if name not in fields:
            raise ValueError(f"{place} has no {name!r}; it must have context, choices and label")
    choices = fields["choices"]
    if not isinstance(choices, list):
        raise TypeError(f"{place}: choices is {shown(choices)}; it must be a list of texts")
    delimiter = fields.get("delimiter", " ")
    return _task(place, fields["context"], tuple(choices), fields["label"], delimiter)


def _task(place: str, *values: Any) -> Task:
    try:
        return Task(*values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{place}: {error}") from None


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}; it must be a str")
    if not value.strip():
        raise ValueError(f"{name} is {shown(value)}; it must not be empty")
