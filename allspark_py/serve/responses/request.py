"""From a request of the Responses protocol to one of chat, which serves both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.message import partial_object
from allspark.serve.places import renamed, shown, to_content, wrong
from allspark.serve.protocol.common import FORMAT_FIELDS, ChatBody, GenerationBody
from allspark.serve.protocol.responses import LOGPROBS, ResponsesBody, TextFormat
from allspark.serve.responses.items import Item, check_number
from allspark.serve.responses.record import Record

# Fields that ask for what is not served.
NOT_SERVED = (
    "conversation", "prompt", "context_management", "moderation", "access_programs",
    "return_token_ids",
)  # fmt: skip
# Fields that are this route's own, or have no place in chat.
_OWN = {"metadata", "stream_options", "n", "store", "user", "service_tier"}
# Names of chat's fields that the route's clients do not know.
_NAMES = {
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "function.parameters": "parameters",  # of a tool
}


@dataclass(frozen=True)
class ResponsesRequest:
    """A request as chat takes it.

    Attributes:
        places: of its messages, as clients know them.
    """

    body: ChatBody
    places: list[str]

    def cuts(self) -> list[int]:
        """Indexes at which the conversation may be cut: a user's message, with every earlier tool
        call answered."""
        found, waiting = [], set[str]()
        for index, message in enumerate(self.body.messages):
            assert isinstance(message, dict)
            if message["role"] == "user" and not waiting and index > self._num_fixed:
                found.append(index)
            waiting.update(call["id"] for call in message.get("tool_calls", ()))
            waiting.discard(message.get("tool_call_id", ""))
        return found

    def without(self, cut: int) -> ResponsesRequest:
        """The same request without the messages before a cut; instructions and the like stay."""
        fixed, messages = self._num_fixed, list(self.body.messages)
        body = self.body.model_copy(update={"messages": messages[:fixed] + messages[cut:]})
        return ResponsesRequest(body, self.places[:fixed] + self.places[cut:])

    @property
    def _num_fixed(self) -> int:
        """The number of leading system and developer messages."""
        count = 0
        for message in self.body.messages:
            assert isinstance(message, dict)
            if message["role"] not in ("system", "developer"):
                break
            count += 1
        return count

    def renamed(self, error: ApiError) -> ApiError:
        """An error of chat, with the names of this route."""
        # Of a field that is not given, it is about what the tools are held to.
        given = [name for name in _NAMES if getattr(self.body, name, True) is not None]
        names = {name: _NAMES[name] for name in given}
        error = renamed(error, self.places, "input", names)
        error.message = error.message.replace("input have ", "input has ", 1)
        return error


def check(body: ResponsesBody) -> None:
    """Raises ApiError where fields do not go together."""
    if body.input is None:
        raise wrong("input", "is missing")
    if (body.n or 1) > 1:
        raise wrong("n", f"is {body.n}; it must be 1")
    if body.background and body.store is False:
        raise wrong("background", "is true; it needs store to be true")
    if (body.prompt_cache_options or {}).get("prewarm"):
        raise wrong("prompt_cache_options.prewarm", "is not served")
    other = next((name for name in FORMAT_FIELDS if getattr(body, name) is not None), None)
    if other is not None and _format(body) is not None:
        raise wrong("text.format", f"and {other} are both given; there is one format")


def to_chat(
    body: ResponsesBody, context: Sequence[Record], items: Sequence[Item]
) -> ResponsesRequest:
    """The same request, as chat takes it.

    Args:
        context: the responses before it.
        items: those of its input.

    Raises:
        ApiError: what chat would not refuse by the name that it has here.
    """
    builder = _Messages()
    if body.instructions:
        builder.add_text("system", [body.instructions], "instructions")
    before = [(item, f"the response {each.id!r}") for each in context for item in _items(each)]
    check_number(len(before) + len(items))
    for item, place in before:
        builder.add(item, place)
    for index, item in enumerate(items):
        builder.add(item, f"input[{index}]")
    builder.end()
    fields: dict[str, Any] = {
        name: getattr(body, name) for name in GenerationBody.model_fields if name not in _OWN
    }
    fields.update(
        messages=builder.messages,
        max_tokens=body.max_output_tokens,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        enable_thinking=body.enable_thinking,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if LOGPROBS in (body.include or ()):
        fields.update(logprobs=True, top_logprobs=body.top_logprobs)
    text_format = _format(body)
    if text_format is not None:
        fields["response_format"] = _response_format(text_format)
    return ResponsesRequest(ChatBody.model_validate(fields), builder.places)


def _items(record: Record) -> Iterable[Item]:
    """What a response adds to its conversation. A call that was cut off is none."""
    yield from record.input
    for item in record.items:
        if item.kind != "function_call" or item.is_whole:
            yield item.shown()


class _Messages:
    """Messages of chat from items. The assistant's items that follow each other are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._names: dict[str, str] = {}  # of the functions, by the calls' ids
        self._open: dict[str, str] = {}  # places of calls without an output

    def add(self, item: Item, place: str) -> None:
        """Adds an item in the form that it is kept in."""
        kind = item["type"]
        if kind == "function_call_output":
            self._add_output(item, place)
        elif kind == "message" and item["role"] != "assistant":
            self.add_text(item["role"], [part["text"] for part in item["content"]], place)
        else:
            self._add_of_assistant(item, place)

    def add_text(self, role: str, texts: Sequence[str], place: str, **fields: str) -> None:
        """Adds a message. Of several texts the chat template joins the parts."""
        content = to_content(texts)
        self.messages.append({"role": role, **fields, "content": content})
        self.places.append(place)

    def end(self) -> None:
        """Raises ApiError where a call has no output."""
        for call_id, place in self._open.items():
            message = f"{place} has the function_call {shown(call_id)}, whose output is missing"
            raise invalid_value(message, "input")

    def _add_output(self, item: Item, place: str) -> None:
        call_id, output = item["call_id"], item["output"]
        if call_id not in self._names:
            raise wrong(f"{place}.call_id", f"is {shown(call_id)}; no 'function_call' has it")
        self._open.pop(call_id, None)
        texts = [output] if isinstance(output, str) else [part["text"] for part in output]
        name = self._names[call_id]
        self.add_text("tool", texts, place, tool_call_id=call_id, name=name)

    def _add_of_assistant(self, item: Item, place: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self.places.append(place)
        message = self.messages[-1]
        if item["type"] == "message":
            texts = [part.get("text", part.get("refusal")) for part in item["content"]]
            old = message["content"]
            before = [part["text"] for part in old] if isinstance(old, list) else [old]
            message["content"] = to_content([text for text in (*before, *texts) if text])
        elif item["type"] == "reasoning":
            parts = item.get("content") or item["summary"]
            thoughts = [message.get("reasoning_content"), *(part["text"] for part in parts)]
            text = "\n".join(thought for thought in thoughts if thought)
            if text:
                message["reasoning_content"] = text
        else:
            call_id, name = item["call_id"], item["name"]
            function = {"name": name, "arguments": partial_object(item["arguments"])}
            call = {"id": call_id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
            self._names[call_id] = name
            self._open[call_id] = place


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise wrong(f"{place}.type", f"is {shown(kind)}; only 'function' is served")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _format(body: ResponsesBody) -> TextFormat | None:
    found = body.text.format if body.text is not None else None
    return None if found is None or found.type == "text" else found


def _response_format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type == "json_object":
        return {"type": "json_object"}
    for name, value in (("name", text_format.name), ("schema", text_format.schema_)):
        if value is None:
            raise wrong(f"text.format.{name}", "is missing; the type 'json_schema' needs it")
    schema: dict[str, Any] = {"name": text_format.name, "schema": text_format.schema_}
    if text_format.strict is not None:
        schema["strict"] = text_format.strict
    return {"type": "json_schema", "json_schema": schema}
