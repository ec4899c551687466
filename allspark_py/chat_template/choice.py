"""Which chat template a model gets, and the names of all templates."""

from __future__ import annotations

import logging
import os
from typing import Any

from allspark.error_text import shown, wrong_type

from .builtin import OLDER_NAMES
from .config import ChatTemplateConfig, is_json_text
from .interface import ChatTemplate
from .registry import MODELS
from .tokenizer_template import TokenizerTemplate, has_template

_log = logging.getLogger("allspark.chat_template")


def names() -> list[str]:
    """The names of all templates in alphabetical order, without those of older versions."""
    return sorted(name for name in MODELS if name not in OLDER_NAMES)


def choose(
    tokenizer: Any,
    model_path: str | os.PathLike[str] | None,
    config: ChatTemplateConfig | str | None = None,
) -> ChatTemplate:
    """The template for a model: what `config` says, which may be a name, the path of a JSON file or
    JSON text; else the tokenizer's own; else that of a class whose `match` knows `model_path`; else
    'base', which joins the texts as they are.

    Raises:
        ValueError, TypeError: the config is wrong.
    """
    template = _choose(tokenizer, None if model_path is None else os.fspath(model_path), config)
    _log.info("the chat template of %s is %r", model_path, template)
    return template


def _choose(
    tokenizer: Any, model_path: str | None, config: ChatTemplateConfig | str | None
) -> ChatTemplate:
    if config is not None:
        return _of_config(tokenizer, model_path, _to_config(config))
    if has_template(tokenizer):
        return TokenizerTemplate(tokenizer)
    name = match(model_path) if model_path else None
    if name is None:
        _log.warning(
            "no chat template is known for %s; messages are joined as they are ('base'). "
            "A name or a JSON file can be given.",
            model_path,
        )
    return ChatTemplateConfig(name or "base").chat_template


def match(model_path: str) -> str | None:
    """The name of the first template that knows the path. Users' classes are asked first."""
    builtin = []
    for name, cls in MODELS.module_dict.items():
        if cls.__module__.startswith(f"{__package__}."):
            builtin.append(cls)
        elif found := cls.match(model_path):
            return found if isinstance(found, str) else name
    return next((found for cls in builtin if (found := cls.match(model_path))), None)


def _to_config(config: Any) -> ChatTemplateConfig:
    if isinstance(config, ChatTemplateConfig):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise wrong_type("config", config, "a ChatTemplateConfig, a name, a file or JSON text")
    if isinstance(config, str) and config in MODELS:
        return ChatTemplateConfig(config)
    text = os.fspath(config)
    if is_json_text(text) or _is_file(text):
        return ChatTemplateConfig.from_json(text)
    raise ValueError(
        f"config is {shown(text)}; it must be a JSON file, JSON text or one of {', '.join(names())}"
    )


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a NUL
        return False


def _of_config(tokenizer: Any, model_path: str | None, config: ChatTemplateConfig) -> ChatTemplate:
    cls = MODELS.get(config.model_name)
    if cls is None or not issubclass(cls, TokenizerTemplate):
        return config.chat_template
    fields = {"model_path": model_path, **config.fields_for(cls)}
    return cls(tokenizer, **fields)
