"""From a request of Anthropic's protocol to one of chat, which serves both.

Every error names its place in the request as it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allspark.serve.errors import ApiError
from allspark.serve.fields import check_stops
from allspark.serve.places import renamed, shown, to_content, wrong
from allspark.serve.protocol.anthropic import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CountTokensBody,
    MessagesBody,
    OutputFormat,
)
from allspark.serve.protocol.common import ChatBody
from allspark.serve.settings import ServerSettings

# Fields that ask for what is not served.
NOT_SERVED = ("mcp_servers", "container")
# Some clients put a block before the system text that is another one in each request. With it no
# two prompts would have a prefix in common.
_CHANGING_BLOCK = "x-anthropic-billing-header"
_ROLE_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}

# A block with its place, as "messages[0].content[1]".
_Placed = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class MessagesRequest:
    """A request as chat takes it.

    Attributes:
        places: of its messages, as clients know them.
        schema_name: what they call the schema of the output.
    """

    body: ChatBody
    places: list[str]
    schema_name: str

    def renamed(self, error: ApiError) -> ApiError:
        """An error of chat, with the names of this route."""
        names = {"json_schema": self.schema_name, "function.parameters": "input_schema"}
        return renamed(error, self.places, "messages", names)


def to_chat(body: CountTokensBody, settings: ServerSettings) -> MessagesRequest:
    """The same request, as chat takes it.

    Raises:
        ApiError: what chat would not refuse by the name that it has here.
    """
    system = _system(body.system)
    others, places = _messages(body.messages)
    messages = [*system, *others]
    is_continued = messages[-1]["role"] == "assistant"
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": is_continued,
        "add_generation_prompt": not is_continued,
    }
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice, bool(body.tools))
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        fields["enable_thinking"] = body.thinking.type in ("enabled", "adaptive")
    if (output := _format(body)) is not None:
        fields["json_schema"] = output.schema_
    if isinstance(body, MessagesBody):
        check_stops("stop_sequences", body.stop_sequences or [], settings)
        fields.update(
            max_tokens=body.max_tokens or None,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences,
        )
    schema_name = "output_format.schema" if body.output_format else "output_config.format.schema"
    return MessagesRequest(ChatBody(**fields), ["system"] * len(system) + places, schema_name)


def _format(body: CountTokensBody) -> OutputFormat | None:
    own = body.output_config.format if body.output_config is not None else None
    if own is not None and body.output_format is not None:
        raise wrong("output_format", "and output_config.format are both given; there is one format")
    return own or body.output_format


def _field(block: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
    """A field that a block must have."""
    if name not in block:
        raise wrong(f"{place}.{name}", "is missing")
    value = block[name]
    if not isinstance(value, kind):
        expected = "a string" if kind is str else "an object"
        raise wrong(f"{place}.{name}", f"must be {expected}; it is {shown(value)}")
    return value


def _kind(block: Any, known: Sequence[str], place: str) -> str:
    if not isinstance(block, Mapping):
        raise wrong(place, f"must be an object; it is {shown(block)}")
    kind = _field(block, "type", str, place)
    if kind not in known:
        names = " or ".join(repr(name) for name in known)
        raise wrong(f"{place}.type", f"is {shown(kind)}; it must be {names}")
    return str(kind)


def _texts(blocks: Sequence[Any], place: str) -> list[str]:
    texts = []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        _kind(block, ("text",), at)
        texts.append(_field(block, "text", str, at))
    return texts


def _system(system: str | list[Any] | None) -> list[dict[str, Any]]:
    texts = [system] if isinstance(system, str) else _texts(system or (), "system")
    if not isinstance(system, str):
        texts = [text for text in texts if not text.startswith(_CHANGING_BLOCK)]
    content = to_content([text for text in texts if text])
    return [{"role": "system", "content": content}] if content else []


def _messages(messages: Sequence[AnthropicMessage]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of chat, and where each of them begins."""
    if not messages:
        raise wrong("messages", "is empty; it must have a message at least")
    tool_names: dict[str, str] = {}  # by the calls' ids
    found: list[dict[str, Any]] = []
    places: list[str] = []
    for turn, role, blocks in _turns(messages):
        if role == "user":
            found += _user(blocks, tool_names)
        elif role == "assistant":
            found.append(_assistant(blocks, tool_names))
        else:
            texts = [_field(block, "text", str, place) for place, block in blocks]
            found.append({"role": "system", "content": to_content(texts)})
        places += [turn] * (len(found) - len(places))
    last = found[-1]
    if last["role"] == "assistant" and not (last["content"] or "tool_calls" in last):
        found.pop()  # nothing to go on from
        if not found:
            raise wrong("messages", "has no block; it must have one at least")
    if last.get("tool_calls"):
        raise wrong(
            f"messages[{len(messages) - 1}]", "has a 'tool_use' whose 'tool_result' is missing"
        )
    return found, places


