"""Embeddings, scores and token ids of texts."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from allspark.serve.catalog import Entry
from allspark.serve.choice import Choice, Own, finish, start_choices
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.prompt_checks import check_chars, template_error, template_variables
from allspark.serve.protocol.common import MAX_TIMEOUT_MS
from allspark.serve.protocol.texts import MAX_INPUTS, EmbeddingBody, EncodeBody, TokenizeBody
from allspark.serve.settings import ServerSettings
from allspark.serve.text_work import on_thread


async def run_prompts(
    entry: Entry, prompts: Sequence[list[int]], fields: dict[str, Any], timeout_s: float
) -> list[Any]:
    """What each prompt gives without generating, in order.

    Args:
        timeout_s: of all of them together; 0: no bound.

    Raises:
        ApiError: the engine refuses one, it failed, it was late, or it was aborted; then none goes
            on.
    """
    end = time.monotonic() + timeout_s if timeout_s else math.inf
    fields = {**fields, "prompt_only": True}
    if entry.adapter is not None:
        fields["lora_name"] = entry.adapter
    choices: list[Choice] = []
    try:
        for index, ids in enumerate(prompts):
            choices += await _start(entry, ids, fields, index, choices, end)
        await finish(choices)
        for choice in choices:
            if choice.error is not None:
                raise choice.error
            if choice.finish_reason == "abort":  # there is no part of such an answer
                raise ApiError(409, "the request was aborted", code="request_aborted")
            if choice.stop_reason == "deadline":
                message = f"the request took more than {timeout_s:g} s (--request-timeout)"
                raise ApiError(504, message, code="deadline")
        return [choice.take() for choice in choices]
    finally:
        for choice in choices:
            choice.release()


async def _start(
    entry: Entry,
    ids: list[int],
    fields: dict[str, Any],
    index: int,
    before: Sequence[Choice],
    end: float,
) -> list[Choice]:
    """Starts a prompt. Where there is no room, it waits for those of its own request. `end`: of
    time.monotonic, when it is late."""
    while True:
        if end < math.inf:
            left_ms = math.ceil(1000 * (end - time.monotonic()))
            fields = {**fields, "timeout_ms": min(max(left_ms, 1), MAX_TIMEOUT_MS)}
        try:
            return await start_choices(entry, ids, fields, Own(), index)
        except ApiError as error:
            running = [choice for choice in before if not choice.is_finished]
            if error.status != 429 or not running:
                raise
        await finish(running[:1])


def encode_inputs(entry: Entry, given: Any, name: str) -> list[list[int]]:
    """The ids of one input or many, each a text or ids."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or len(given) > MAX_INPUTS:
        message = f"{name} has {len(given)} entries; it must have 1 to {MAX_INPUTS}"
        raise invalid_value(message, name)
    found = []
    for index, each in enumerate(given):
        where = name if len(given) == 1 else f"{name}[{index}]"
        if isinstance(each, str):
            check_chars(entry.model, each, where)
        ids = entry.model.tokenizer.encode(each) if isinstance(each, str) else each
        if not ids:
            raise invalid_value(f"{where} has no tokens; it must have one at least", where)
        bound = entry.model.session_len
        if len(ids) > bound:
            message = f"{where} has {len(ids)} tokens; the model's length is {bound}"
            raise ApiError(400, message, param=where, code="context_length_exceeded")
        found.append(ids)
    return found


async def embeddings(entry: Entry, body: EmbeddingBody, settings: ServerSettings) -> dict[str, Any]:
    """The answer of /v1/embeddings."""
    if body.dimensions is not None:
        raise ApiError(
            400, "dimensions is not served", param="dimensions", code="unsupported_feature"
        )
    prompts = await on_thread(body.input, encode_inputs, entry, body.input, "input")
    fields = {
        "pooling": body.pooling or "mean",
        "normalize": body.normalize is not False,
        "priority": body.priority or 0,
    }
    found = await run_prompts(entry, prompts, fields, settings.request_timeout)
    data = []
    for index, elements in enumerate(found):
        row = elements.tensors_from_model_inference[0]["embedding"]
        shown: Any = row.tolist()
        if body.encoding_format == "base64":
            shown = base64.b64encode(row.astype(np.float32).tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": entry.name, "usage": usage}


async def perplexity(entry: Entry, given: Any, settings: ServerSettings) -> float:
    """The mean cross entropy of a text or ids."""
    (ids,) = await on_thread(given, encode_inputs, entry, [given], "input")
    if len(ids) < 2:
        raise invalid_value(f"input has {len(ids)} tokens; a score needs 2", "input")
    fields = {"prompt_logprobs": True}
    (elements,) = await run_prompts(entry, [ids], fields, settings.request_timeout)
    logprobs = elements.prompt_token_logprobs_list
    return -math.fsum(logprobs) / len(logprobs)


def encode_texts(entry: Entry, body: EncodeBody, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, for /v1/encode."""
    tokenizer, template = entry.model.tokenizer, entry.model.template
    if not body.do_preprocess:
        special = body.add_bos is not False
        return [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    try:
        return [template.encode(tokenizer, template.get_prompt(text)) for text in texts]
    except (TypeError, ValueError) as error:
        raise template_error(error, "input") from None


def tokenize(entry: Entry, body: TokenizeBody) -> dict[str, Any]:
    """The answer of /tokenize."""
    model = entry.model
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt and messages: one of them must be given", "prompt")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = model.tokenizer.encode(body.prompt, add_special_tokens=special)
    else:
        assert body.messages is not None
        options = template_variables(body.chat_template_kwargs)
        try:
            text = model.template.render(
                body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                **options,
            )
            ids = model.template.encode(model.tokenizer, text)
        except (TypeError, ValueError) as error:
            raise template_error(error) from None
    answer = {"count": len(ids), "max_model_len": model.session_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = model.tokenizer.convert_ids_to_tokens(ids)
    return answer


def detokenize(entry: Entry, ids: list[int]) -> str:
    """The text of token ids. Raises ApiError for an id that is none."""
    size = len(entry.model.tokenizer)
    for index, token in enumerate(ids):
        if token >= size:
            message = f"tokens[{index}] is {token}; ids are below {size}"
            raise invalid_value(message, f"tokens[{index}]")
    text: str = entry.model.tokenizer.decode(ids)
    return text
