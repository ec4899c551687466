"""Checks the messages of a conversation, and brings them into the form that a template takes.

Every error names its place, as in "messages[2].tool_calls[0].function.arguments".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from allspark.error_text import shown, wrong_type


@dataclass(frozen=True)
class MessageForm:
    """What a template takes; the default is what most take."""

    content_parts: bool = False  # a content of parts stays a list
    text_arguments: bool = False  # arguments of tool calls are JSON text, not an object
    developer: bool = False  # there is a role of this name
    none_content: bool = False  # a message with calls and no text has the content None, not ""


# What clients call the reasoning of an answer; templates read the first.
_REASONING = ("reasoning_content", "reasoning")


def normalise(messages: Any, form: MessageForm) -> list[dict[str, Any]]:
    """New messages; those of the caller stay as they are.

    Raises:
        ValueError, TypeError: what is wrong, and where.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise wrong_type("messages", messages, "a list of messages")
    if not messages:
        raise ValueError("messages is empty; it must hold at least one message")
    return [_message(item, f"messages[{i}]", form) for i, item in enumerate(messages)]


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a normalised message, whatever form its content has."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def check_tools(tools: Any) -> list[Any] | None:
    """The tools as a list; None if there are none.

    Raises:
        TypeError: it is no list of dicts.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise wrong_type("tools", tools, "a list of tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) and not callable(tool):
            raise wrong_type(f"tools[{index}]", tool, "a dict")
    return list(tools) or None


def _message(item: Any, place: str, form: MessageForm) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise wrong_type(place, item, "a dict with role and content")
    message = dict(item)
    role = message.get("role")
    if not isinstance(role, str):
        raise wrong_type(f"{place}.role", role, "a str")
    if not role:
        raise ValueError(f"{place}.role is ''; it must not be empty")
    if role == "developer" and not form.developer:
        message["role"] = "system"
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls", form)
    else:
        message.pop("tool_calls", None)  # Templates ask whether it is there.
    if role == "assistant":
        _set_reasoning(message, place)
        _set_content(message, place)
    if message.get("content") is None and not (role == "assistant" and "tool_calls" in message):
        raise ValueError(
            f"{place}.content is None; only an assistant's message with tool_calls, reasoning or a "
            "refusal has no content"
        )
    message["content"] = _content(message.get("content"), f"{place}.content", form, role)
    if form.none_content and "tool_calls" in message and not message["content"]:
        message["content"] = None
    return message


def _set_content(message: dict[str, Any], place: str) -> None:
    """Gives an answer the content that servers leave out of a refusal, and of mere reasoning."""
    refusal = message.get("refusal")
    if not isinstance(refusal, (str, NoneType)):
        raise wrong_type(f"{place}.refusal", refusal, "a str or None")
    if message.get("content") is not None:
        return
    if refusal is not None:
        message["content"] = refusal
    elif message.get(_REASONING[0]) and "tool_calls" not in message:
        message["content"] = ""


def _set_reasoning(message: dict[str, Any], place: str) -> None:
    """Gives the reasoning of an answer, whatever its name, the name that templates read."""
    for name in _REASONING:
        if not isinstance(message.get(name), (str, NoneType)):
            raise wrong_type(f"{place}.{name}", message[name], "a str or None")
    text = next((message[name] for name in _REASONING if message.get(name)), None)
    if text is not None:
        message[_REASONING[0]] = text


def _content(content: Any, place: str, form: MessageForm, role: str) -> str | list[Any] | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise wrong_type(place, content, "a str, None or a list of parts")
    parts = [_part(part, f"{place}[{i}]", role) for i, part in enumerate(content)]
    return parts if form.content_parts else "\n".join(part["text"] for part in parts)


def _part(part: Any, place: str, role: str) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise wrong_type(place, part, "a dict with type and text")
    kind = part.get("type")
    if kind == "refusal" and role == "assistant":
        if not isinstance(part.get("refusal"), str):
            raise wrong_type(f"{place}.refusal", part.get("refusal"), "a str")
        return {"type": "text", "text": part["refusal"]}
    if kind != "text":
        raise ValueError(
            f"{place}.type is {shown(kind)}; it must be 'text', since only text is read"
        )
    if not isinstance(part.get("text"), str):
        raise wrong_type(f"{place}.text", part.get("text"), "a str")
    return dict(part)


def _tool_calls(calls: Any, place: str, form: MessageForm) -> list[dict[str, Any]]:
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise wrong_type(place, calls, "a list of tool calls")
    return [_tool_call(call, f"{place}[{i}]", form) for i, call in enumerate(calls)]


def _tool_call(call: Any, place: str, form: MessageForm) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise wrong_type(place, call, "a dict with function")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise wrong_type(f"{place}.function", function, "a dict with name and arguments")
    if not isinstance(function.get("name"), str):
        raise wrong_type(f"{place}.function.name", function.get("name"), "a str")
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
    if form.text_arguments:
        given = function.get("arguments")
        is_text = isinstance(given, str) and given.strip()
        new = given if is_text else json.dumps(arguments, ensure_ascii=False)
    else:
        new = arguments
    return {**call, "function": {**function, "arguments": new}}


def _arguments(arguments: Any, place: str) -> Mapping[str, Any]:
    """The object; no text and an empty one are an empty object."""
    if arguments is None or isinstance(arguments, Mapping):
        return {} if arguments is None else arguments
    if not isinstance(arguments, str):
        raise wrong_type(place, arguments, "a JSON object, or its text")
    if not arguments.strip():
        return {}
    problem = ""
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        problem = f": {error}"
    else:
        if isinstance(value, dict):
            return value
    raise ValueError(f"{place} is {shown(arguments)}; it must be a JSON object{problem}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
