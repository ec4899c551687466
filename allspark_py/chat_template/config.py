"""ChatTemplateConfig: which template, and which of its fields are others; from and to JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allspark.error_text import shown, wrong_type

from .base import BaseChatTemplate, check_capability, check_stop_words
from .interface import ChatTemplate
from .registry import MODELS

_log = logging.getLogger("allspark.chat_template")


@dataclass
class ChatTemplateConfig:
    """A template by its name. Fields that are not None override those of the builtin template; if
    the name is new, they are the fields of a BaseChatTemplate.

    Raises:
        TypeError, ValueError: which field is wrong, its value, and what it must be.
    """

    model_name: str
    model_path: str | None = None  # for 'hf': where the tokenizer is
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    tool: str | None = None
    eotool: str | None = None
    separator: str | None = None
    capability: Literal["completion", "infilling", "chat", "python"] | None = None
    stop_words: list[str] | None = None

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        if not isinstance(self.model_name, str):
            raise wrong_type(_place("model_name"), self.model_name, "a str")
        if not self.model_name:
            raise ValueError(f"{_place('model_name')} is ''; it must not be empty")
        for name, value in vars(self).items():
            if name == "capability" and value is not None:
                check_capability(_place(name), value)
            elif name == "stop_words":
                self.stop_words = check_stop_words(_place(name), value)
            elif value is not None and not isinstance(value, str):
                raise wrong_type(_place(name), value, "a str or None")

    @property
    def chat_template(self) -> ChatTemplate:
        """A new template. Raises as the class does."""
        self._check()
        cls = MODELS.get(self.model_name)
        if cls is None:
            _log.warning(
                "%s is %r, which is no registered chat template; its fields are taken for one",
                _place("model_name"),
                self.model_name,
            )
            cls = BaseChatTemplate
        template = cls(**self.fields_for(cls))
        template.name = self.model_name
        return template

    def fields_for(self, cls: type[ChatTemplate]) -> dict[str, Any]:
        """The keywords for a class. Raises ValueError if it does not take one of them."""
        given = dataclasses.asdict(self)
        fields = {k: v for k, v in given.items() if v is not None and k != "model_name"}
        parameters = inspect.signature(cls).parameters
        if "model_path" not in parameters:
            fields.pop("model_path", None)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return fields
        for name in fields:
            if name not in parameters:
                raise ValueError(
                    f"{_place(name)} is {shown(fields[name])}; the template {self.model_name!r} "
                    f"takes {', '.join(parameters)}"
                )
        return fields

    def to_json(self, file_path: str | os.PathLike[str] | None = None) -> str:
        """The JSON text of all fields, which is also written to the file, if there is one."""
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=4)
        if file_path is not None:
            Path(file_path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, file_or_string: str | os.PathLike[str]) -> ChatTemplateConfig:
        """From a file or from JSON text. A new `model_name` is registered for a BaseChatTemplate;
        if there is none, one is made up.

        Raises:
            ValueError, TypeError: the file, the JSON text or a field is wrong.
        """
        text, place = _read(file_or_string)
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place} is no JSON text: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{place} is {shown(fields)}; it must be a JSON object")
        known = [each.name for each in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(f"{place} has {name!r}; its fields are {', '.join(known)}")
        if fields.get("model_name") is None:
            fields["model_name"] = uuid.uuid4().hex
        config = cls(**fields)
        if config.model_name not in MODELS:
            MODELS.register_module(config.model_name, module=BaseChatTemplate, force=True)
        return config


def is_json_text(text: str) -> bool:
    return text.lstrip().startswith("{")


def _read(file_or_string: Any) -> tuple[str, str]:
    """The JSON text, and what it is called in messages."""
    if isinstance(file_or_string, str) and is_json_text(file_or_string):
        return file_or_string, "the chat template"
    if not isinstance(file_or_string, (str, os.PathLike)):
        raise wrong_type("file_or_string", file_or_string, "a path or JSON text")
    path = os.fspath(file_or_string)
    try:
        return Path(path).read_text(encoding="utf-8-sig"), path
    except (OSError, ValueError) as error:
        raise ValueError(
            f"file_or_string is {shown(path)}; it must be JSON text or a readable file: {error}"
        ) from None


def _place(name: str) -> str:
    return f"ChatTemplateConfig.{name}"
