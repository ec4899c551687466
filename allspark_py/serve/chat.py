"""/v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from allspark.chat_template import TokenizerTemplate
from allspark.chat_template.messages import MessageForm, content_text, normalise
from allspark.error_text import shown
from allspark.own_threads import schema_threads
from allspark.serve.call_checks import CallCheck
from allspark.serve.catalog import Entry
from allspark.serve.choice import Choice, finish, start_choices, start_prepared
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.event_form import text_form
from allspark.serve.field_names import check_fields
from allspark.serve.fields import naming, own_of, to_fields, words_of
from allspark.serve.ids import creation_time, make_id
from allspark.serve.logprobs import MOST_ROWS, Rows, chat_rows
from allspark.serve.message import MessageBuilder
from allspark.serve.parsers import MessageParser, ToolFormat
from allspark.serve.prompt_checks import check_chars, template_error, template_variables
from allspark.serve.prompt_log import log_prompt
from allspark.serve.protocol.common import ChatBody
from allspark.serve.sse import DONE, Writer, frame
from allspark.serve.state import ServerState
from allspark.serve.text_work import SMALL, on_thread, size_of
from allspark.serve.tool_choice import THINKING_FLAGS, ToolPlan, plan_tools
from allspark.serve.usage import ReasoningTokens, usage
from allspark.text_queue import TextElements

# Fields that ask for what is not served.
NOT_SERVED = (
    "audio", "moderation", "prediction", "web_search_options", "functions", "function_call",
)  # fmt: skip
_TEXT_ONLY: tuple[Any, ...] = (None, [], ["text"])


@dataclass
class ChatOutput:
    """A choice of an answer, and what reads it."""

    choice: Choice
    builder: MessageBuilder
    check: CallCheck
    reasoning: ReasoningTokens
    rows: Rows[list[dict[str, Any]]] | None  # None: no log-probabilities are asked for

    def take_rows(self, new: TextElements, most: int | None = None) -> list[dict[str, Any]]:
        """The log-probabilities of new tokens, after those that wait; `most`: no more than that."""
        if self.rows is None:
            return []
        self.rows.put(new.ids_from_generate, new.token_logprobs_list, new.log_probs_list)
        return self.rows.take(most)


@dataclass
class ChatCall:
    """A request to the chat route, with its outputs started."""

    body: ChatBody
    entry: Entry
    id: str
    created: int
    fingerprint: str
    prompt_ids: list[int]
    outputs: list[ChatOutput]

    @property
    def head(self) -> dict[str, Any]:
        """What every chunk and the whole answer have in common."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.entry.name,
            "system_fingerprint": self.fingerprint,
        }

    @property
    def choices(self) -> list[Choice]:
        """Of all outputs."""
        return [output.choice for output in self.outputs]

    def usage(self) -> dict[str, Any]:
        """Of all choices, as far as their reasoning is counted."""
        count = sum(output.reasoning.count for output in self.outputs)
        return usage(len(self.prompt_ids), self.choices, count)

    def release(self) -> None:
        """Stops what runs."""
        for output in self.outputs:
            output.choice.release()
            output.check.cancel()
            output.reasoning.cancel()


@dataclass
class StartedConversation:
    """A prompt of messages with its outputs started: what every route of conversations needs."""

    entry: Entry
    prompt_ids: list[int]
    choices: list[Choice]
    parsers: list[MessageParser | None]  # of the choices
    fields: dict[str, Any]  # what the engine was asked for
    checks: list[CallCheck]  # of their calls


