"""/v1/embeddings, /v1/encode, /tokenize, /detokenize, /get_ppl, /generate."""

from __future__ import annotations

from typing import Any

from allspark.serve.field_names import check_fields
from allspark.serve.generate import GenerateStream, start_generate, whole_generate
from allspark.serve.json_body import read_json, validate
from allspark.serve.protocol.answers import (
    Detokenized,
    Embeddings,
    Encoded,
    Generated,
    Perplexity,
    Tokenized,
)
from allspark.serve.protocol.texts import (
    DetokenizeBody,
    EmbeddingBody,
    EncodeBody,
    GenerateBody,
    PerplexityBody,
    TokenizeBody,
)
from allspark.serve.routes.common import EVENTS, Json, described, ignored_header
from allspark.serve.sse import EventStream, until_gone
from allspark.serve.state import ServerState
from allspark.serve.text_work import on_thread
from allspark.serve.texts import detokenize, embeddings, encode_texts, perplexity, tokenize
from fastapi import APIRouter, Request

DEADLINE = {504: "the time of a request has passed (--request-timeout)"}


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["texts"])
    settings, catalog = state.settings, state.catalog

    shown = described(EmbeddingBody, Embeddings, errors=DEADLINE)

    @router.post("/v1/embeddings", openapi_extra=shown)
    async def v1_embeddings(request: Request) -> Any:
        """Embeddings of texts or token ids."""
        body = validate(EmbeddingBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        work = embeddings(catalog.get(body.model), body, settings)
        return Json(await until_gone(request.receive, work), headers=ignored_header(body))

    @router.post("/v1/encode", openapi_extra=described(EncodeBody, Encoded))
    async def v1_encode(request: Request) -> Any:
        """The token ids of a text, or of each of a list."""
        body = validate(EncodeBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        headers = ignored_header(body)
        texts = [body.input] if isinstance(body.input, str) else body.input
        ids = await on_thread(texts, encode_texts, catalog.get(body.model), body, texts)
        lengths = list(map(len, ids))
        if isinstance(body.input, str):
            return Json({"input_ids": ids[0], "length": lengths[0]}, headers=headers)
        return Json({"input_ids": ids, "length": lengths}, headers=headers)

    @router.post("/tokenize", openapi_extra=described(TokenizeBody, Tokenized))
    async def tokenize_text(request: Request) -> Any:
        """The token ids of a text or a conversation."""
        body = validate(TokenizeBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        texts = (body.prompt, body.messages, body.tools, body.chat_template_kwargs)
        answer = await on_thread(texts, tokenize, catalog.get(body.model), body)
        return Json(answer, headers=ignored_header(body))

    @router.post("/detokenize", openapi_extra=described(DetokenizeBody, Detokenized))
    async def detokenize_ids(request: Request) -> Any:
        """The text of token ids."""
        body = validate(DetokenizeBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        tokens = body.tokens
        text = await on_thread(tokens, detokenize, catalog.get(body.model), tokens)
        return Json({"prompt": text}, headers=ignored_header(body))

    shown = described(PerplexityBody, Perplexity, errors=DEADLINE)

    @router.post("/get_ppl", openapi_extra=shown)
    async def get_ppl(request: Request) -> Any:
        """The mean cross entropy of a text or ids; its exp is the perplexity."""
        body = validate(PerplexityBody, await read_json(request, settings.max_body_bytes))
        check_fields(body, settings)
        work = perplexity(catalog.get(body.model), body.input, settings)
        answer = {"ppl": await until_gone(request.receive, work)}
        return Json(answer, headers=ignored_header(body))

    @router.post("/generate", openapi_extra=described(GenerateBody, Generated, stream=EVENTS))
    async def generate(request: Request) -> Any:
        """Continues a text or ids, without a chat template."""
        body = validate(GenerateBody, await read_json(request, settings.max_body_bytes))
        call = await start_generate(state, body)
        headers = ignored_header(body)
        if body.stream:
            return EventStream(GenerateStream(call, body), settings.keep_alive_interval, headers)
        return Json(await until_gone(request.receive, whole_generate(call, body)), headers=headers)

    return router
