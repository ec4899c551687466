"""Starts responses: from the body of a request to a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from allspark.serve.chat import StartedConversation, count_prompt_tokens, start_conversation
from allspark.serve.errors import ApiError
from allspark.serve.field_names import check_fields
from allspark.serve.ids import make_id
from allspark.serve.places import shown, wrong
from allspark.serve.protocol.responses import ResponsesBody
from allspark.serve.responses.items import Item, read_items, references
from allspark.serve.responses.record import Record, response_of
from allspark.serve.responses.request import NOT_SERVED, ResponsesRequest, check, to_chat
from allspark.serve.responses.run import ResponseRun
from allspark.serve.sse import Receive, until_gone
from allspark.serve.state import ServerState
from allspark.serve.text_work import size_of

# Responses that may be gone on from.
_GONE_ON_FROM = ("completed", "incomplete")


async def start_response(state: ServerState, body: ResponsesBody, receive: Receive) -> ResponseRun:
    """Checks a request and starts its response.

    Args:
        receive: tells whether the client goes away while stored responses are read.

    Raises:
        ApiError: the request is refused.
    """
    check_fields(body, state.settings, NOT_SERVED)
    id = make_id("resp", "_")
    is_kept = body.store is not False and state.responses.is_storing
    if body.background and not is_kept and body.store is not False:
        raise wrong("background", "is true; this server stores no responses")
    request, items = await until_gone(receive, _read(state, body, id))
    conversation = await _start(state, body, request)
    try:
        head = _head(id, body, conversation, is_kept)
        is_background = bool(body.background)
        status: Any = "queued" if is_background else "in_progress"
        record = Record(head, items, status=status, has_begun=not is_background)
        if is_background:
            await state.responses.reserve(record)
        run = ResponseRun(state, record, request, conversation, is_kept)
        run.start()
    except BaseException:
        conversation.choices[0].release()
        raise
    return run


async def count_input(state: ServerState, body: ResponsesBody, receive: Receive) -> dict[str, Any]:
    """The answer of /v1/responses/input_tokens."""
    request, _ = await until_gone(receive, _read(state, body, make_id("resp", "_")))
    try:
        count = await count_prompt_tokens(state, request.body)
    except ApiError as error:
        raise request.renamed(error) from None
    return {"object": "response.input_tokens", "input_tokens": count}


async def _read(
    state: ServerState, body: ResponsesBody, id: str
) -> tuple[ResponsesRequest, list[Item]]:
    """The request for chat, and the input's items."""
    check(body)
    assert body.input is not None
    context = await _context(state, body.previous_response_id)
    others = await _referred(state, references(body.input))
    bound = state.settings.max_body_bytes

    def translate() -> tuple[ResponsesRequest, list[Item]]:
        assert body.input is not None
        if size_of(list(others.values()), bound) > bound:
            problem = f"refers to items that have more than {bound} characters together, the bound"
            raise wrong("input", f"{problem} (--max-body-bytes)")
        items = read_items(body.input, id, others)
        return to_chat(body, context, items), items

    return await asyncio.to_thread(translate)  # a long conversation takes milliseconds


async def _context(state: ServerState, previous: str | None) -> Sequence[Record]:
    if previous is None:
        return ()
    records = await state.responses.conversation(previous)
    status = records[-1].status
    if status not in _GONE_ON_FROM:
        message = f"the response {shown(previous)} is {status}; only one that is completed or "
        message += "incomplete can be gone on from"
        param = "previous_response_id"
        raise ApiError(400, message, param=param, code="previous_response_not_completed")
    return records


async def _referred(state: ServerState, item_ids: Mapping[int, str]) -> dict[int, Item]:
    """The items that an input's `item_reference`s name, by their places. Each response is read
    once."""
    known: dict[str | None, dict[str, Item]] = {None: {}}
    found = {}
    for index, item_id in item_ids.items():
        response_id = response_of(item_id)
        if response_id is not None and response_id not in known:
            known[response_id] = await _items_of(state, response_id)
        if item_id not in known[response_id]:
            place = f"input[{index}].id"
            message = f"{place}: there is no item {shown(item_id)}"
            raise ApiError(404, message, place, "item_not_found")
        found[index] = known[response_id][item_id]
    return found


async def _items_of(state: ServerState, response_id: str) -> dict[str, Item]:
    """The items of a response by their ids; none where there is no such response."""
    try:
        record = await state.responses.find(response_id)
    except ApiError:
        return {}
    outputs = {item.id: item.shown() for item in record.items if item.is_done}
    return {**{item["id"]: item for item in record.input}, **outputs}


async def _start(
    state: ServerState, body: ResponsesBody, request: ResponsesRequest
) -> StartedConversation:
    try:
        return await start_conversation(state, request.body)
    except ApiError as error:
        is_too_long = error.code == "context_length_exceeded"
        cuts = request.cuts() if is_too_long and body.truncation == "auto" else []
        if not cuts:
            raise request.renamed(error) from None
    shorter = await _truncated(state, body, request, cuts)
    try:
        return await start_conversation(state, shorter.body)
    except ApiError as error:
        raise shorter.renamed(error) from None


async def _truncated(
    state: ServerState, body: ResponsesBody, request: ResponsesRequest, cuts: Sequence[int]
) -> ResponsesRequest:
    """The request without as few of its oldest messages as leave room for an output: for
    max_output_tokens, or a quarter of the model's length; at most half of it."""
    length = state.catalog.get(body.model).model.session_len
    bound = length - min(body.max_output_tokens or length // 4, length // 2)
    first, last = 0, len(cuts) - 1  # the wanted cut is among these, or none is enough
    while first < last:
        middle = (first + last) // 2
        count = await count_prompt_tokens(state, request.without(cuts[middle]).body)
        first, last = (first, middle) if count <= bound else (middle + 1, last)
    return request.without(cuts[first])


def _head(
    id: str, body: ResponsesBody, conversation: StartedConversation, is_kept: bool
) -> dict[str, Any]:
    """The fields of a response that stay the same."""
    text, reasoning = body.text, body.reasoning
    text_format: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        text_format = text.format.model_dump(by_alias=True, exclude_unset=True)
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": conversation.entry.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_kept,
        "temperature": conversation.fields["temperature"],
        "text": {"format": text_format, "verbosity": (text and text.verbosity) or "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": conversation.fields["top_p"],
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as it is in force."""
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": bool(tool.get("strict")),
    }
