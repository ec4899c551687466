"""Outputs with tool calls in every syntax, as the models' chat templates write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]

# Values that look like what surrounds them.
AWKWARD = {
    "city": 'São Paulo "SP" \\ {[x]}',
    "note": "a\nb\t</tool_call> <|action_end|> [TOOL_CALLS]f[ARGS]{ <｜tool▁sep｜> ``` 你好 🙂",
    "count": -1.5e3,
    "flags": [True, False, None, {"deep": ["}", "]", '"', {"x": {}}]}],
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "note": {"type": "string"},
                    "count": {"type": "number"},
                    "flags": {"type": "array"},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    # A name that begins with another.
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer"}},
                "required": ["days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Sequence[Call], key: str) -> list[str]:
    return [f'{{"name": "{name}", "{key}": {dump(arguments)}}}' for name, arguments in calls]


def _qwen(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{c}\n</tool_call>" for c in _objects(calls, "arguments"))


def _llama_tag(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "; ".join(_objects(calls, "parameters"))


def _llama_bare(calls: Sequence[Call]) -> str:
    return "; ".join(_objects(calls, "parameters"))


def _intern(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|action_start|><|plugin|>\n{c}<|action_end|>" for c in _objects(calls, "parameters")
    )


def _mistral_list(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(_objects(calls, "arguments")) + "]"


def _mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dump(arguments)}" for name, arguments in calls)


def _deepseek_fenced(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dump(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_plain(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dump(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(newline: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        return "\n".join(
            f"<tool_call>{name}{newline}"
            + "".join(
                f"<arg_key>{key}</arg_key>{newline}<arg_value>{_text(value)}</arg_value>{newline}"
                for key, value in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in calls
        )

    return write


# (the parser's name, what writes calls in its syntax)
SYNTAXES: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "qwen": ("qwen", _qwen),
    "llama3-tag": ("llama3", _llama_tag),
    "llama3-bare": ("llama3", _llama_bare),
    "internlm": ("internlm", _intern),
    "mistral-list": ("mistral", _mistral_list),
    "mistral-named": ("mistral", _mistral_named),
    "deepseek-fenced": ("deepseek-v3", _deepseek_fenced),
    "deepseek-plain": ("deepseek-v3", _deepseek_plain),
    "qwen3coder": ("qwen3coder", _qwen3_coder),
    "glm45": ("glm47", _glm("\n")),
    "glm47": ("glm47", _glm("")),
}
