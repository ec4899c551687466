"""/v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allspark.serve.catalog import Entry
from allspark.serve.choice import Choice, finish, start_choices
from allspark.serve.errors import ApiError
from allspark.serve.field_names import check_fields
from allspark.serve.fields import naming, to_fields
from allspark.serve.ids import creation_time, make_id
from allspark.serve.logprobs import CompletionRows
from allspark.serve.prompt_log import log_prompt
from allspark.serve.protocol.common import CompletionBody
from allspark.serve.sse import DONE, Writer, frame
from allspark.serve.state import ServerState
from allspark.serve.text_work import check_chars, off_loop, size_of
from allspark.serve.usage import usage

MAX_PROMPTS = 1024
_FILL = "<FILL>"


@dataclass
class _Prompt:
    text: str | None  # None: it was given as ids
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
        ignored: str,
    ):
        self.body = body
        self.entry = entry
        self.prompts = prompts
        self.choices = choices
        self.ignored = ignored
        self.head = {
            "id": make_id("cmpl"),
            "object": "text_completion",
            "created": creation_time(),
            "model": entry.name,
            "system_fingerprint": fingerprint,
        }
        self._rows = [CompletionRows(entry.model.tokenizer, body.logprobs or 0) for _ in choices]
        self._has_begun = [False] * len(choices)

    def prompt_of(self, choice: Choice) -> _Prompt:
        """The prompt that a choice continues."""
        return self.prompts[choice.index // (self.body.n or 1)]

    def part(self, choice: Choice) -> dict[str, Any]:
        """What a choice has got since the last call, as it is shown."""
        pieces = choice.take()
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs(choice, pieces)
        if self.body.echo and not self._has_begun[choice.index]:
            text = self._echo(choice) + text
        is_first = not self._has_begun[choice.index]
        self._has_begun[choice.index] = True
        shown: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": logprobs}
        if choice.is_finished:
            shown.update(finish_reason=choice.finish_reason, stop_reason=choice.stop_reason)
        else:
            shown["finish_reason"] = None
        if self.body.return_token_ids:
            shown["token_ids"] = [i for piece in pieces for i in piece.ids_from_generate]
            if is_first:
                shown["prompt_token_ids"] = self.prompt_of(choice).ids
        return shown

    def _echo(self, choice: Choice) -> str:
        prompt = self.prompt_of(choice)
        if prompt.text is not None:
            return prompt.text
        text: str = self.entry.model.tokenizer.decode(prompt.ids)
        return text

    def _logprobs(self, choice: Choice, pieces: list[Any]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        ids: list[int] = []
        logprobs: list[float | None] = []
        tops: list[Any] = []
        if self.body.echo and not self._has_begun[choice.index]:
            # The first token of a prompt has no probability.
            ids += self.prompt_of(choice).ids
            logprobs.append(None)
            tops.append(())
        for piece in pieces:
            logprobs += piece.prompt_token_logprobs_list
            tops += piece.prompt_log_probs_list or [()] * len(piece.prompt_token_logprobs_list)
        for piece in pieces:
            ids += piece.ids_from_generate
            logprobs += piece.token_logprobs_list
            tops += piece.log_probs_list
        return self._rows[choice.index].rows(ids, logprobs, tops)

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
    ignored = check_fields(body, state.settings)
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of is {body.best_of}; it must be n, {body.n or 1}, or left out"
        raise ApiError(400, message, param="best_of", code="unsupported_feature")
    max_tokens = body.max_completion_tokens or body.max_tokens
    is_scoring = max_tokens == 0
    if is_scoring and not body.echo:
        message = "max_tokens is 0; it must be at least 1 where echo is false"
        raise ApiError(400, message, param="max_tokens", code="invalid_value")
    fields = to_fields(body, entry, state.settings, None if is_scoring else max_tokens)
    if body.logprobs is not None:
        fields.update(logprobs=True, top_logprobs=body.logprobs, prompt_logprobs=bool(body.echo))
    if is_scoring:
        fields.update(prompt_only=True, prompt_logprobs=True)
    prompts = await off_loop(size_of(body.prompt), _encode, body, entry)
    for index, prompt in enumerate(prompts):
        if len(prompt.ids) + (not is_scoring) > entry.model.session_len:
            bound = entry.model.session_len
            name = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            message = f"{name} has {len(prompt.ids)} tokens; the model's length is {bound}"
            raise ApiError(400, message, param=name, code="context_length_exceeded")
    choices: list[Choice] = []
    try:
        for prompt in prompts:
            with naming(body):
                choices += await start_choices(
                    entry, prompt.ids, fields, body.stop_token_ids or [], len(choices)
                )
            log_prompt(state.settings, entry, prompt.ids)
    except BaseException:  # all of them run, or none
        for choice in choices:
            choice.release()
        raise
    return CompletionCall(body, entry, state.fingerprint(entry), prompts, choices, ignored)


def _encode(body: CompletionBody, entry: Entry) -> list[_Prompt]:
    """The prompts with their ids. Runs on a thread."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]  # type: ignore[assignment, list-item]
    if not given or len(given) > MAX_PROMPTS:
        message = f"prompt has {len(given)} entries; it must have 1 to {MAX_PROMPTS}"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    return [_to_prompt(body, entry, index, each) for index, each in enumerate(given)]