async def start_conversation(
    state: ServerState, body: ChatBody, prompt_only: bool = False
) -> StartedConversation:
    """Checks a request and starts its outputs.

    Args:
        prompt_only: nothing is generated; the prefix cache then has the prompt.

    Raises:
        ApiError: the request is refused.
    """
    entry = state.catalog.get(body.model)
    check_fields(body, state.settings, NOT_SERVED)
    if body.modalities not in _TEXT_ONLY:
        message = f"modalities is {shown(body.modalities)}; only ['text'] is served"
        raise ApiError(400, message, param="modalities", code="unsupported_feature")
    if body.chat_template is not None and not state.settings.allow_request_templates:
        message = "chat_template is given; this server takes none (--allow-request-templates)"
        raise ApiError(400, message, param="chat_template", code="unsupported_feature")
    plan = _plan(state, body, entry)
    max_tokens = body.max_completion_tokens or body.max_tokens
    fields = to_fields(body, entry, state.settings, max_tokens)
    if body.logprobs:
        fields.update(logprobs=True, top_logprobs=body.top_logprobs or 0)
    elif body.top_logprobs:
        message = f"top_logprobs is {body.top_logprobs}; it needs logprobs to be true"
        raise invalid_value(message, "top_logprobs")
    if plan.keeps_special_tokens(entry):
        fields["skip_special_tokens"] = False
    if prompt_only:
        fields["prompt_only"] = True
        fields.pop("response_format", None)
    made: list[_Prompt] = []

    def prepare() -> tuple[list[int], dict[str, Any]]:
        made.append(_prepare(body, entry, plan))
        return made[0].ids, fields

    own, tool_format = own_of(body), ToolFormat(None)
    with naming(body):
        if _is_quick(body, plan, fields):
            choices = await start_prepared(entry, prepare, own)
        else:
            ids, fields = await on_thread(_texts(body), prepare)
            if plan.has_format:  # which may be new, and is then compiled
                tool_format = await schema_threads.run(plan.output_format, entry, made[0].text)
            if tool_format.response_format is not None and not prompt_only:
                fields["response_format"] = tool_format.response_format
            choices = await start_choices(entry, ids, fields, own)
    (prompt,) = made
    log_prompt(state.settings, entry, prompt.ids)
    parsers = [plan.make_parser(entry, prompt.text) for _ in choices]
    checks = [plan.make_check(tool_format.unchecked) for _ in choices]
    return StartedConversation(entry, prompt.ids, choices, parsers, fields, checks)


def _is_quick(body: ChatBody, plan: ToolPlan, fields: dict[str, Any]) -> bool:
    """Whether a prompt is made, and its request started, within a millisecond or so."""
    has_own_work = plan.has_format or body.chat_template is not None
    return not has_own_work and size_of((*_texts(body), *words_of(fields)), SMALL) <= SMALL


def _texts(body: ChatBody) -> tuple[Any, ...]:
    """What the chat template makes the prompt of."""
    return body.messages, body.tools, body.documents, body.chat_template_kwargs


async def count_prompt_tokens(state: ServerState, body: ChatBody) -> int:
    """The length of the prompt that start_conversation makes. Raises ApiError as it does."""
    entry = state.catalog.get(body.model)
    _, ids = await on_thread(_texts(body), _prompt, body, entry, _plan(state, body, entry))
    return len(ids)


async def start_chat(state: ServerState, body: ChatBody) -> ChatCall:
    """Checks a request and starts its outputs.

    Raises:
        ApiError: the request is refused.
    """
    conversation = await start_conversation(state, body)
    reasoning = state.settings.reasoning_fields if body.include_reasoning is not False else ()
    tokenizer = conversation.entry.model.tokenizer

    def output(choice: Choice, parser: MessageParser | None, check: CallCheck) -> ChatOutput:
        builder = MessageBuilder(parser, reasoning)
        rows = Rows(partial(chat_rows, tokenizer)) if body.logprobs else None
        return ChatOutput(choice, builder, check, ReasoningTokens(builder, tokenizer), rows)

    read_by = (conversation.choices, conversation.parsers, conversation.checks)
    return ChatCall(
        body=body,
        entry=conversation.entry,
        id=make_id("chatcmpl"),
        created=creation_time(),
        fingerprint=state.fingerprint(conversation.entry),
        prompt_ids=conversation.prompt_ids,
        outputs=[output(*each) for each in zip(*read_by, strict=True)],
    )


def _plan(state: ServerState, body: ChatBody, entry: Entry) -> ToolPlan:
    num_tools, bound = len(body.tools or ()), state.settings.max_tools
    if num_tools > bound:
        message = f"tools has {num_tools} entries; the bound is {bound}"
        raise invalid_value(message, "tools")
    return plan_tools(body, entry, state.settings)


@dataclass
class _Prompt:
    text: str
    ids: list[int]


