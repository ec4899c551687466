"""What the bodies of several routes have in common."""

from __future__ import annotations

import heapq
import inspect
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_TIMEOUT_MS = 1_000_000_000
_MAX_SEED = 9_200_000_000_000_000_000  # the engine's
# The lowest priority is that of batches; other requests have a greater one.
BATCH_PRIORITY = -1_000_000
Priority = Annotated[int, Field(gt=BATCH_PRIORITY, le=1_000_000)]
Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]
# OpenAI's bounds.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


# Older releases of pydantic's core have it for lists alone.
_FAIL_FAST = [
    kind
    for kind in ("list", "dict")
    if "fail_fast" in inspect.signature(getattr(core_schema, f"{kind}_schema")).parameters
]


def _fail_fast(schema: Any) -> None:
    """Lets validation end at the first wrong element of a list or object. An error for each of
    millions would take gigabytes, and minutes in which nothing else runs."""
    if isinstance(schema, dict):
        if schema.get("type") in _FAIL_FAST:
            schema["fail_fast"] = True
        for value in schema.values():
            _fail_fast(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            _fail_fast(value)


class Part(BaseModel):
    """A part of a body. Unknown fields are kept, so that they can be named."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    def unknown_fields(self, most: int) -> list[str]:
        """The first `most` names of fields that this server does not know, as "name" and
        "part.name": a body may have millions, which are not sorted."""
        found = heapq.nsmallest(most, self.model_extra or ())
        fields = type(self).model_fields
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            if isinstance(value, Part) and name in fields:
                shown = fields[name].alias or name
                found += [f"{shown}.{inner}" for inner in value.unknown_fields(most)]
        return found[:most]


class RequestBody(Part):
    """The body of a request. Fields marked "without effect here" are sent by clients of other
    servers, and change nothing."""


class StreamOptions(Part):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None


class StructuredOutputs(Part):
    """The form in which vLLM's clients ask for a format."""

    # pydantic's classes have a method `json`.
    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    # Known, and without effect here: there is one compiler of formats.
    disable_fallback: bool | None = None


class GenerationBody(RequestBody):
    """The fields about generation that all routes share; None: the model's or the server's."""

    model: str | None = None
    do_sample: bool | None = Field(None, description="false: greedy")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="-1 and 0: all tokens")
    typical_p: float | None = Field(None, description="1 alone, which has no effect")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    suppress_repetition_in_generation: bool | None = None
    seed: int | None = Field(None, ge=-1, le=_MAX_SEED, description="-1: another one each time")
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    bad_token_ids: list[TokenId] | None = None
    stop_words_ids: list[list[TokenId]] | None = None
    bad_words_ids: list[list[TokenId]] | None = None
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = False
    max_length: int | None = Field(None, ge=1, description="of prompt and output")
    min_length: int | None = Field(None, ge=0, description="of prompt and output")
    min_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = False
    repetition_ngram_size: int | None = Field(0, ge=0)
    repetition_ngram_threshold: int | None = Field(0, ge=0)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    num_beams: int | None = Field(None, ge=1, le=MAX_N)
    beam_early_stopping: bool | Literal["false", "true", "never"] | None = None
    length_penalty: float | None = Field(None, ge=-10, le=10)
    logprobs_mode: Literal["processed", "raw"] | None = None
    prompt_lookup_num_tokens: int | None = Field(None, ge=0, le=64)
    use_draft_model: bool | None = None
    priority: Priority | None = 0
    timeout_ms: int | None = Field(0, ge=0, le=MAX_TIMEOUT_MS)
    return_token_ids: bool | None = False
    # A format, by the names of several servers.
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    # Known, and without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    session_id: int | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    guided_decoding_backend: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


# Fields that ask for a format.
FORMAT_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structural_tag", "json_schema", "regex", "ebnf", "grammar",
)  # fmt: skip


class CompletionBody(GenerationBody):
    """/v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0)
    max_completion_tokens: int | None = Field(None, ge=1)
    suffix: str | None = None
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = True


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    messages: str | list[dict[str, Any]]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: list[dict[str, Any]] | None = None
    do_preprocess: bool | None = True
    include_reasoning: bool | None = True
    # Refused where they ask for something.
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    verbosity: str | None = None
