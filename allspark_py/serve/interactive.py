"""/v1/chat/interactive: turns of conversations that the server keeps, as LMDeploy's clients know
them."""

from __future__ import annotations

from typing import Any

import orjson
from allspark.pipeline.generation import count_without_end, end_ids
from allspark.serve.catalog import Entry
from allspark.serve.choice import Choice, finish, start_choices
from allspark.serve.errors import ApiError, invalid_value, model_not_found
from allspark.serve.fields import naming, own_of, to_fields
from allspark.serve.places import shown, wrong
from allspark.serve.prompt_log import log_prompt
from allspark.serve.protocol.interactive import InteractiveBody
from allspark.serve.sessions import Session, Sessions
from allspark.serve.sse import Writer
from allspark.serve.state import ServerState
from allspark.serve.text_work import on_thread

# Fields that ask for what is not served.
NOT_SERVED = ("image_url",)
# Where neither the request nor the model says anything; as LMDeploy has it on this route.
SAMPLING = {"temperature": 0.8, "top_p": 0.8, "top_k": 40}
LINES = {"content-type": "application/x-ndjson"}
# On a quiet stream; clients skip empty lines.
EMPTY_LINE = b"\n"


class Turn:
    """A turn of a session with its output started. `end` or `forget` ends it; a further call of
    either has no effect."""

    def __init__(self, sessions: Sessions, session: Session, is_kept: bool):
        self._sessions = sessions
        self._is_kept = is_kept
        self._has_ended = False
        self.session = session
        self.asked: list[dict[str, Any]] = []
        self.text = ""  # of the prompt
        self.ids: list[int] = []
        self.num_bytes = 0  # of all messages, as JSON
        self.num_kept = 0  # ids of the prompt that earlier turns had
        self.ends: frozenset[int] = frozenset()
        self.includes_end = False
        self.choice: Choice | None = None  # None: there is no room for an output

    def prepare(self, entry: Entry, asked: list[dict[str, Any]]) -> None:
        """Makes the prompt. Runs on a thread."""
        model, conversation = entry.model, self.session.conversation
        try:
            self.text, self.ids = conversation.ask(model.template, model.tokenizer, *asked)
        except (TypeError, ValueError) as error:
            raise invalid_value(str(error), "prompt") from None
        self.asked = asked
        self.num_kept = conversation.num_kept(self.ids)
        self.num_bytes = len(orjson.dumps([*conversation.messages, *asked]))

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, without the one that ended it."""
        return len(self._answer_ids())

    def _answer_ids(self) -> list[int]:
        ids = self.choice.token_ids if self.choice is not None else []
        return ids[: count_without_end(ids, self.ends, self.includes_end)]

    def end(self, answer: str) -> None:
        """The output has ended; the session remembers it."""
        if self._has_ended:
            return
        conversation = self.session.conversation
        *earlier, last = self.asked
        conversation.messages += earlier
        conversation.answered(last, self.text, self.ids, answer, self._answer_ids())
        num_bytes = self.num_bytes + len(answer.encode()) + conversation.num_bytes
        self._leave(num_bytes, self._is_kept)

    def forget(self) -> None:
        """The turn failed, or nobody waits for it: the session is as before it."""
        if not self._has_ended:
            self._leave(self.session.num_bytes, bool(self.session.conversation.messages))

    def _leave(self, num_bytes: int, is_kept: bool) -> None:
        self._has_ended = True
        if self.choice is not None:
            self.choice.release()
        self._sessions.end_turn(self.session, num_bytes, is_kept)

    def item(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """The answer, or a line of the streamed one: counts so far, and new text."""
        return {
            **_item(text, self.num_tokens, len(self.ids) - self.num_kept, self.num_kept),
            "finish_reason": finish_reason,
            "session_id": self.session.id,
            "cached_tokens": 0 if self.choice is None else self.choice.cached_tokens,
        }


def _item(text: str, tokens: int, input_tokens: int, history_tokens: int) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": tokens,
        "input_tokens": input_tokens,
        "history_tokens": history_tokens,
    }


async def start_turn(
    state: ServerState, body: InteractiveBody, owner: bytes
) -> Turn | dict[str, Any]:
    """Checks a request and starts its output; the answer itself where nothing is generated.

    Args:
        owner: what tells this client's sessions from others'.

    Raises:
        ApiError: the request is refused.
    """
    entry = _entry(state, body)
    sessions, session_id = state.sessions, -1 if body.session_id is None else body.session_id
    if (body.n or 1) > 1:
        raise wrong("n", f"is {body.n}; it must be 1")
    if body.cancel:
        return _cancel(sessions, owner, session_id)
    if not body.prompt:
        return _end_session(sessions, owner, session_id, body, entry)
    if body.request_output_len == 0:
        raise wrong("request_output_len", "is 0; it must be at least 1")
    fields = to_fields(body, entry, state.settings, body.request_output_len, SAMPLING)
    is_kept = bool(body.interactive_mode)
    given = None if session_id == -1 else session_id
    turn = Turn(sessions, sessions.begin_turn(owner, given, entry.model.name, is_kept), is_kept)
    try:
        asked = body.prompt
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        texts = (turn.session.conversation.messages, asked)
        await on_thread(texts, turn.prepare, entry, asked)
        turn.ends = end_ids(fields)
        turn.includes_end = bool(body.include_stop_str_in_output)
        if len(turn.ids) < entry.model.session_len:
            with naming(body):
                (turn.choice,) = await start_choices(entry, turn.ids, fields, own_of(body))
            turn.session.runs(turn.choice)
            log_prompt(state.settings, entry, turn.ids)
    except BaseException:
        turn.forget()
        raise
    return turn


def _entry(state: ServerState, body: InteractiveBody) -> Entry:
    """The model or the adapter that answers."""
    entry = state.catalog.get(body.model)
    if body.adapter_name is None:
        return entry
    names = entry.model.adapters
    if body.adapter_name not in names:
        error = model_not_found(body.adapter_name, names)
        message = f"adapter_name is {shown(body.adapter_name)}; the adapters are {', '.join(names)}"
        raise ApiError(error.status, message, param="adapter_name", code=error.code)
    return state.catalog.get(body.adapter_name)


def _nothing(session_id: int, history_tokens: int = 0) -> dict[str, Any]:
    """The answer where nothing was to be generated."""
    item = _item("", 0, 0, history_tokens)
    return {**item, "finish_reason": "stop", "session_id": session_id, "cached_tokens": 0}


def _cancel(sessions: Sessions, owner: bytes, session_id: int) -> dict[str, Any]:
    if session_id == -1:
        raise wrong("session_id", "is missing; cancel needs that of the turn")
    session = sessions.find(owner, session_id)
    if session is not None:
        session.cancel()
    return _nothing(session_id)


def _end_session(
    sessions: Sessions, owner: bytes, session_id: int, body: InteractiveBody, entry: Entry
) -> dict[str, Any]:
    if body.interactive_mode or session_id == -1:
        raise wrong("prompt", "is empty; it must have a character or a message at least")
    if sessions.find(owner, session_id) is None:  # no other one is to make room for it
        return _nothing(session_id)
    session = sessions.begin_turn(owner, session_id, entry.model.name, False)
    history_tokens = session.conversation.num_tokens
    sessions.end_turn(session, session.num_bytes, False)
    return _nothing(session_id, history_tokens)


async def whole_turn(turn: Turn) -> dict[str, Any]:
    """The answer that is not streamed, once the output has ended."""
    try:
        if turn.choice is None:
            return turn.item("", "length")
        await finish([turn.choice])
        if turn.choice.error is not None:
            raise turn.choice.error
        text = turn.choice.take_text()
        turn.end(text)
        return turn.item(text, turn.choice.finish_reason)
    finally:
        turn.forget()


class TurnStream:
    """The lines of a streamed answer, each a JSON object."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self._writer: Writer | None = None
        self._texts: list[str] = []
        self._has_ended = False

    def start(self, writer: Writer) -> None:
        """Writes what comes as it comes."""
        self._writer = writer
        writer.on_free = self._write
        if self._turn.choice is None:
            self._end(self._turn.item("", "length"))
        else:
            self._turn.choice.watch(self._write, writer.fail)

    def abort(self) -> None:
        """The client went away."""
        self._turn.forget()

    def _write(self) -> None:
        writer, turn = self._writer, self._turn
        if writer is None or not writer.is_free or self._has_ended or turn.choice is None:
            return
        is_end = turn.choice.is_finished
        text = turn.choice.take_text()
        self._texts.append(text)
        if not is_end:
            if text:
                writer.write(_line(turn.item(text, None)))
        elif turn.choice.error is not None:
            self._end(turn.choice.error.to_openai())
        else:
            turn.end("".join(self._texts))
            self._end(turn.item(text, turn.choice.finish_reason))

    def _end(self, last: dict[str, Any]) -> None:
        assert self._writer is not None
        self._has_ended = True
        self._turn.forget()
        self._writer.write(_line(last), more=False)


def _line(item: dict[str, Any]) -> bytes:
    return orjson.dumps(item) + b"\n"
