"""The formats that keep a model to its tools: what it writes as a call is one, and is valid."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allspark.serve.parsers import formats
from allspark.serve.parsers.formats import CallFormat, Format, Parts
from allspark.serve.parsers.reasoning import ReasoningParser, in_force
from allspark.serve.parsers.tool_parser import ToolParser
from allspark.serve.parsers.tools import Tool, ToolChoice

if TYPE_CHECKING:
    from allspark.grammar_compiler import Compiler

# What finding the schemas that cannot be enforced may take, beside what one compilation may.
_MAX_SECONDS = 10.0
# Blanks between reasoning and calls.
_BLANKS = r"[ \t\r\n]{0,8}"


@dataclass(frozen=True)
class ToolFormat:
    """What a request with tools gives to the engine.

    Attributes:
        response_format: None where no tool may be called.
        unchecked: the tools whose schemas cannot be enforced. Their arguments are any JSON object,
            to be validated afterwards (`argument_problem`).
    """

    response_format: Format | None
    unchecked: tuple[str, ...] = ()


def tool_format(
    parser: ToolParser,
    tools: Sequence[Tool],
    choice: ToolChoice,
    compiler: Compiler,
    *,
    parallel: bool = True,
    reasoning_parser: ReasoningParser | None = None,
    enable_thinking: bool | None = None,
    begins_in_reasoning: bool | None = None,
    content: Format | None = None,
) -> ToolFormat:
    """The response format for a request's tools. It compiles what is new, so call it on a thread
    that may wait.

    Under "auto" text is free, and a call that begins is valid. Under "required" the output is
    nothing but calls. Reasoning comes first, and is free.

    Args:
        compiler: of the model's tokenizer.
        parallel: False: at most one call.
        reasoning_parser, enable_thinking, begins_in_reasoning: as of MessageParser.
        content: the response_format of an output without calls; None: it is free. Content and calls
            then exclude each other.

    Raises:
        ValueError: a strict tool whose schema cannot be enforced, a schema that is none, or one
            that takes too long; it names the tool and what is wrong.
    """
    allowed = choice.of(tools)
    if not allowed:
        return ToolFormat(None)
    reasoning, is_inside = in_force(reasoning_parser, enable_thinking, begins_in_reasoning)

    def written(unchecked: Collection[str]) -> Format:
        calls = [
            CallFormat(
                tool.name,
                parser.arguments(None if tool.name in unchecked else tool.parameters),
            )
            for tool in allowed
        ]
        parts = parser.parts(calls, parallel)
        if choice.mode == "required":
            form = _required(parts, parallel)
        elif content is not None:
            form = formats.one_of(_required(parts, parallel), formats.response_format(content))
        else:
            form = _auto(parts, parallel, reasoning)
        if reasoning:
            form = formats.sequence(_reasoning(reasoning, is_inside), form)
        return {"type": "structural_tag", "format": form}

    unchecked = {
        tool.name: f"{problem} cannot be enforced in this syntax"
        for tool in allowed
        if (problem := parser.unenforced(tool.parameters))
    }
    # Imported here: it needs a package that only requests with formats need.
    from allspark.grammar_compiler import FormatTooLargeError

    while True:
        _check(allowed, unchecked)
        form = written(unchecked)
        try:
            compiler.prepare(form)
        except ValueError as error:
            # Compiling every tool, which may take long, would not find what makes them too large.
            is_large = isinstance(error, FormatTooLargeError)
            check = compiler.check_size if is_large else compiler.check
            found = _problems(parser, allowed, unchecked, check)
            if not found:
                raise
            unchecked.update(found)
        else:
            return ToolFormat(form, tuple(unchecked))


def content_format(
    content: Format,
    reasoning_parser: ReasoningParser | None,
    enable_thinking: bool | None = None,
    begins_in_reasoning: bool | None = None,
) -> Format:
    """The response format of an output whose content has a format: reasoning, which is free, and
    then that. The arguments are those of tool_format."""
    reasoning, is_inside = in_force(reasoning_parser, enable_thinking, begins_in_reasoning)
    if reasoning is None:
        return content
    form = formats.sequence(_reasoning(reasoning, is_inside), formats.response_format(content))
    return {"type": "structural_tag", "format": form}


def _check(tools: Sequence[Tool], unchecked: dict[str, str]) -> None:
    """Raises ValueError for a strict tool that would be unchecked, or a schema that is none."""
    for tool in tools:
        if tool.name in unchecked:
            if tool.strict:
                raise ValueError(f"the tool {tool.name!r} is strict, and {unchecked[tool.name]}")
            # Imported here: it needs a package that few requests need.
            from allspark.serve.parsers.validation import check_schema

            check_schema(tool)


def _problems(
    parser: ToolParser,
    tools: Sequence[Tool],
    known: Collection[str],
    check: Callable[[Format], None],
) -> dict[str, str]:
    """The tools whose schemas `check` refuses, with the reasons."""
    found = {}
    deadline = time.monotonic() + _MAX_SECONDS
    for tool in tools:
        if tool.name in known:
            continue
        if time.monotonic() > deadline:
            raise ValueError(f"the tools take more than {_MAX_SECONDS:g} s to compile")
        form = parser.arguments(tool.parameters)
        try:
            check({"type": "structural_tag", "format": form})
        except ValueError as error:
            text = str(error).removeprefix("response_format cannot be enforced: ")
            found[tool.name] = f"its parameters cannot be enforced: {text}"
    return found


def _required(parts: Parts, many: bool) -> Format:
    """Calls, and nothing else."""
    tags: Format = {
        "type": "tags_with_separator",
        "tags": list(parts.tags),
        "separator": parts.separator or "",
        "at_least_one": True,
        "stop_after_first": not many or parts.separator is None,
    }
    return formats.one_of(parts.first, tags) if parts.first else tags


def _auto(parts: Parts, many: bool, reasoning: ReasoningParser | None) -> Format:
    """Text, in which each trigger begins a call."""
    text: Format = {
        "type": "triggered_tags",
        "triggers": list(parts.triggers),
        "tags": list(parts.tags),
        "stop_after_first": not many or parts.separator is None,
        # Reasoning comes first; later it would be taken out of the content.
        "excludes": [*parts.excludes, *([reasoning.begin] if reasoning else [])],
    }
    if not parts.first:
        return text
    # An output that begins as such a call is one.
    return formats.one_of(parts.first, {**text, "begins_without": ["{"]})


def _reasoning(reasoning: ReasoningParser, is_inside: bool) -> Format:
    """The reasoning at the beginning of an output, and the blanks after it."""
    if is_inside:
        return formats.sequence(
            formats.tag("", formats.any_text(), reasoning.end), formats.regex(_BLANKS)
        )
    whole = [
        formats.tag(blanks + reasoning.begin, formats.any_text(), reasoning.end)
        for blanks in ("", "\n")
    ]
    return formats.optional(formats.sequence(formats.one_of(*whole), formats.regex(_BLANKS)))
