"""Tools and reasoning of a request: what the model is shown, held to, and read by."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from allspark.serve.call_checks import CallCheck
from allspark.serve.catalog import Entry
from allspark.serve.errors import ApiError
from allspark.serve.parsers import (
    MessageParser,
    ReasoningParser,
    Tool,
    ToolChoice,
    ToolFormat,
    ToolParser,
    choose_reasoning_parser,
    choose_tool_parser,
    read_tool_choice,
    read_tools,
    tool_format,
)
from allspark.serve.protocol.common import ChatBody
from allspark.serve.settings import ServerSettings


@dataclass(frozen=True)
class ToolPlan:
    """What a request's tools and reasoning come to, before its prompt is known."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    tool_parser: ToolParser | None  # None: no call is looked for
    reasoning_parser: ReasoningParser | None
    enable_thinking: bool | None
    parallel: bool

    def tool_format(self, entry: Entry, prompt: str) -> ToolFormat:
        """What keeps the model to the tools. Compiles what is new: call it on a thread.

        Raises:
            ApiError: a tool cannot be enforced as it must be.
        """
        if self.tool_parser is None:
            return ToolFormat(None)
        from allspark import exit_gate
        from allspark.grammar_compiler import Compiler

        try:
            with exit_gate.passing():
                return tool_format(
                    self.tool_parser,
                    self.tools,
                    self.choice,
                    Compiler.of(entry.model.tokenizer),
                    parallel=self.parallel,
                    reasoning_parser=self.reasoning_parser,
                    enable_thinking=self.enable_thinking,
                    begins_in_reasoning=self._begins_in_reasoning(prompt),
                )
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param="tools", code="invalid_value") from None

    def make_check(self, unchecked: Collection[str]) -> CallCheck:
        """What validates one output's calls of the tools with these names."""
        return CallCheck([tool for tool in self.tools if tool.name in unchecked])

    def make_parser(self, entry: Entry, prompt: str) -> MessageParser | None:
        """What reads one output; None where it is content and nothing else."""
        if self.tool_parser is None and self.reasoning_parser is None:
            return None
        markers = self._markers()
        special = entry.model.tokenizer.all_special_tokens
        return MessageParser(
            self.tool_parser,
            self.reasoning_parser,
            tools=self.tools,
            enable_thinking=self.enable_thinking,
            begins_in_reasoning=self._begins_in_reasoning(prompt),
            left_out=[token for token in special if token not in markers],
        )

    def keeps_special_tokens(self, entry: Entry) -> bool:
        """Whether markers are special tokens, which are then to be decoded."""
        return not self._markers().isdisjoint(entry.model.tokenizer.all_special_tokens)

    def _markers(self) -> set[str]:
        tools, reasoning = self.tool_parser, self.reasoning_parser
        return {*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ())}

    def _begins_in_reasoning(self, prompt: str) -> bool | None:
        parser = self.reasoning_parser
        if parser is None or parser.needs_flag:
            return None
        return parser.is_opened_by(prompt)


def plan_tools(body: ChatBody, entry: Entry, settings: ServerSettings) -> ToolPlan:
    """Raises ApiError where a tool or the choice of one is wrong."""
    tools = _checked("tools", read_tools, body.tools)
    choice = _checked("tool_choice", read_tool_choice, body.tool_choice, tools)
    template = _template_text(entry)
    tool_parser = None
    if choice.mode != "none":
        tool_parser = choose_tool_parser(template, settings.tool_call_parser)
        if tool_parser is None:
            message = (
                "tools are given, but the model's chat template shows no syntax for calls; "
                "--tool-call-parser of the server names one"
            )
            raise ApiError(400, message, param="tools", code="unsupported_feature")
    return ToolPlan(
        tools,
        choice,
        tool_parser,
        choose_reasoning_parser(template, settings.reasoning_parser),
        _enable_thinking(body),
        body.parallel_tool_calls is not False,
    )


def _checked(param: str, read: Any, *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except ValueError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def _enable_thinking(body: ChatBody) -> bool | None:
    options = body.chat_template_kwargs or {}
    given = options.get("enable_thinking", options.get("thinking", body.enable_thinking))
    return None if given is None else bool(given)


def _template_text(entry: Entry) -> str | None:
    """The Jinja text of the tokenizer's own template."""
    template = getattr(entry.model.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(template.values())
    return template if isinstance(template, str) else None
