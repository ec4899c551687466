"""What the arguments of pipeline() are by position, which LMDeploy's releases say differently."""

from __future__ import annotations

from typing import Any

from allspark.chat_template import ChatTemplateConfig
from allspark.pipeline.configs import BackendConfig
from allspark.pipeline.log import LEVELS

# What follows model_path: since LMDeploy 0.12, and before.
_NEWER = (
    "backend_config", "chat_template_config", "log_level", "max_log_len", "speculative_config",
)  # fmt: skip
_OLDER = ("model_name", *_NEWER)


def _is_older(args: tuple[Any, ...]) -> bool:
    first, second, third, fourth = (*args, None, None, None, None)[:4]
    if isinstance(first, str) or isinstance(second, BackendConfig):
        return True
    if isinstance(first, BackendConfig):
        return False
    return (
        isinstance(third, ChatTemplateConfig)
        or (isinstance(third, str) and third not in LEVELS)
        or isinstance(fourth, str)
    )


def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that follow model_path, by name.

    Raises:
        TypeError: there are too many, or one is given twice.
    """
    names = _OLDER if _is_older(args) else _NEWER
    if len(args) > len(names):
        raise TypeError(f"pipeline takes {', '.join(names)} after model_path; {len(args)} given")
    given = dict(zip(names, args, strict=False))
    for name in given.keys() & kwargs.keys():
        raise TypeError(f"pipeline has two values for {name!r}")
    return {**given, **kwargs}
