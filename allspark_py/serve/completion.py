"""/v1/completions."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from allspark.serve.catalog import Entry
from allspark.serve.choice import Choice, finish, start_choices, start_prepared
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.event_form import ids_form, text_form
from allspark.serve.field_names import check_fields
from allspark.serve.fields import check_outputs, naming, own_of, to_fields, words_of
from allspark.serve.ids import creation_time, make_id
from allspark.serve.logprobs import MOST_ROWS, CompletionRows, Rows
from allspark.serve.prompt_checks import check_chars
from allspark.serve.prompt_log import log_prompt
from allspark.serve.protocol.common import CompletionBody
from allspark.serve.sse import DONE, Writer, frame
from allspark.serve.state import ServerState
from allspark.serve.text_work import SMALL, on_thread, size_of
from allspark.serve.usage import usage
from allspark.text_queue import TextElements

MAX_PROMPTS = 1024
_FILL = "<FILL>"


@dataclass
class _Prompt:
    text: str | None  # None: it was given as ids, and is not shown
    ids: list[int]


class CompletionCall:
    """A request to the completion route, with its outputs started."""

    def __init__(
        self,
        body: CompletionBody,
        entry: Entry,
        fingerprint: str,
        prompts: list[_Prompt],
        choices: list[Choice],
    ):
        self.body = body
        self.entry = entry
        self.prompts = prompts
        self.choices = choices
        self.head = {
            "id": make_id("cmpl"),
            "object": "text_completion",
            "created": creation_time(),
            "model": entry.name,
            "system_fingerprint": fingerprint,
        }
        # By the choice's index; none where no log-probabilities are asked for.
        self._rows = [
            Rows(CompletionRows(entry.model.tokenizer, body.logprobs).rows)
            for _ in choices
            if body.logprobs is not None
        ]
        self._has_begun = [False] * len(choices)

    def prompt_of(self, choice: Choice) -> _Prompt:
        """The prompt that a choice continues."""
        return self.prompts[choice.index // (self.body.n or 1)]

    def has_begun(self, choice: Choice) -> bool:
        """Whether a part of the choice was shown."""
        return self._has_begun[choice.index]

    def has_news(self, choice: Choice) -> bool:
        """Whether a choice has something to show, or an end to tell."""
        return choice.has_news or bool(self._rows and self._rows[choice.index])

    def part(self, choice: Choice, most_rows: int | None = None) -> dict[str, Any]:
        """What a choice has got since the last call, as it is shown. Log-probabilities above
        `most_rows` wait for further parts, and the end with them."""
        new = choice.take()
        text = new.text
        logprobs = self._logprobs(choice, new, most_rows)
        is_first = not self._has_begun[choice.index]
        if self.body.echo and is_first:
            text = (self.prompt_of(choice).text or "") + text
        self._has_begun[choice.index] = True
        shown: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": logprobs}
        if choice.is_finished and not (self._rows and self._rows[choice.index]):
            shown.update(finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)
        else:
            shown["finish_reason"] = None
        if self.body.return_token_ids:
            shown["token_ids"] = new.ids_from_generate
            if is_first:
                shown["prompt_token_ids"] = self.prompt_of(choice).ids
        return shown

    def _logprobs(
        self, choice: Choice, new: TextElements, most_rows: int | None
    ) -> dict[str, Any] | None:
        if not self._rows:
            return None
        ids: list[int] = []
        logprobs: list[float | None] = []
        tops: list[Any] = []
        if self.body.echo and not self._has_begun[choice.index]:
            # The first token of a prompt has no probability.
            ids += self.prompt_of(choice).ids
            logprobs.append(None)
            tops.append(())
        logprobs += new.prompt_token_logprobs_list
        tops += new.prompt_log_probs_list or [()] * len(new.prompt_token_logprobs_list)
        ids += new.ids_from_generate
        logprobs += new.token_logprobs_list
        tops += new.log_probs_list
        rows = self._rows[choice.index]
        rows.put(ids, logprobs, tops)
        return rows.take(most_rows)

    async def parts(self) -> list[dict[str, Any]]:
        """All of all choices, which have ended."""

        def make() -> list[dict[str, Any]]:
            return [self.part(choice) for choice in self.choices]

        if not self._rows:
            return make()
        ids = [*(prompt.ids for prompt in self.prompts), *(each.token_ids for each in self.choices)]
        return await on_thread(ids, make)

    def usage(self) -> dict[str, Any]:
        """Of all prompts together."""
        count = sum(len(prompt.ids) for prompt in self.prompts)
        return usage(count, self.choices, num_prompts=len(self.prompts))

    def release(self) -> None:
        """Stops what runs."""
        for choice in self.choices:
            choice.release()


async def start_completion(state: ServerState, body: CompletionBody) -> CompletionCall:
    """Checks a request and starts its outputs.

    Raises:
        ApiError: the request is refused.
    """
    entry = state.catalog.get(body.model)
    check_fields(body, state.settings)
    max_tokens = body.max_completion_tokens or body.max_tokens
    is_scoring = max_tokens == 0
    if is_scoring and not body.echo:
        message = "max_tokens is 0; it must be at least 1 where echo is false"
        raise invalid_value(message, "max_tokens")
    fields = to_fields(body, entry, state.settings, None if is_scoring else max_tokens)
    if body.logprobs is not None:
        fields.update(logprobs=True, top_logprobs=body.logprobs, prompt_logprobs=bool(body.echo))
    if is_scoring:
        fields.update(prompt_only=True, prompt_logprobs=True)
    own = own_of(body)
    prompts: list[_Prompt] = []

    def prepare() -> tuple[list[int], dict[str, Any]]:
        prompts.extend(_encode(body, entry, is_scoring))
        return prompts[0].ids, fields

    if _is_quick(body, fields):
        with naming(body):
            choices = await start_prepared(entry, prepare, own)
        log_prompt(state.settings, entry, prompts[0].ids)
        return CompletionCall(body, entry, state.fingerprint(entry), prompts, choices)
    await on_thread((body.prompt, body.suffix), prepare)
    choices = []
    try:
        for prompt in prompts:
            with naming(body):
                choices += await start_choices(entry, prompt.ids, fields, own, len(choices))
            log_prompt(state.settings, entry, prompt.ids)
    except BaseException:  # all of them run, or none
        for choice in choices:
            choice.release()
        raise
    return CompletionCall(body, entry, state.fingerprint(entry), prompts, choices)


def _is_quick(body: CompletionBody, fields: dict[str, Any]) -> bool:
    """Whether it is one prompt, made and started within a millisecond or so."""
    is_one = isinstance(body.prompt, str) or bool(body.prompt and isinstance(body.prompt[0], int))
    words = (body.prompt, body.suffix, *words_of(fields))
    return is_one and "response_format" not in fields and size_of(words, SMALL) <= SMALL


def _encode(body: CompletionBody, entry: Entry, is_scoring: bool) -> list[_Prompt]:
    """The prompts with their ids. Runs on a thread."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]  # type: ignore[assignment, list-item]
    if not given or len(given) > MAX_PROMPTS:
        message = f"prompt has {len(given)} entries; it must have 1 to {MAX_PROMPTS}"
        raise invalid_value(message, "prompt")
    check_outputs("prompt", len(given) * (body.n or 1), entry)
    prompts = [_to_prompt(body, entry, index, each) for index, each in enumerate(given)]
    bound = entry.model.session_len
    for index, prompt in enumerate(prompts):
        if len(prompt.ids) + (not is_scoring) > bound:
            name = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            message = f"{name} has {len(prompt.ids)} tokens; the model's length is {bound}"
            raise ApiError(400, message, param=name, code="context_length_exceeded")
        if body.echo and prompt.text is None:
            # Ids that are none are for the engine to refuse.
            with contextlib.suppress(LookupError, OverflowError, TypeError):
                prompt.text = entry.model.tokenizer.decode(prompt.ids)
    return prompts


