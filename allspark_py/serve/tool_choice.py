"""Tools and reasoning of a request: what the model is shown, held to, and read by."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from allspark.chat_template import TokenizerTemplate
from allspark.serve.call_checks import CallCheck
from allspark.serve.catalog import Entry
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.fields import check_schema_size, own_of, to_format
from allspark.serve.parsers import (
    MessageParser,
    ReasoningParser,
    Tool,
    ToolChoice,
    ToolFormat,
    ToolParser,
    choose_reasoning_parser,
    choose_tool_parser,
    content_format,
    read_tool_choice,
    read_tools,
    tool_format,
)
from allspark.serve.protocol.common import ChatBody
from allspark.serve.settings import ServerSettings

if TYPE_CHECKING:
    from allspark.grammar_compiler import Compiler

# What chat templates call the flag that a request has as enable_thinking.
THINKING_FLAGS = ("enable_thinking", "thinking")
# A conversation in which a tool is called.
_CALLING = (
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
        ],
    },
)


@dataclass(frozen=True)
class ToolPlan:
    """What a request's tools and reasoning come to, before its prompt is known."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    tool_parser: ToolParser | None  # None: no call is looked for
    reasoning_parser: ReasoningParser | None
    enable_thinking: bool | None
    parallel: bool
    content: dict[str, Any] | None  # the response_format of an answer without calls
    content_name: str = "response_format"  # what the request calls it

    @property
    def has_format(self) -> bool:
        """Whether the output is kept to one, which may be to be compiled."""
        return self.tool_parser is not None or self.content is not None

    def output_format(self, entry: Entry, prompt: str) -> ToolFormat:
        """What keeps the model to the tools, and its content to the format that is asked for.
        Compiles what is new: call it on a thread.

        Raises:
            ApiError: the format or a tool cannot be enforced as it must be.
        """
        if self.tool_parser is None and (self.content is None or self.reasoning_parser is None):
            return ToolFormat(self.content)
        from allspark import exit_gate
        from allspark.grammar_compiler import Compiler

        reasoning = (
            self.reasoning_parser,
            self.enable_thinking,
            self._begins_in_reasoning(prompt),
        )
        with exit_gate.passing():
            asking = self.content_name if self.tool_parser is None else "tools"
            compiler = _checked(asking, Compiler.of, entry.model.tokenizer)
            if self.content is not None:
                # By itself, so that an error is about what the request says.
                _checked(self.content_name, compiler.prepare, self.content)
            if self.tool_parser is None:
                assert self.content is not None
                return ToolFormat(content_format(self.content, *reasoning))
            return self._tool_format(self.tool_parser, compiler, *reasoning)

    def _tool_format(
        self,
        parser: ToolParser,
        compiler: Compiler,
        reasoning: ReasoningParser | None,
        enable_thinking: bool | None,
        begins_in_reasoning: bool | None,
    ) -> ToolFormat:
        try:
            return tool_format(
                parser,
                self.tools,
                self.choice,
                compiler,
                parallel=self.parallel,
                reasoning_parser=reasoning,
                enable_thinking=enable_thinking,
                begins_in_reasoning=begins_in_reasoning,
                content=self.content,
            )
        except (TypeError, ValueError) as error:
            raise invalid_value(str(error), "tools") from None

    def make_check(self, unchecked: Collection[str]) -> CallCheck:
        """What validates one output's calls of the tools with these names."""
        return CallCheck([tool for tool in self.tools if tool.name in unchecked])

    def make_parser(self, entry: Entry, prompt: str) -> MessageParser | None:
        """What reads one output; None where it is content and nothing else."""
        if self.tool_parser is None and self.reasoning_parser is None:
            return None
        left_out: tuple[str, ...] = ()
        if self.keeps_special_tokens(entry):  # else what looks like one is text
            special = tuple(entry.model.tokenizer.all_special_tokens)
            left_out = _left_out(special, frozenset(self._markers()))
        return MessageParser(
            self.tool_parser,
            self.reasoning_parser,
            tools=self.tools,
            enable_thinking=self.enable_thinking,
            begins_in_reasoning=self._begins_in_reasoning(prompt),
            content_has_format=self.content is not None,
            left_out=left_out,
        )

    def keeps_special_tokens(self, entry: Entry) -> bool:
        """Whether markers are special tokens, which are then to be decoded."""
        return not self._markers().isdisjoint(entry.model.tokenizer.all_special_tokens)

    def _markers(self) -> set[str]:
        tools, reasoning = self.tool_parser, self.reasoning_parser
        return {*(tools.markers if tools else ()), *(reasoning.markers if reasoning else ())}

    def _begins_in_reasoning(self, prompt: str) -> bool | None:
        parser = self.reasoning_parser
        return None if parser is None else parser.is_opened_by(prompt)


def plan_tools(body: ChatBody, entry: Entry, settings: ServerSettings) -> ToolPlan:
    """Raises ApiError where a tool or the choice of one is wrong."""
    tools = _checked("tools", read_tools, body.tools)
    for index, tool in enumerate(tools):
        check_schema_size(f"tools[{index}].function.parameters", tool.parameters, settings)
    choice = _checked("tool_choice", read_tool_choice, body.tool_choice, tools)
    template = _template_text(entry, body)
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
        # A model reasons as its own template shows, whichever renders its prompts.
        choose_reasoning_parser(template, settings.reasoning_parser)
        or choose_reasoning_parser(_own_template_text(entry)),
        _enable_thinking(body),
        body.parallel_tool_calls is not False,
        to_format(body, settings),
        own_of(body).format_name,
    )


@lru_cache(maxsize=64)
def _left_out(special: tuple[str, ...], markers: frozenset[str]) -> tuple[str, ...]:
    """The special tokens that are no markers. Of those that begin others, or with a marker, none:
    a parser could not tell which is there."""
    texts = sorted({*special, *markers})
    begun = {one for one, other in pairwise(texts) if other.startswith(one)}
    begins = tuple(markers)
    return tuple(text for text in special if text not in begun and not text.startswith(begins))


def _checked(param: str, read: Any, *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except (TypeError, ValueError) as error:
        raise invalid_value(str(error), param) from None


def _enable_thinking(body: ChatBody) -> bool | None:
    """Whether the model is to reason; None: as its chat template has it."""
    options = body.chat_template_kwargs or {}
    given = [options[name] for name in THINKING_FLAGS if options.get(name) is not None]
    flag = given[0] if given else body.enable_thinking
    if flag is None and body.reasoning_effort is not None:
        flag = body.reasoning_effort != "none"  # an effort of any other kind asks for it
    return None if flag is None else bool(flag)


def _template_text(entry: Entry, body: ChatBody) -> str:
    """The Jinja text of the chat template in force; of one that is no Jinja, how it writes a
    call."""
    template = entry.model.template
    if body.chat_template is not None:
        return body.chat_template
    if isinstance(template, TokenizerTemplate):
        return template.chat_template or _own_template_text(entry)
    try:
        return template.render(_CALLING)
    except Exception:
        return ""  # it has no form for calls; a class of a user may raise anything


def _own_template_text(entry: Entry) -> str:
    """The Jinja text of the tokenizer's own templates."""
    template = getattr(entry.model.tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(template.values())
    return template if isinstance(template, str) else ""
