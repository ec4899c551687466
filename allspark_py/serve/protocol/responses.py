"""Bodies of OpenAI's Responses routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from allspark.serve.protocol.common import (
    MAX_TOP_LOGPROBS,
    Count,
    GenerationBody,
    Metadata,
    Part,
)
from pydantic import Field

_Summary = Literal["auto", "concise", "detailed"]


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Part):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="without effect")


class Reasoning(Part):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Known, and without effect here.
    summary: _Summary | None = None
    generate_summary: _Summary | None = None
    context: str | None = None
    mode: str | None = None


LOGPROBS = "message.output_text.logprobs"
# What a response may have beside its text. All but LOGPROBS is of what is not served, or always in.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesBody(GenerationBody):
    """/v1/responses and /v1/responses/input_tokens."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Includable] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = False
    metadata: Metadata | None = None  # type: ignore[assignment]  # narrower than that of chat
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    # Known, and without effect here: there are no tools of the server, and no images.
    max_tool_calls: Count | None = None
    background_options: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    # Refused where it asks for something.
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    moderation: dict[str, Any] | None = None
    access_programs: dict[str, Any] | None = None
