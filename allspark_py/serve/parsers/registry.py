"""Chooses parsers: by name, or by what a model's chat template contains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

from allspark.serve.parsers.deepseek import DeepSeekParser
from allspark.serve.parsers.json_parsers import InternParser, LlamaParser, QwenParser
from allspark.serve.parsers.mistral import MistralParser
from allspark.serve.parsers.reasoning import REASONING_PARSERS, ReasoningParser
from allspark.serve.parsers.tool_parser import ToolParser
from allspark.serve.parsers.xml_parsers import GlmParser, Qwen3CoderParser

TOOL_PARSERS: tuple[ToolParser, ...] = (
    QwenParser(),
    Qwen3CoderParser(),
    LlamaParser(),
    InternParser(),
    MistralParser(),
    DeepSeekParser(),
    GlmParser(),
)


class _Named(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...


_Parser = TypeVar("_Parser", bound=_Named)


def _by_name(parsers: Iterable[_Parser], name: str, kind: str) -> _Parser:
    named = {known: parser for parser in parsers for known in parser.names}
    if name not in named:
        known = ", ".join(sorted(named))
        raise ValueError(f"there is no {kind} parser {name!r}; the names are {known}")
    return named[name]


def choose_tool_parser(chat_template: str | None, name: str | None = None) -> ToolParser | None:
    """The parser with a name; without one, that of the template's syntax, or None.

    Raises:
        ValueError: an unknown name; it lists the names.
    """
    if name is None:
        name = _syntax_of_tools(chat_template or "")
    return _by_name(TOOL_PARSERS, name, "tool-call") if name else None


def choose_reasoning_parser(
    chat_template: str | None, name: str | None = None
) -> ReasoningParser | None:
    """As choose_tool_parser, for reasoning."""
    if name is None:
        name = _syntax_of_reasoning(chat_template or "")
    return _by_name(REASONING_PARSERS, name, "reasoning") if name else None


def _syntax_of_tools(template: str) -> str | None:
    if "<|action_start|>" in template and "<|plugin|>" in template:
        return "internlm"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek-v3"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return "glm47"
        if "<function=" in template:
            return "qwen3coder"
        # Other models of this marker write calls of other kinds.
        return "qwen" if re.search(r'\\?"arguments\\?"', template) else None
    # Models that came from Llama 3 have its headers, and syntaxes of their own.
    if "<|start_header_id|>ipython" in template and re.search(r'\\?"parameters\\?": ', template):
        return "llama3"
    return None


def _syntax_of_reasoning(template: str) -> str | None:
    if "</think>" not in template:
        return None
    if "<｜Assistant｜>" in template and re.search(r"\bthinking\b", template):
        return "deepseek-v3"
    return "default"