def _prepare(body: ChatBody, entry: Entry, plan: ToolPlan) -> _Prompt:
    """Makes the prompt. Runs on a thread: a long conversation takes milliseconds."""
    text, ids = _prompt(body, entry, plan)
    if not ids:
        message = "messages have no tokens; there must be one at least"
        raise invalid_value(message, "messages")
    if len(ids) >= entry.model.session_len:
        bound = entry.model.session_len
        message = f"messages have {len(ids)} tokens; the model's length, with output, is {bound}"
        raise ApiError(400, message, param="messages", code="context_length_exceeded")
    return _Prompt(text, ids)


def _prompt(body: ChatBody, entry: Entry, plan: ToolPlan) -> tuple[str, list[int]]:
    try:
        return _encode(body, entry, plan)
    except (TypeError, ValueError) as error:
        raise template_error(error) from None


def _encode(body: ChatBody, entry: Entry, plan: ToolPlan) -> tuple[str, list[int]]:
    model, messages = entry.model, body.messages
    if isinstance(messages, str) or body.do_preprocess is False:
        text = messages if isinstance(messages, str) else _joined(messages)
        check_chars(model, text, "messages")
        return text, model.tokenizer.encode(text)
    if not messages:
        raise ValueError("messages is empty; it must have a message at least")
    options = template_variables(body.chat_template_kwargs)
    if plan.enable_thinking is not None:
        missing = [name for name in THINKING_FLAGS if options.get(name) is None]
        options.update(dict.fromkeys(missing, plan.enable_thinking))
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    template = model.template
    if body.chat_template is not None:
        template = TokenizerTemplate(model.tokenizer, body.chat_template)
    text = template.render(
        messages,
        tools=body.tools if plan.choice.mode != "none" else None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        **options,
    )
    check_chars(model, text, "messages")
    return text, template.encode(model.tokenizer, text)


def _joined(messages: list[dict[str, Any]]) -> str:
    """The texts of messages, without a template. Raises as the template does for anything else."""
    return "".join(content_text(each) for each in normalise(messages, MessageForm()))


def _finish(
    choice: Choice, builder: MessageBuilder, problems: list[dict[str, Any]]
) -> dict[str, Any]:
    """finish_reason and stop_reason of a finished choice, and what is wrong with its calls."""
    reason = choice.finish_reason
    # A stop string may end an output within a call.
    if reason == "stop" and builder.ends_with_calls:
        reason = "tool_calls"
    return {
        "finish_reason": reason,
        "stop_reason": choice.stop_reason,
        **({"invalid_tool_calls": problems} if problems else {}),
    }


def _logprobs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": rows, "refusal": None}


async def whole_chat(call: ChatCall) -> dict[str, Any]:
    """The answer that is not streamed, once all outputs have ended."""
    try:
        await finish(call.choices)
        choices = [await _whole_choice(call, output) for output in call.outputs]
    finally:
        call.release()
    answer = {"object": "chat.completion", **call.head, "choices": choices}
    answer["usage"] = call.usage()
    if call.body.return_token_ids:
        answer["prompt_token_ids"] = call.prompt_ids
    return answer


async def _whole_choice(call: ChatCall, output: ChatOutput) -> dict[str, Any]:
    choice, builder = output.choice, output.builder
    if choice.error is not None:
        raise choice.error
    new = choice.take()
    builder.put(new.text, is_end=True)
    problems = await output.check.wait(builder.calls)
    await output.reasoning.count_whole()
    logprobs = None
    if output.rows is not None:
        logprobs = _logprobs(await on_thread(choice.token_ids, output.take_rows, new))
    return {
        "index": choice.index,
        "message": builder.message(),
        "logprobs": logprobs,
        **_finish(choice, builder, problems),
        **({"token_ids": choice.token_ids} if call.body.return_token_ids else {}),
    }