def _to_prompt(body: CompletionBody, entry: Entry, index: int, given: Any) -> _Prompt:
    model = entry.model
    if isinstance(given, list):
        if not given:
            raise invalid_value(f"prompt[{index}] is empty", "prompt")
        return _Prompt(None, given)
    text = given
    if body.suffix is not None or _FILL in given:
        text = _infilling(body, entry, index, given)
    check_chars(model, text, "prompt")
    ids = model.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    if not ids:
        message = f"prompt[{index}] has no tokens; it must have one at least"
        raise invalid_value(message, "prompt")
    return _Prompt(given, ids)


def _infilling(body: CompletionBody, entry: Entry, index: int, given: str) -> str:
    """The text with which a model is asked for what stands between two texts."""
    template, suffix = entry.model.template, body.suffix or ""
    if template.capability != "infilling":
        if not suffix:
            return given
        message = "suffix is given; the model's chat template cannot fill in (--cap infilling)"
        raise ApiError(400, message, param="suffix", code="unsupported_feature")
    if suffix and _FILL in given:
        message = f"suffix is given, but prompt[{index}] has {_FILL}; one of them says what follows"
        raise invalid_value(message, "suffix")
    if _FILL in suffix:
        message = f"suffix has {_FILL}, whose place is in the prompt"
        raise invalid_value(message, "suffix")
    try:
        return template.get_prompt(given if _FILL in given else f"{given}{_FILL}{suffix}")
    except (TypeError, ValueError) as error:
        param, message = "suffix" if suffix else "prompt", f"prompt[{index}]: {error}"
        raise invalid_value(message, param) from None


