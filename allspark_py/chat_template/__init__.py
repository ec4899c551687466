"""Chat templates: from messages to the text and the token ids that a model is given
(docs/chat_templates.md).
"""

from __future__ import annotations

from .base import BaseChatTemplate
from .choice import choose, match, names
from .config import ChatTemplateConfig
from .interface import ChatTemplate
from .registry import MODELS, Registry
from .time_limit import TimeLimitError
from .tokenizer_template import TokenizerTemplate

__all__ = [
    "MODELS",
    "BaseChatTemplate",
    "ChatTemplate",
    "ChatTemplateConfig",
    "Registry",
    "TimeLimitError",
    "TokenizerTemplate",
    "choose",
    "match",
    "names",
]
