"""What builtin templates do differently from BaseChatTemplate, beside their markers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import BaseChatTemplate, json_text


@dataclass(frozen=True)
class PathRule:
    """Holds for a path that has all words of `every`, one of `some` and none of `without`."""

    every: tuple[str, ...] = ()
    some: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def holds(self, model_path: str) -> bool:
        path = "/" + model_path.lower()
        return (
            all(word in path for word in self.every)
            and (not self.some or any(word in path for word in self.some))
            and not any(word in path for word in self.without)
        )


class BuiltinTemplate(BaseChatTemplate):
    """A row of the table; the keywords are the fields of BaseChatTemplate."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    rules: ClassVar[tuple[PathRule, ...]] = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{**self.defaults, **fields})

    @classmethod
    def match(cls, model_path: str) -> str | None:
        return cls.name if any(rule.holds(model_path) for rule in cls.rules) else None


class UnspacedTemplate(BuiltinTemplate):
    """The model writes the space after the assistant's marker itself."""

    @property
    def opening(self) -> str:
        return self.assistant.removesuffix(" ")


class Llama3Template(BuiltinTemplate):
    begin = "<|begin_of_text|>"


class CodeLlamaTemplate(BuiltinTemplate):
    """Llama 2, and completion of code: `<FILL>` in an infilling prompt is what is generated.
    `suffix_first` is the other order that the model knows."""

    def __init__(self, suffix_first: bool = False, **fields: Any) -> None:
        super().__init__(**fields)
        self.suffix_first = suffix_first
        if self.capability == "infilling" and self.stop_words is None:
            self.stop_words = ["<EOT>"]

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        if self.capability != "infilling" or not isinstance(prompt, str):
            return super().get_prompt(prompt, sequence_start)
        prefix, *suffixes = prompt.split("<FILL>")
        if len(suffixes) != 1:
            raise ValueError(
                f"prompt has <FILL> {len(suffixes)} times; for infilling it must have it once"
            )
        if self.suffix_first:
            return f"<PRE> <SUF>{suffixes[0]} <MID> {prefix}"
        return f"<PRE> {prefix} <SUF>{suffixes[0]} <MID>"


class InternLM2Template(BuiltinTemplate):
    """Has a role `environment`, for results of tools; messages may be named after a tool."""

    has_calls = True

    def __init__(
        self,
        environment: str = "<|im_start|>environment\n",
        eoenv: str = "<|im_end|>\n",
        plugin: str = "<|plugin|>",
        interpreter: str = "<|interpreter|>",
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        self.environment = environment
        self.eoenv = eoenv
        self.plugin = plugin
        self.interpreter = interpreter

    @property
    def takes_tools(self) -> bool:
        return True

    def _roles(self) -> tuple[str, ...]:
        return (*super()._roles(), "environment")

    def _markers(self, message: Mapping[str, Any]) -> tuple[str, str]:
        if message["role"] in ("tool", "environment"):
            markers = self.environment, self.eoenv
        else:
            markers = super()._markers(message)
        tool = {"plugin": self.plugin, "interpreter": self.interpreter}.get(message.get("name", ""))
        return markers if tool is None else (self._named(markers[0], tool), markers[1])

    def _named(self, begin: str, tool: str) -> str:
        return f"{begin.strip()} name={tool}\n"

    def _tools_block(self, tools: Sequence[Any]) -> str:
        return f"{self._named(self.system, self.plugin)}{json_text(tools)}{self.eosys}"

    def _calls_text(self, message: Mapping[str, Any]) -> str:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [{"name": each["name"], "parameters": each["arguments"]} for each in functions]
        begin = f"<|action_start|>{self.plugin}\n"
        return "".join(f"{begin}{json_text(call)}<|action_end|>" for call in calls)


class ChatGLMTemplate(BuiltinTemplate):
    """Numbers the questions. get_prompt counts those since the last start of a sequence, so of
    several conversations at once each needs a template of its own, or messages."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._lock = threading.Lock()
        self._num_prompts = 0

    def _question_number(self, sequence_start: bool) -> int:
        with self._lock:
            self._num_prompts = 1 if sequence_start else self._num_prompts + 1
            return self._num_prompts

    def _message(
        self, message: Mapping[str, Any], num_questions: int, is_open: bool = False
    ) -> str:
        text = super()._message(message, num_questions, is_open)
        return f"[Round {num_questions}]\n\n{text}" if message["role"] == "user" else text
