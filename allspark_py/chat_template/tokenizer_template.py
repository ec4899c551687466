"""TokenizerTemplate: the Jinja template that comes with a tokenizer, rendered by transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allspark.error_text import shown, wrong_type

from .base import check_continued, check_stop_words, check_variables
from .encoding import encode_exactly
from .interface import ChatTemplate, Messages
from .messages import MessageForm, check_tools, normalise
from .registry import MODELS
from .time_limit import TimeLimitError, call_within

# A template is code of the checkpoint, or of a request. What it may cost:
MAX_SECONDS = 2.0
MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_TEXT_CHARACTERS = 1 << 25

_MAX_SHOWN = 500  # Characters of an error of the template.

# A turn before the messages where a sequence goes on; what follows its answer is the text wanted.
_ANSWER = "the-answer-before"
_TURN_BEFORE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER})

# transformers leaves out what is None. This puts it back, in front of a template that asks for it.
# The last expression keeps a newline with which the template begins.
_WITH_NONE = (
    "{% set given_messages = namespace(all=[]) %}{% for message in messages %}"
    "{% set given_messages.all = given_messages.all + [dict({'content': none}, **message)] %}"
    "{% endfor %}{% set messages = given_messages.all %}{{ '' }}"
)


@MODELS.register_module(name="hf")
class TokenizerTemplate(ChatTemplate):
    """Renders as `tokenizer.apply_chat_template` does. Any thread may call."""

    name = "hf"

    def __init__(
        self,
        tokenizer: Any = None,
        chat_template: str | None = None,
        *,
        model_path: str | None = None,
        stop_words: Sequence[str] | None = None,
    ) -> None:
        """`chat_template` is used instead of the tokenizer's own. Without a tokenizer, the one in
        the directory `model_path` is loaded. Without `stop_words` they are its end tokens.

        Raises:
            ValueError: there is no tokenizer or no template.
        """
        if tokenizer is None and model_path is None:
            raise ValueError("tokenizer and model_path are None; one of them must be given")
        if tokenizer is None:
            from allspark.model_loader.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(Path(str(model_path)))
        if chat_template is not None and not isinstance(chat_template, str):
            raise wrong_type("chat_template", chat_template, "a str or None")
        if chat_template is None and not has_template(tokenizer):
            raise ValueError("the tokenizer has no chat template, and none is given")
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.stop_words = check_stop_words("stop_words", stop_words)
        if self.stop_words is None:
            self.stop_words = _end_tokens(tokenizer)

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        if not isinstance(prompt, str):
            raise wrong_type("prompt", prompt, "a str")
        return self.messages2prompt([{"role": "user", "content": prompt}], sequence_start)

    def messages2prompt(
        self, messages: str | Messages, sequence_start: bool = True, **kwargs: Any
    ) -> str:
        """As ChatTemplate.messages2prompt; keywords are those of `render`."""
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        last = normalise(messages, MessageForm())[-1]
        is_answer = last["role"] == "assistant" and last["content"] is not None
        kwargs = {"continue_final_message": is_answer, **kwargs}
        if sequence_start:
            return self.render(messages, **kwargs)
        text = self.render([*_TURN_BEFORE, *messages], **kwargs)
        return self._after_answer(text)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """As ChatTemplate.render; `template_kwargs` are variables of the template.

        Raises:
            TimeLimitError: the template took too long; a ValueError like the others.
        """
        tools = check_tools(tools)
        self._check_variables(template_kwargs)
        text = self._text(tools)
        _import_renderer(self.tokenizer)
        arguments = {
            **template_kwargs,
            "tools": tools,
            "documents": documents or None,
            "chat_template": text,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "tokenize": False,
        }
        try:
            return call_within(MAX_SECONDS, self._render, messages, arguments)
        except TimeLimitError as error:
            raise TimeLimitError(f"the chat template does not end: {error}") from None

    def settings(self) -> dict[str, Any]:
        """As ChatTemplate.settings; the template's text, also where it is the tokenizer's own."""
        text = self.chat_template or self.tokenizer.chat_template
        return {**super().settings(), "chat_template": text}

    def encode(self, tokenizer: Any, text: str, sequence_start: bool = True) -> list[int]:
        """The template itself writes BOS, where the model wants it."""
        return encode_exactly(tokenizer, text)

    def _text(self, tools: list[Any] | None) -> str:
        """The template; of several that a tokenizer has, the one for tools or the default."""
        text = self.chat_template
        if text is None:
            text = self.tokenizer.get_chat_template(tools=tools)
        if not isinstance(text, str):
            raise wrong_type("chat_template", text, "a str")
        if len(text) > MAX_TEMPLATE_CHARACTERS:
            raise ValueError(
                f"the chat template has {len(text)} characters; it must have at most "
                f"{MAX_TEMPLATE_CHARACTERS}"
            )
        return text

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Variables of a request must not be options of transformers."""
        if variables:
            options = inspect.signature(self.tokenizer.apply_chat_template).parameters
            check_variables(variables, {*options, *_RESERVED})

    def _render(self, messages: Messages, arguments: dict[str, Any]) -> str:
        """All that depends on the template, its analysis too: it has a limit of time."""
        from .jinja_syntax import template_facts

        try:
            facts = template_facts(arguments["chat_template"])
        except RecursionError:
            raise ValueError("the chat template is nested too deeply") from None
        for name in ("tools", "documents"):
            if arguments[name] and name not in facts.variables:
                raise ValueError(f"{name}: the chat template has no place for {name}")
        form = MessageForm(
            content_parts=facts.iterates_content,
            text_arguments=facts.joins_arguments,
            developer="developer" in facts.strings,
            none_content=facts.compares_content,
        )
        normalised = normalise(messages, form)
        if facts.compares_content and any(each["content"] is None for each in normalised):
            arguments["chat_template"] = _WITH_NONE + arguments["chat_template"]
        if arguments["continue_final_message"]:
            check_continued(normalised)
        for index, message in enumerate(normalised):
            if "tool_calls" in message and "tool_calls" not in facts.strings:
                place = f"messages[{index}].tool_calls"
                raise ValueError(f"{place}: the chat template has no form for tool calls")
        try:
            text = _apply(self.tokenizer, normalised, arguments)
        except ValueError as error:
            for name in ("tools", "documents"):
                if arguments[name] and self._can_apply(normalised, {**arguments, name: None}):
                    raise ValueError(f"{name} cannot be written: {error}") from None
            raise
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ValueError(
                f"the chat template made {len(text)} characters; it must make at most "
                f"{MAX_TEXT_CHARACTERS}"
            )
        self._check_roles(normalised, {"system", "user", "assistant", *facts.strings}, arguments)
        return text

    def _can_apply(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> bool:
        try:
            _apply(self.tokenizer, messages, arguments)
        except ValueError:
            return False
        return True

    def _check_roles(
        self, messages: list[dict[str, Any]], known: set[str], arguments: dict[str, Any]
    ) -> None:
        """Raises ValueError if the template leaves out a message because of its role. Templates
        that write any role have no names of them, so a second rendering shows it."""
        marks = {i: f"mark-{i}-" for i, each in enumerate(messages) if each["role"] not in known}
        if not marks:
            return
        marked = [dict(message) for message in messages]
        for index, mark in marks.items():
            marked[index]["content"] = mark
        text = _apply(self.tokenizer, marked, arguments)
        for index, mark in marks.items():
            if mark not in text:
                role = shown(messages[index]["role"])
                raise ValueError(
                    f"messages[{index}].role is {role}, which the chat template leaves out"
                )

    def _after_answer(self, text: str) -> str:
        """What follows the answer of _TURN_BEFORE, and the end token that a model writes."""
        _, found, rest = text.partition(_ANSWER)
        if not found:
            raise ValueError("the chat template cannot go on with a sequence; render it as a whole")
        end = getattr(self.tokenizer, "eos_token", None)
        if end:
            space, found, after = rest.partition(end)
            if found and not space.strip():
                return after
        return rest


# Names that transformers' renderer or Jinja itself uses.
_RESERVED = ("conversations", "messages", "return_assistant_tokens_mask", "self")


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _end_tokens(tokenizer: Any) -> list[str]:
    tokens = (getattr(tokenizer, name, None) for name in ("eos_token", "eot_token"))
    return list(dict.fromkeys(str(token) for token in tokens if token))


_is_imported = False


def _import_renderer(tokenizer: Any) -> None:
    """The first rendering imports modules. It must not be interrupted, and may take long."""
    global _is_imported
    if not _is_imported:
        from .jinja_syntax import template_facts

        template_facts("")
        messages = [{"role": "user", "content": ""}]
        tokenizer.apply_chat_template(messages, chat_template="", tokenize=False)
        _is_imported = True


def _apply(tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        return tokenizer.apply_chat_template(messages, **arguments)
    except ImportError:
        raise
    except TemplateSyntaxError as error:
        reason = f"is wrong in line {error.lineno}: {error.message}"
    except TemplateError as error:
        # Only raise_exception of a template raises the base class itself.
        is_own = type(error) is TemplateError
        verb = "refuses the messages" if is_own else f"failed: {type(error).__name__}"
        reason = f"{verb}: {error.message}"
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
    if len(reason) > _MAX_SHOWN:
        reason = f"{reason[:_MAX_SHOWN]}..."
    raise ValueError(f"the chat template {reason}")
