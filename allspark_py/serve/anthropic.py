"""/v1/messages: Anthropic's protocol, over what chat does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allspark.serve.anthropic_request import NOT_SERVED, MessagesRequest, to_chat
from allspark.serve.blocks import BlockBuilder
from allspark.serve.call_checks import CallCheck
from allspark.serve.chat import count_prompt_tokens, start_conversation
from allspark.serve.choice import Choice, finish
from allspark.serve.errors import ApiError
from allspark.serve.field_names import check_fields
from allspark.serve.ids import make_id
from allspark.serve.protocol.anthropic import CountTokensBody, MessagesBody
from allspark.serve.sse import Writer, typed_frame
from allspark.serve.state import ServerState

PING = typed_frame({"type": "ping"})


@dataclass
class MessagesCall:
    """A request to /v1/messages, with its output started."""

    request: MessagesRequest
    id: str
    model: str
    stop_sequences: list[str]
    num_prompt_tokens: int
    choice: Choice
    builder: BlockBuilder
    check: CallCheck

    def message(self, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        """The message with its content and the reason of its end."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end,
            "usage": self.usage(),
        }

    def end(self, problems: list[dict[str, Any]]) -> dict[str, Any]:
        """stop_reason and stop_sequence, once the output has ended, and what is wrong with its
        calls."""
        return {**self._end(), **({"invalid_tool_calls": problems} if problems else {})}

    def _end(self) -> dict[str, Any]:
        reason, stop = self.choice.finish_reason, self.choice.stop_reason
        if reason != "stop":  # cut off: by its length, its time, or /abort_request
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if stop in self.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        ended = "tool_use" if self.builder.has_tool_use else "end_turn"
        return {"stop_reason": ended, "stop_sequence": None}

    @property
    def error(self) -> ApiError | None:
        """Why the output ended in an error; None if it did not."""
        error = self.choice.error
        return error and self.request.renamed(error)

    def usage(self) -> dict[str, int]:
        """Tokens so far. Those that the prefix cache had are not among input_tokens."""
        cached = self.choice.cached_tokens
        return {
            "input_tokens": self.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.choice.num_tokens,
        }

    def release(self) -> None:
        """Stops what runs."""
        self.choice.release()
        self.check.cancel()

    def take(self) -> list[dict[str, Any]]:
        """The events of what came since the last call."""
        is_end = self.choice.is_finished
        return self.builder.put(self.choice.take_text(), is_end)


async def start_messages(state: ServerState, body: MessagesBody) -> MessagesCall:
    """Checks a request and starts its output. Raises ApiError where it is refused."""
    check_fields(body, state.settings, NOT_SERVED)
    request = to_chat(body, state.settings)
    try:
        is_prompt = body.max_tokens == 0
        conversation = await start_conversation(state, request.body, prompt_only=is_prompt)
    except ApiError as error:
        raise request.renamed(error) from None
    return MessagesCall(
        request=request,
        id=make_id("msg", "_"),
        model=conversation.entry.name,
        stop_sequences=body.stop_sequences or [],
        num_prompt_tokens=len(conversation.prompt_ids),
        choice=conversation.choices[0],
        builder=BlockBuilder(conversation.parsers[0]),
        check=conversation.checks[0],
    )


async def count_tokens(state: ServerState, body: CountTokensBody) -> dict[str, int]:
    """The answer of /v1/messages/count_tokens."""
    request = to_chat(body, state.settings)
    try:
        return {"input_tokens": await count_prompt_tokens(state, request.body)}
    except ApiError as error:
        raise request.renamed(error) from None


async def whole_message(call: MessagesCall) -> dict[str, Any]:
    """The answer that is not streamed, once the output has ended."""
    try:
        await finish([call.choice])
        if call.error is not None:
            raise call.error
        call.take()
        problems = await call.check.wait(call.builder.calls)
    finally:
        call.release()
    return call.message(call.builder.content(), call.end(problems))


class MessageStream:
    """The events of a streamed answer."""

    def __init__(self, call: MessagesCall):
        self._call = call
        self._writer: Writer | None = None
        self._has_ended = False

    def start(self, writer: Writer) -> None:
        """Writes the beginning, then what comes as it comes."""
        self._writer = writer
        writer.on_free = self._write
        message = self._call.message([], {"stop_reason": None, "stop_sequence": None})
        writer.write(typed_frame({"type": "message_start", "message": message}))
        self._call.choice.watch(self._write, writer.fail)

    def abort(self) -> None:
        """The client went away."""
        self._call.release()

    def _write(self) -> None:
        """Everything that has come."""
        writer, call = self._writer, self._call
        if writer is None or not writer.is_free or self._has_ended:
            return
        is_finished = call.choice.is_finished
        events = call.take()
        problems = call.check.problems(call.builder.calls, self._write) if is_finished else None
        is_end = self._has_ended = problems is not None
        error = call.error if is_end else None
        if error is not None:
            events.append(error.to_anthropic(call.choice.request_id))
        elif problems is not None:
            delta = call.end(problems)
            last = {"type": "message_delta", "delta": delta, "usage": call.usage()}
            events += [last, {"type": "message_stop"}]
        if events:
            writer.write(b"".join(map(typed_frame, events)), more=not is_end)