def _to_prompt(body: CompletionBody, entry: Entry, index: int, given: Any) -> _Prompt:
    model = entry.model
    if isinstance(given, list):
        if not given:
            raise ApiError(400, f"prompt[{index}] is empty", param="prompt", code="invalid_value")
        return _Prompt(None, given)
    text = given
    if body.suffix is not None or _FILL in given:
        text = _infilling(body, entry, given)
    check_chars(model, text, "prompt")
    ids = model.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    if not ids:
        message = f"prompt[{index}] has no tokens; it must have one at least"
        raise ApiError(400, message, param="prompt", code="invalid_value")
    return _Prompt(given, ids)


def _infilling(body: CompletionBody, entry: Entry, given: str) -> str:
    """The text with which a model is asked for what stands between two texts."""
    template = entry.model.template
    if template.capability != "infilling":
        if not body.suffix:
            return given
        message = "suffix is given; the model's chat template cannot fill in (--cap infilling)"
        raise ApiError(400, message, param="suffix", code="unsupported_feature")
    return template.get_prompt(given if _FILL in given else f"{given}{_FILL}{body.suffix}")


async def whole_completion(call: CompletionCall) -> dict[str, Any]:
    """The answer that is not streamed, once all outputs have ended."""
    try:
        await finish(call.choices)
    finally:
        call.release()
    for choice in call.choices:
        if choice.error is not None:
            raise choice.error
    parts = [call.part(choice) for choice in call.choices]
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

    def start(self, writer: Writer) -> None:
        """Writes what comes as it comes."""
        self._writer = writer
        writer.on_free = self._write
        for choice in self._call.choices:
            choice.watch(self._write, writer.fail)

    def abort(self) -> None:
        """The client went away."""
        self._call.release()

    def _write(self) -> None:
        writer = self._writer
        if writer is None or not writer.is_free:
            return
        data = []
        for choice in self._call.choices:
            # The log-probabilities of an echoed prompt come with the first output.
            if choice.index in self._has_ended or not choice.has_news:
                continue
            part = self._call.part(choice)
            is_end = choice.is_finished
            if is_end:
                self._has_ended.add(choice.index)
            if is_end or part["text"] or part["logprobs"] or part.get("token_ids"):
                data.append(self._chunk([part]))
            if is_end and choice.error is not None:
                data.append(frame(choice.error.to_openai()))
        is_last = len(self._has_ended) == len(self._call.choices)
        if is_last:
            if self._has_usage:
                data.append(frame({**self._call.head, "choices": [], "usage": self._call.usage()}))
            data.append(DONE)
        if data:
            writer.write(b"".join(data), more=not is_last)

    def _chunk(self, parts: list[dict[str, Any]]) -> bytes:
        chunk = {**self._call.head, "choices": parts}
        if self._has_each_usage:
            chunk["usage"] = self._call.usage()
        elif self._has_usage:
            chunk["usage"] = None
        return frame(chunk)
