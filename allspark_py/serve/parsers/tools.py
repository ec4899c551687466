"""A request's tools and its tool_choice, as OpenAI's chat completions have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from allspark.error_text import shown

# Of names. They stand in markup, so they must contain none.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The parameters of a function that has none.
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON Schema of the arguments, which are an object.
        strict: the arguments must be valid for it: what cannot be enforced is an error.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model must call tools, and which it may call (None: all)."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None

    def of(self, tools: Iterable[Tool]) -> list[Tool]:
        """The tools that may be called."""
        if self.mode == "none":
            return []
        return [tool for tool in tools if self.names is None or tool.name in self.names]


def read_tools(tools: Any) -> tuple[Tool, ...]:
    """The tools of a request: `[{"type": "function", "function": {"name": ...}}, ...]` or None.

    Raises:
        ValueError: what is none, or a name that another one has; it says where.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise ValueError(f"tools is a {type(tools).__name__}; it must be a list")
    read = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = set()
    for tool in read:
        if tool.name in names:
            raise ValueError(f"two tools have the name {tool.name!r}")
        names.add(tool.name)
    return read


def _tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise ValueError(f"{place} is no function: it must have the type 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{place} must have a 'function' with a 'name' and 'parameters'")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{place} has the name {shown(name)}; it must be 1 to 64 letters (a-z, A-Z), digits, "
            "underscores, hyphens and full stops"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{place}: 'parameters' of {name!r} must be a JSON Schema, an object")
    kinds = parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError(f"{place}: 'parameters' of {name!r} must have the type 'object'")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{place}: 'strict' of {name!r} must be true or false")
    return Tool(name, {**parameters, "type": "object"}, bool(strict))


def read_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The tool_choice of a request: "none", "auto", "required", a function, or allowed_tools. None:
    "auto" if there are tools.

    Raises:
        ValueError: what is none of them, or names a tool that there is not.
    """
    if choice is None:
        choice = "auto"
    if choice == "auto" and not tools:
        choice = "none"
    if choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise ValueError("tool_choice is 'required', but there are no tools")
        return ToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return ToolChoice("required", (_named(choice, tools),))
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
        entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
            raise ValueError(
                "tool_choice 'allowed_tools' must have the mode 'auto' or 'required', and 'tools'"
            )
        return ToolChoice(mode, tuple(dict.fromkeys(_named(entry, tools) for entry in entries)))
    raise ValueError(
        f"tool_choice is {shown(choice)}; it must be 'none', 'auto', 'required', "
        "{'type': 'function', ...} or {'type': 'allowed_tools', ...}"
    )


def _named(entry: Any, tools: Sequence[Tool]) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, or with the name at its top."""
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not any(tool.name == name for tool in tools):
        known = ", ".join(repr(tool.name) for tool in tools) or "none"
        raise ValueError(f"tool_choice names the tool {shown(name)}; the tools are {known}")
    return str(name)