async def whole_completion(call: CompletionCall) -> dict[str, Any]:
    """The answer that is not streamed, once all outputs have ended."""
    try:
        await finish(call.choices)
    finally:
        call.release()
    for choice in call.choices:
        if choice.error is not None:
            raise choice.error
    parts = await call.parts()
    return {**call.head, "choices": parts, "usage": call.usage()}


class CompletionStream:
    """The events of a streamed answer. All choices run at once, each with its own index."""

    def __init__(self, call: CompletionCall):
        self._call = call
        self._writer: Writer | None = None
        self._has_ended: set[int] = set()
        options = call.body.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._has_each_usage = bool(options and options.continuous_usage_stats)
        body = call.body
        has_more = body.echo or body.logprobs is not None or self._has_each_usage
        # An output that is nothing but text, or text and ids.
        is_plain = len(call.choices) == 1 and not has_more
        has_ids = bool(body.return_token_ids)
        form = ids_form(self._ids_event) if has_ids else text_form(self._text_event)
        self._form = form if is_plain else None

    def start(self, writer: Writer) -> None:
        """Writes what comes as it comes."""
        self._writer = writer
        writer.on_free = self._write
        for choice in self._call.choices:
            if self._form is None:
                choice.watch(self._write, writer.fail)
                continue
            choice.watch_text(self._write, writer.fail, self._form.has_ids)
            if not self._form.has_ids:
                choice.write_events(self._form, writer.offer)

    def abort(self) -> None:
        """The client went away."""
        self._call.release()

    def _write(self) -> None:
        writer = self._writer
        if writer is None or not writer.is_free:
            return
        form, first = self._form, self._call.choices[0]
        if form is not None and not first.is_finished:
            # The first event of ids has those of the prompt, too.
            if not form.has_ids or self._call.has_begun(first):
                first.write_event(form, writer)
                return
        data, num_left = [], MOST_ROWS
        for choice in self._call.choices:
            # The log-probabilities of an echoed prompt come with the first output.
            if choice.index in self._has_ended or not self._call.has_news(choice):
                continue
            if num_left == 0:
                break
            part = self._call.part(choice, num_left)
            num_left -= len(part["logprobs"]["tokens"]) if part["logprobs"] else 0
            is_end = part["finish_reason"] is not None
            if is_end:
                self._has_ended.add(choice.index)
            if is_end or part["text"] or part["logprobs"] or part.get("token_ids"):
                data.append(frame(self._event(part)))
            if is_end and choice.error is not None:
                data.append(frame(choice.error.to_openai()))
        is_last = len(self._has_ended) == len(self._call.choices)
        if is_last:
            if self._has_usage:
                data.append(frame({**self._call.head, "choices": [], "usage": self._call.usage()}))
            data.append(DONE)
        if data:
            writer.write(b"".join(data), more=not is_last)
            if form is not None and not is_last:
                first.write_events(form, writer.offer)
        if num_left == 0 and not is_last:
            writer.call_again()

    def _text_event(self, text: str) -> dict[str, Any]:
        shown = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        return self._event(shown)

    def _ids_event(self, text: str, ids: list[int]) -> dict[str, Any]:
        shown = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        return self._event({**shown, "token_ids": ids})

    def _event(self, part: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._call.head, "choices": [part]}
        if self._has_each_usage:
            chunk["usage"] = self._call.usage()
        elif self._has_usage:
            chunk["usage"] = None
        return chunk
