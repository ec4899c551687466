"""Bodies of the routes about texts that generate nothing, and of /generate."""

from __future__ import annotations

from typing import Any, Literal

from allspark.serve.protocol.common import GenerationBody, Priority, RequestBody, TokenId
from pydantic import Field

MAX_INPUTS = 2048


class EmbeddingBody(RequestBody):
    """/v1/embeddings."""

    model: str | None = None
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = "float"
    pooling: Literal["mean", "last"] | None = "mean"
    normalize: bool | None = True
    dimensions: int | None = None
    priority: Priority | None = 0
    user: str | None = None


class EncodeBody(RequestBody):
    """/v1/encode."""

    model: str | None = None
    input: str | list[str]
    do_preprocess: bool | None = False
    add_bos: bool | None = True


class TokenizeBody(RequestBody):
    """/tokenize: a text, or a conversation with its chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    return_token_strs: bool | None = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(RequestBody):
    """/detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class PerplexityBody(RequestBody):
    """/get_ppl."""

    model: str | None = None
    input: str | list[TokenId]


class GenerateBody(GenerationBody):
    """/generate: no chat template, ids in and out."""

    prompt: str | None = None
    input_ids: list[TokenId] | None = None
    max_tokens: int | None = Field(128, ge=1)
    return_logprob: bool | None = False
    # Refused where they ask for something.
    image_data: Any = None
    return_routed_experts: bool | None = None
