"""Answers lines in OpenAI's batch form by the code that answers the same requests over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from allspark.batch.answer import Answer, to_line
from allspark.batch.lines import LineError
from allspark.batch.origin import Origin, line_seed
from allspark.error_text import shown
from allspark.serve.chat import start_chat, whole_chat
from allspark.serve.choice import request_id
from allspark.serve.completion import start_completion, whole_completion
from allspark.serve.errors import RETRY_AFTER_S, ApiError
from allspark.serve.field_names import check_fields
from allspark.serve.ids import make_id, origin
from allspark.serve.json_body import check_depth, validate
from allspark.serve.protocol.common import ChatBody, CompletionBody, GenerationBody
from allspark.serve.protocol.texts import EmbeddingBody
from allspark.serve.state import ServerState
from allspark.serve.texts import embeddings

logger = logging.getLogger("allspark.serve")

MAX_CUSTOM_ID_CHARS = 512


class RequestLines:
    """The lines of one run.

    Args:
        run: what tells the run from others; ids follow from it.
        created: the time of all answers, in seconds since 1970.
        seed: the seeds of requests without one follow from it and the line's number.
        priority: of all requests; None: what each says.
    """

    def __init__(
        self, state: ServerState, run: str, created: int, seed: int, priority: int | None = None
    ):
        self._state = state
        self._run_name = run
        self._created = created
        self._seed = seed
        self._priority = priority

    async def answer(self, number: int, value: Any) -> Answer:
        """The output line of a line's JSON value. It never raises for one."""
        # The context is that of the line's task, and ends with it.
        origin.set(Origin(self._run_name, number, self._created))
        head = {"id": make_id("batch_req", "_"), "custom_id": custom_id_of(value)}
        request_id.set(make_id("req", "_"))
        try:
            check_line(value)
        except LineError as error:
            return failed_line(head, error.code, str(error))
        try:
            body = await self._retried(value["url"], value["body"], number)
        except ApiError as error:
            return self._line(head, error.status, error.to_openai())
        except Exception as error:  # of this line alone
            logger.exception("line %d of a batch failed", number)
            text = f"the server failed: {type(error).__name__}"
            error_body = ApiError(500, text, code="internal_error").to_openai()
            return self._line(head, 500, error_body)
        return self._line(head, 200, body)

    async def _retried(self, url: str, body: dict[str, Any], number: int) -> dict[str, Any]:
        """The body of an answer. Where other requests have all the room, it tries again."""
        while True:
            try:
                return await self._request(url, body, line_seed(self._seed, number))
            except ApiError as error:
                if error.status != 429:
                    raise
            await asyncio.sleep(RETRY_AFTER_S)

    async def _request(self, url: str, body: dict[str, Any], seed: int) -> dict[str, Any]:
        check_depth(body)
        kind, run = ENDPOINTS[url]
        request = validate(kind, body)
        if getattr(request, "stream", False):
            message = "stream is true; the answers of a batch are whole"
            raise ApiError(400, message, param="stream", code="unsupported_feature")
        if isinstance(request, GenerationBody) and request.seed in (None, -1):
            request.seed = seed
        if self._priority is not None:
            request.priority = self._priority
        answer = await run(self._state, request)
        # What the prefix cache had depends on what else ran.
        answer["usage"].pop("prompt_tokens_details", None)
        return answer

    def _line(self, head: Mapping[str, Any], status: int, body: dict[str, Any]) -> Answer:
        response = {"status_code": status, "request_id": request_id.get(), "body": body}
        usage = body.get("usage", {})
        return Answer(
            to_line({**head, "response": response, "error": None}),
            is_error=status != 200,
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_output_tokens=usage.get("completion_tokens", 0),
        )


async def _chat(state: ServerState, body: ChatBody) -> dict[str, Any]:
    return await whole_chat(await start_chat(state, body))


async def _completion(state: ServerState, body: CompletionBody) -> dict[str, Any]:
    return await whole_completion(await start_completion(state, body))


async def _embedding(state: ServerState, body: EmbeddingBody) -> dict[str, Any]:
    check_fields(body, state.settings)
    return await embeddings(state.catalog.get(body.model), body, state.settings)


# The routes that lines may name: the form of the body, and what answers it.
ENDPOINTS: dict[str, tuple[Any, Callable[[ServerState, Any], Awaitable[dict[str, Any]]]]] = {
    "/v1/chat/completions": (ChatBody, _chat),
    "/v1/completions": (CompletionBody, _completion),
    "/v1/embeddings": (EmbeddingBody, _embedding),
}


def custom_id_of(value: Any) -> str | None:
    """The name that a line gives itself; None where it has none."""
    found = value.get("custom_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def check_line(value: Any, endpoint: str | None = None) -> None:
    """Checks all of a line but its body.

    Args:
        endpoint: the only url; None: each of ENDPOINTS.

    Raises:
        LineError: what is wrong, with the field.
    """
    if not isinstance(value, dict):
        raise LineError(f"the line is a JSON {type(value).__name__}; it must be an object")
    for name in ("custom_id", "method", "url", "body"):
        if name not in value:
            raise LineError(f"{name} is missing", "missing_required_parameter")
    custom_id = value["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        bound = f"a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineError(f"custom_id is {shown(custom_id)}; it must be {bound}")
    if value["method"] != "POST":
        raise LineError(f"method is {shown(value['method'])}; it must be 'POST'")
    known = [endpoint] if endpoint is not None else list(ENDPOINTS)
    if value["url"] not in known:
        listed = " or ".join(map(repr, known))
        raise LineError(f"url is {shown(value['url'])}; it must be {listed}", "invalid_url")
    if not isinstance(value["body"], dict):
        raise LineError(f"body is {shown(value['body'])}; it must be an object")


def failed_line(head: Mapping[str, Any], code: str, message: str) -> Answer:
    """The output line of a line that was no request, or was not run."""
    value = {**head, "response": None, "error": {"code": code, "message": message}}
    return Answer(to_line(value), is_error=True)