class ChatStream:
    """The events of a streamed answer."""

    def __init__(self, call: ChatCall):
        self._call = call
        self._writer: Writer | None = None
        self._open = call.outputs
        options = call.body.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._has_each_usage = bool(options and options.continuous_usage_stats)
        # A message of calls alone has the content None, of which there is no delta.
        self._may_call = bool(call.body.tools) and call.body.tool_choice != "none"
        self._head = {"object": "chat.completion.chunk", **call.head}
        is_plain = not (call.body.logprobs or call.body.return_token_ids or self._has_each_usage)
        # By the choice's index; none where events have more than text.
        self._texts = [
            text_form(partial(self._text_event, choice)) for choice in call.choices if is_plain
        ]
        # An output that is nothing but text.
        first, *others = call.outputs
        is_text = is_plain and not others and first.builder.is_plain
        self._text_choice = first.choice if is_text else None

    def start(self, writer: Writer) -> None:
        """Writes the beginning, then what comes as it comes."""
        self._writer = writer
        writer.on_free = self._write
        first = {"role": "assistant", **({} if self._may_call else {"content": ""})}
        events = [self._event(choice, first) for choice in self._call.choices]
        if self._call.body.return_token_ids:
            events[0]["prompt_token_ids"] = self._call.prompt_ids
        writer.write(b"".join(map(frame, events)))
        if self._text_choice is not None:
            self._text_choice.watch_text(self._write, writer.fail)
            self._text_choice.write_events(self._texts[0], writer.offer)
            return
        for choice in self._call.choices:
            choice.watch(self._write, writer.fail)

    def abort(self) -> None:
        """The client went away."""
        self._call.release()

    def _write(self) -> None:
        """Everything that has come, as one event for each choice."""
        writer = self._writer
        if writer is None or not writer.is_free:
            return
        choice = self._text_choice
        if choice is not None and not choice.is_finished:
            choice.write_event(self._texts[0], writer)
            return
        data: list[bytes] = []
        still_open, num_left = [], MOST_ROWS
        for output in self._open:
            choice, builder = output.choice, output.builder
            new = choice.take()
            rows = output.take_rows(new, num_left)
            num_left -= len(rows)
            is_end = choice.is_finished and not output.rows
            delta = builder.put(new.text, is_end)
            if is_end and self._may_call and builder.is_empty:
                delta["content"] = ""
            if self._has_each_usage:
                output.reasoning.count_new()
            if delta or rows or (new.ids_from_generate and not self._texts):
                data.append(self._chunk(choice, delta, new, rows))
            problems = self._problems(output, writer) if is_end else None
            if problems is None:
                still_open.append(output)
            else:
                data.append(self._end(choice, builder, problems))
        self._open = still_open
        is_last = not self._open
        if is_last:
            if self._has_usage:
                total = self._call.usage()
                data.append(frame({**self._head, "choices": [], "usage": total}))
            data.append(DONE)
        if data:
            writer.write(b"".join(data), more=not is_last)
        if num_left == 0 and not is_last:
            writer.call_again()

    def _problems(self, output: ChatOutput, writer: Writer) -> list[dict[str, Any]] | None:
        """What is wrong with the calls of an output that has ended; None while that, or its usage,
        is found out."""
        problems = output.check.problems(output.builder.calls, writer.call_again)
        has_usage = self._has_usage or self._has_each_usage
        if has_usage and not output.reasoning.is_whole(writer.call_again):
            return None
        return problems

    def _end(
        self, choice: Choice, builder: MessageBuilder, problems: list[dict[str, Any]]
    ) -> bytes:
        if choice.error is not None:
            return frame(choice.error.to_openai())
        return self._chunk(choice, {}, finish=_finish(choice, builder, problems))

    def _chunk(
        self,
        choice: Choice,
        delta: dict[str, Any],
        new: TextElements | None = None,
        rows: list[dict[str, Any]] | None = None,
        finish: dict[str, Any] | None = None,
    ) -> bytes:
        if self._texts and finish is None and len(delta) == 1 and "content" in delta:
            return self._texts[choice.index](delta["content"])
        return frame(self._event(choice, delta, new, rows, finish))

    def _text_event(self, choice: Choice, text: str) -> dict[str, Any]:
        return self._event(choice, {"content": text})

    def _event(
        self,
        choice: Choice,
        delta: dict[str, Any],
        new: TextElements | None = None,
        rows: list[dict[str, Any]] | None = None,
        finish: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": _logprobs(rows) if rows else None,
            **(finish or {"finish_reason": None}),
        }
        if self._call.body.return_token_ids and new is not None:
            shown["token_ids"] = new.ids_from_generate
        chunk = {**self._head, "choices": [shown]}
        if self._has_each_usage:
            chunk["usage"] = self._call.usage()
        elif self._has_usage:
            chunk["usage"] = None
        return chunk
