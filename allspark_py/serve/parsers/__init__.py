"""Parsers of outputs: content, reasoning and tool calls. docs/tool_calls.md is their guide."""

from __future__ import annotations

from allspark.serve.parsers.guided import ToolFormat, content_format, tool_format
from allspark.serve.parsers.message_parser import MessageParser
from allspark.serve.parsers.messages import (
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
)
from allspark.serve.parsers.reasoning import ReasoningParser
from allspark.serve.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    choose_reasoning_parser,
    choose_tool_parser,
)
from allspark.serve.parsers.tool_parser import ToolParser
from allspark.serve.parsers.tools import Tool, ToolChoice, read_tool_choice, read_tools
