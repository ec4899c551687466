"""What is refused of a prompt's text and of the fields that a chat template is given."""

from __future__ import annotations

import re
from typing import Any

from allspark.pipeline.served_model import ServedModel
from allspark.serve.errors import ApiError, invalid_value

# What a chat template is given beside its variables, by fields of their own.
_NO_VARIABLES = frozenset({
    "self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template",
})  # fmt: skip
# Fields beside the messages that an error of a chat template may begin with.
_TEMPLATE_FIELD = re.compile(r"(?:tools|documents)\b")


def check_chars(model: ServedModel, text: str, name: str) -> None:
    """Raises ApiError where a text is so long that it cannot fit; it would be tokenised in vain."""
    bound = model.max_prompt_chars
    if len(text) > bound:
        length = model.session_len
        message = f"{name}: {len(text)} characters; the model's length, {length} tokens, holds "
        message += f"{bound} at most"
        raise ApiError(400, message, param=name, code="context_length_exceeded")


def template_error(error: Exception, rendered: str = "messages") -> ApiError:
    """For what a chat template refuses: the error of the field that it names, or of the one that is
    rendered."""
    text = str(error)
    found = _TEMPLATE_FIELD.match(text)
    param = found[0] if found is not None else rendered
    return invalid_value(text, param)


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """The variables of chat_template_kwargs. Raises ApiError for one that is a field."""
    for name in given or ():
        if name in _NO_VARIABLES:
            param = "chat_template_kwargs"
            message = f"{param} has {name!r}, which is no variable of a chat template"
            raise invalid_value(message, param)
    return dict(given or {})
