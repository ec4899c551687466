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
from allspark.serve.text_work import off_loop, size_of
from allspark.serve.texts import detokenize, embeddings, perplexity, tokenize
from fastapi import APIRouter, Request


def make_router(state: ServerState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["texts"])
    settings, catalog = state.settings, state.catalog

    @router.post("/v1/embeddings", openapi_extra=described(EmbeddingBody, Embeddings))
    async def v1_embeddings(request: Request) -> Any:
        """Embeddings of texts or token ids."""
        body = validate(EmbeddingBody, await read_json(request, settings.max_body_bytes))
        headers = ignored_header(check_fields(body, settings))
        work = embeddings(catalog.get(body.model), body)
        return Json(await until_gone(request.receive, work), headers=headers)

    @router.post("/v1/encode", openapi_extra=described(EncodeBody, Encoded))
    async def v1_encode(request: Request) -> Any:
        """The token ids of a text, or of each of a list."""
        body = validate(EncodeBody, await read_json(request, settings.max_body_bytes))
        headers = ignored_header(check_fields(body, settings))
        model = catalog.get(body.model).model
        texts = [body.input] if isinstance(body.input, str) else body.input

        def encode(text: str) -> list[int]:
            if body.do_preprocess:
                return model.template.encode(model.tokenizer, model.template.get_prompt(text))
            ids: list[int] = model.tokenizer.encode(
                text, add_special_tokens=body.add_bos is not False
            )
            return ids

        ids = await off_loop(size_of(texts), lambda: [encode(text) for text in texts])
        lengths = list(map(len, ids))
        if isinstance(body.input, str):
            return Json({"input_ids": ids[0], "length": lengths[0]}, headers=headers)
        return Json({"input_ids": ids, "length": lengths}, headers=headers)

    @router.post("/tokenize", openapi_extra=described(TokenizeBody, Tokenized))
    async def tokenize_text(request: Request) -> Any:
        """The token ids of a text or a conversation."""
        body = validate(TokenizeBody, await read_json(request, settings.max_body_bytes))
        headers = ignored_header(check_fields(body, settings))
        size = size_of(body.prompt or "") + size_of(body.messages or [])
        answer = await off_loop(size, tokenize, catalog.get(body.model), body)
        return Json(answer, headers=headers)

    @router.post("/detokenize", openapi_extra=described(DetokenizeBody, Detokenized))
    async def detokenize_ids(request: Request) -> Any:
        """The text of token ids."""
        body = validate(DetokenizeBody, await read_json(request, settings.max_body_bytes))
        headers = ignored_header(check_fields(body, settings))
        size = size_of(body.tokens)
        text = await off_loop(size, detokenize, catalog.get(body.model), body.tokens)
        return Json({"prompt": text}, headers=headers)

    @router.post("/get_ppl", openapi_extra=described(PerplexityBody, Perplexity))
    async def get_ppl(request: Request) -> Any:
        """The mean cross entropy of a text or ids; its exp is the perplexity."""
        body = validate(PerplexityBody, await read_json(request, settings.max_body_bytes))
        headers = ignored_header(check_fields(body, settings))
        work = perplexity(catalog.get(body.model), body.input)
        return Json({"ppl": await until_gone(request.receive, work)}, headers=headers)

    @router.post("/generate", openapi_extra=described(GenerateBody, Generated, stream=EVENTS))
    async def generate(request: Request) -> Any:
        """Continues a text or ids, without a chat template."""
        body = validate(GenerateBody, await read_json(request, settings.max_body_bytes))
        call = await start_generate(state, body)
        headers = ignored_header(call.ignored)
        if body.stream:
            return EventStream(GenerateStream(call, body), settings.keep_alive_interval, headers)
        return Json(await until_gone(request.receive, whole_generate(call, body)), headers=headers)

    return router