def _turns(messages: Sequence[AnthropicMessage]) -> list[tuple[str, str, list[_Placed]]]:
    """Each turn's place, role and blocks. Messages of one role that follow each other are one."""
    turns: list[tuple[str, str, list[_Placed]]] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}].content"
        blocks: list[_Placed]
        if isinstance(message.content, str):
            blocks = [(place, {"type": "text", "text": message.content})]
        else:
            blocks = [(f"{place}[{i}]", block) for i, block in enumerate(message.content)]
            if not blocks and message.role != "assistant":
                raise wrong(place, "is empty; it must have a block at least")
        for at, block in blocks:
            _kind(block, _ROLE_BLOCKS[message.role], at)
        if turns and turns[-1][1] == message.role:
            turns[-1][2].extend(blocks)
        else:
            turns.append((f"messages[{index}]", message.role, blocks))
    return turns


def _user(blocks: list[_Placed], tool_names: Mapping[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    texts: list[str] = []

    def end_texts() -> None:
        if texts:
            found.append({"role": "user", "content": to_content(texts)})
            texts.clear()

    for place, block in blocks:
        if block["type"] == "text":
            texts.append(_field(block, "text", str, place))
            continue
        end_texts()
        call_id = _field(block, "tool_use_id", str, place)
        if call_id not in tool_names:
            raise wrong(f"{place}.tool_use_id", f"is {shown(call_id)}; no 'tool_use' has it")
        content = block.get("content")
        if isinstance(content, list):
            content = to_content(_texts(content, f"{place}.content"))
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            problem = f"must be a string or a list of blocks; it is {shown(content)}"
            raise wrong(f"{place}.content", problem)
        name = tool_names[call_id]
        found.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": content})
    end_texts()
    return found


def _assistant(blocks: list[_Placed], tool_names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(_field(block, "text", str, place))
        elif kind == "thinking":
            thoughts.append(_field(block, "thinking", str, place))
        elif kind == "tool_use":
            call_id, name = _field(block, "id", str, place), _field(block, "name", str, place)
            function = {"name": name, "arguments": _field(block, "input", dict, place)}
            calls.append({"id": call_id, "type": "function", "function": function})
            tool_names[call_id] = name
    message: dict[str, Any] = {"role": "assistant", "content": to_content(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: AnthropicTool, place: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise wrong(f"{place}.type", f"is {shown(tool.type)}; only 'custom' is served")
    if tool.input_schema is None:
        raise wrong(f"{place}.input_schema", "is missing")
    kind = tool.input_schema.get("type", "object")
    if kind != "object":
        raise wrong(f"{place}.input_schema.type", f"is {shown(kind)}; it must be 'object'")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice, has_tools: bool) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise wrong("tool_choice.name", "is missing; the type 'tool' needs it")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type == "any" and not has_tools:
        raise wrong("tool_choice.type", "is 'any', but there are no tools")
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
