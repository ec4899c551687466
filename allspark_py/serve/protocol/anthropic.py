"""Bodies of Anthropic's routes."""

from __future__ import annotations

from typing import Any, Literal

from allspark.serve.protocol.common import Part, RequestBody
from pydantic import Field


class AnthropicMessage(Part):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class AnthropicTool(Part):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    # Known, and without effect here.
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    format: OutputFormat | None = None
    effort: str | None = Field(None, description="without effect")


class CountTokensBody(RequestBody):
    """/v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[Any] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="output_config.format as earlier clients call it"
    )
    # Known, and without effect here.
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    # Refused where it asks for something.
    mcp_servers: list[dict[str, Any]] | None = None


class MessagesBody(CountTokensBody):
    """/v1/messages."""

    max_tokens: int = Field(ge=0, description="0: the prompt is computed, for the prefix cache")
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, description="0: all tokens")
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    # Known, and without effect here.
    diagnostics: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    # Refused where it asks for something.
    container: str | dict[str, Any] | None = None
