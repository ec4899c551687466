"""The answers of all routes, for the OpenAPI document. Nothing is made of them: tests compare them
with what the routes answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Status(Answer):
    """/health, /sleep, /wakeup and the routes of adapters."""

    status: str
    model: str | None = None


class Sleeping(Answer):
    """/is_sleeping."""

    is_sleeping: bool


class Aborted(Answer):
    """/abort_request."""

    aborted: int = Field(description="outputs that were ended")


class ModelCard(Answer):
    """A model, as OpenAI's clients read it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="the model that it is, or is an adapter of")
    parent: str | None
    max_model_len: int = Field(description="most tokens of a request, prompt and output")
    permission: list[dict[str, Any]]


class ModelCards(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(Answer):
    """A model, as Anthropic's clients read it."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int = Field(description="most output tokens")


class ModelInfos(Answer):
    data: list[ModelInfo]
    has_more: bool
    first_id: str
    last_id: str


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] = Field(description="cached_tokens")
    completion_tokens_details: dict[str, int] = Field(description="reasoning_tokens")


class FunctionCall(Answer):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class Call(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class InvalidCall(Answer):
    index: int = Field(description="the place of the call")
    message: str = Field(description="why its arguments are not valid for the tool")


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: str | int | None
    invalid_tool_calls: list[InvalidCall] | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class TextChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class AnthropicAnswer(Answer):
    """/v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    invalid_tool_calls: list[InvalidCall] | None = None
    usage: dict[str, int]


class TokenCount(Answer):
    """/v1/messages/count_tokens."""

    input_tokens: int


class InteractiveAnswer(Answer):
    """/v1/chat/interactive; also a line of a stream, whose text is what is new."""

    text: str
    tokens: int = Field(description="output tokens so far")
    input_tokens: int
    history_tokens: int = Field(description="of the turns before")
    finish_reason: Literal["stop", "length", "abort"] | None
    session_id: int
    cached_tokens: int


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: dict[str, int]


class Encoded(Answer):
    """/v1/encode: of one text or of each of a list."""

    input_ids: list[int] | list[list[int]]
    length: int | list[int]


class Tokenized(Answer):
    """/tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer):
    """/detokenize."""

    prompt: str


class Perplexity(Answer):
    """/get_ppl."""

    ppl: float = Field(description="the mean cross entropy; its exp is the perplexity")


class Generated(Answer):
    """/generate."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class ErrorDetail(Answer):
    message: str = Field(description="names the field, its value and the bound")
    type: str
    param: str | None = Field(description="the field that is wrong, as messages[2].content")
    code: str | None


class Error(Answer):
    """An error, as OpenAI's clients read it."""

    error: ErrorDetail


class AnthropicErrorDetail(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    """An error, as Anthropic's clients read it."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class OutputItem(Answer):
    """A message, reasoning or a call of a function; see OpenAI's Responses API."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: dict[str, int] = Field(description="cached_tokens")
    output_tokens: int
    output_tokens_details: dict[str, int] = Field(description="reasoning_tokens")
    total_tokens: int


class ResponseAnswer(Answer):
    """/v1/responses. Beside these it has the fields of the request."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None = Field(description="the reason")
    previous_response_id: str | None
    background: bool
    store: bool


class InputTokens(Answer):
    """/v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(Answer):
    """The items of a response's input."""

    object: Literal["list"]
    data: list[OutputItem]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: bool


class File(Answer):
    """A file of /v1/files."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: None
    filename: str
    purpose: str
    status: Literal["processed"]


class Files(Answer):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Answer):
    id: str
    object: Literal["file"]
    deleted: bool


class Batch(Answer):
    """A batch of /v1/batches. Times are seconds since 1970."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    status: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    completed_at: int | None
    request_counts: dict[str, int] = Field(description="total, completed, failed")
    errors: dict[str, Any] | None
    metadata: dict[str, str] | None


class Batches(Answer):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
