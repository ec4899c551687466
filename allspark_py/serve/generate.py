"""/generate: ids or a raw text in, text and ids out, as LMDeploy's clients know it."""

from __future__ import annotations

from typing import Any

from allspark.serve.choice import Choice, finish, start_choices
from allspark.serve.errors import invalid_value
from allspark.serve.field_names import check_fields
from allspark.serve.fields import naming, own_of, to_fields
from allspark.serve.prompt_log import log_prompt
from allspark.serve.protocol.texts import GenerateBody
from allspark.serve.sse import DONE, Writer, frame
from allspark.serve.state import ServerState
from allspark.serve.text_work import on_thread
from allspark.serve.texts import encode_inputs


class GenerateCall:
    """A request to /generate, started."""

    def __init__(self, num_prompt_tokens: int, choice: Choice):
        self.choice = choice
        self._num_prompt_tokens = num_prompt_tokens

    def part(self, has_logprobs: bool) -> dict[str, Any]:
        """What came since the last call."""
        new = self.choice.take()
        ids = new.ids_from_generate
        info: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.choice.num_tokens,
            "finish_reason": None,
        }
        if self.choice.is_finished:
            info["finish_reason"] = {"type": self.choice.finish_reason}
        if has_logprobs:
            info["output_token_logprobs"] = list(zip(new.token_logprobs_list, ids, strict=False))
        return {"text": new.text, "output_ids": ids, "meta_info": info}

    def release(self) -> None:
        """Stops it if it runs."""
        self.choice.release()


async def start_generate(state: ServerState, body: GenerateBody) -> GenerateCall:
    """Checks a request and starts it. Raises ApiError where it is refused."""
    entry = state.catalog.get(body.model)
    check_fields(body, state.settings, ("image_data", "return_routed_experts"))
    if (body.prompt is None) == (body.input_ids is None):
        raise invalid_value("prompt and input_ids: one of them must be given", "prompt")
    if (body.n or 1) > 1:
        raise invalid_value(f"n is {body.n}; it must be 1", "n")
    fields = to_fields(body, entry, state.settings, body.max_tokens)
    if body.return_logprob:
        fields["logprobs"] = True
    given = body.prompt if body.prompt is not None else body.input_ids
    (ids,) = await on_thread(given, encode_inputs, entry, [given], "prompt")
    with naming(body):
        (choice,) = await start_choices(entry, ids, fields, own_of(body))
    log_prompt(state.settings, entry, ids)
    return GenerateCall(len(ids), choice)


async def whole_generate(call: GenerateCall, body: GenerateBody) -> dict[str, Any]:
    """The answer, once it has ended."""
    try:
        await finish([call.choice])
    finally:
        call.release()
    if call.choice.error is not None:
        raise call.choice.error
    return call.part(bool(body.return_logprob))


class GenerateStream:
    """The events of a streamed answer."""

    def __init__(self, call: GenerateCall, body: GenerateBody):
        self._call = call
        self._has_logprobs = bool(body.return_logprob)
        self._writer: Writer | None = None
        self._has_ended = False

    def start(self, writer: Writer) -> None:
        """Writes what comes as it comes."""
        self._writer = writer
        writer.on_free = self._write
        self._call.choice.watch(self._write, writer.fail)

    def abort(self) -> None:
        """The client went away."""
        self._call.release()

    def _write(self) -> None:
        writer = self._writer
        if writer is None or not writer.is_free or self._has_ended:
            return
        choice = self._call.choice
        part = self._call.part(self._has_logprobs)
        error = choice.error if choice.is_finished else None
        if choice.is_finished:
            self._has_ended = True
            last = frame(part) if error is None else frame(error.to_openai())
            writer.write(last + DONE, more=False)
        elif part["output_ids"]:
            writer.write(frame(part))
