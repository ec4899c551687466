"""BaseChatTemplate: a conversation as a row of marked texts.

    {system}{meta_instruction}{eosys}{user}{content}{eoh}{assistant}{answer}{eoa}{separator}{user}...

The markers are fields. A class of a user may derive from it and override get_prompt,
messages2prompt and match.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from allspark.error_text import shown, wrong_type

from .encoding import encode_after_first_tokens
from .interface import ChatTemplate, Messages
from .messages import MessageForm, check_tools, content_text, normalise

CAPABILITIES = ("completion", "infilling", "chat", "python")

_FORM = MessageForm()
_MARKERS = ("system", "eosys", "user", "eoh", "assistant", "eoa", "separator", "tool", "eotool")


class BaseChatTemplate(ChatTemplate):
    """`meta_instruction` is the system message of conversations that have none; None, unlike '',
    leaves out its markers too. With a `capability` other than chat, prompts are passed on as they
    are.
    """

    begin: ClassVar[str] = ""  # before everything else, where a sequence starts
    has_calls: ClassVar[bool] = False  # whether _calls_text writes tool calls

    def __init__(
        self,
        system: str = "",
        meta_instruction: str | None = "",
        eosys: str = "",
        user: str = "",
        eoh: str = "",
        assistant: str = "",
        eoa: str = "",
        separator: str = "",
        tool: str = "",
        eotool: str = "",
        capability: str = "chat",
        stop_words: Sequence[str] | None = None,
        session_len: int | None = None,  # LMDeploy's classes pass it; it has no effect
    ) -> None:
        """Raises TypeError and ValueError, which name the field and say what it must be."""
        self.system = system
        self.meta_instruction = meta_instruction
        self.eosys = eosys
        self.user = user
        self.eoh = eoh
        self.assistant = assistant
        self.eoa = eoa
        self.separator = separator
        self.tool = tool
        self.eotool = eotool
        for name in _MARKERS:
            if not isinstance(getattr(self, name), str):
                raise wrong_type(name, getattr(self, name), "a str")
        if meta_instruction is not None and not isinstance(meta_instruction, str):
            raise wrong_type("meta_instruction", meta_instruction, "a str or None")
        self.capability = check_capability("capability", capability)
        self.stop_words = check_stop_words("stop_words", stop_words)
        self.session_len = session_len
        if type(self).get_prompt is BaseChatTemplate.get_prompt:
            self._check_no_infilling()

    @property
    def opening(self) -> str:
        """What comes before an answer that is to be generated."""
        return self.assistant

    @property
    def takes_tools(self) -> bool:
        return bool(self.tool or self.eotool)

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        if not isinstance(prompt, str):
            raise wrong_type("prompt", prompt, "a str")
        self._check_no_infilling()
        if self.capability != "chat":
            return prompt
        question = {"role": "user", "content": prompt}
        number = self._question_number(sequence_start)
        start = self._start(sequence_start, needs_system=True)
        return f"{start}{self._message(question, number)}{self.opening}"

    def messages2prompt(
        self,
        messages: str | Messages,
        sequence_start: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """As ChatTemplate.messages2prompt. `continue_final_message` None: if an assistant's message
        with a text is the last one. Other keywords are those of other templates, and are ignored.
        """
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        normalised = normalise(messages, _FORM)
        tools = self._check(normalised, tools, documents)
        continued = _is_continued(normalised, continue_final_message)
        if self.capability != "chat":
            text = "".join(content_text(message) for message in normalised)
            return self.get_prompt(text, sequence_start)
        is_system = normalised[0]["role"] == "system"
        parts = [self._start(sequence_start, needs_system=not is_system)]
        num_questions = 0
        for index, message in enumerate(normalised):
            num_questions += message["role"] == "user"
            is_open = continued and index == len(normalised) - 1
            parts.append(self._message(message, num_questions, is_open))
        if tools:
            parts.insert(2 if is_system else 1, self._tools_block(tools))
        if add_generation_prompt and not continued:
            parts.append(self.opening)
        return "".join(parts)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        normalised = normalise(messages, _FORM)
        # A class of a user may have a messages2prompt that knows none of these, or some.
        given: dict[str, Any] = {}
        if tools:
            given["tools"] = tools
        if documents:
            given["documents"] = documents
        if not add_generation_prompt:
            given["add_generation_prompt"] = False
        if continue_final_message or normalised[-1]["role"] == "assistant":
            given["continue_final_message"] = continue_final_message
        check_variables(template_kwargs, ("messages", "sequence_start"))
        parameters = inspect.signature(self.messages2prompt).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            for name in given:
                if name not in parameters:
                    raise ValueError(f"{name}: messages2prompt of {self._label} does not take it")
            template_kwargs = {k: v for k, v in template_kwargs.items() if k in parameters}
        return self.messages2prompt(normalised, True, **{**template_kwargs, **given})

    def encode(self, tokenizer: Any, text: str, sequence_start: bool = True) -> list[int]:
        """With the tokens that the tokenizer puts first, BOS as a rule, where a sequence starts;
        they are never there twice."""
        return encode_after_first_tokens(tokenizer, text, sequence_start)

    # The parts of a conversation, for classes with other forms of them.

    @property
    def _label(self) -> str:
        return repr(self.name or type(self).__name__)

    def _check_no_infilling(self) -> None:
        if self.capability == "infilling":
            raise ValueError(f"capability is 'infilling', which the template {self._label} has not")

    def _start(self, sequence_start: bool, needs_system: bool) -> str:
        if not sequence_start:
            return self.separator
        if needs_system and self.meta_instruction is not None:
            return f"{self.begin}{self.system}{self.meta_instruction}{self.eosys}"
        return self.begin

    def _question_number(self, sequence_start: bool) -> int:
        """Which question of its sequence the prompt of get_prompt is, where that matters."""
        return 1

    def _message(
        self, message: Mapping[str, Any], num_questions: int, is_open: bool = False
    ) -> str:
        """`num_questions`: of the user, up to this message. `is_open`: without its end."""
        begin, end = self._markers(message)
        content = content_text(message) + self._calls_text(message)
        return f"{begin}{content}{'' if is_open else end}"

    def _markers(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """What comes before and after a message; its role is one of `_roles`."""
        return {
            "system": (self.system, self.eosys),
            "user": (self.user, self.eoh),
            "assistant": (self.assistant, self.eoa + self.separator),
            "tool": (self.tool, self.eotool),
        }[message["role"]]

    def _roles(self) -> tuple[str, ...]:
        roles = ("system", "user", "assistant")
        return (*roles, "tool") if self.takes_tools else roles

    def _tools_block(self, tools: Sequence[Any]) -> str:
        """What tools there are; comes after the system message."""
        return f"{self.tool}{json_text(tools)}{self.eotool}"

    def _calls_text(self, message: Mapping[str, Any]) -> str:
        """The tool calls of a message, after its content."""
        return ""

    def _check(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, documents: Any
    ) -> list[Any] | None:
        """Returns the tools. Raises ValueError for what the template has no form for."""
        tools = check_tools(tools)
        if tools and (self.capability != "chat" or not self.takes_tools):
            raise ValueError(f"tools: the template {self._label} has no markers for tools")
        if documents:
            raise ValueError(f"documents: the template {self._label} has no place for them")
        roles = self._roles()
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in roles:
                raise ValueError(
                    f"messages[{index}].role is {shown(role)}; for the template {self._label} it "
                    f"must be one of {', '.join(roles)}"
                )
            if "tool_calls" in message and not (self.has_calls and role == "assistant"):
                raise ValueError(
                    f"messages[{index}].tool_calls: the template {self._label} has no form for them"
                )
        return tools


def _is_continued(messages: Sequence[Mapping[str, Any]], asked: bool | None) -> bool:
    if asked is False:
        return False
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] is not None:
        return True
    if asked:
        check_continued(messages)
    return False


def check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the last message is no assistant's, or has no text."""
    place = f"messages[{len(messages) - 1}]"
    role = messages[-1]["role"]
    if role != "assistant":
        raise ValueError(
            f"{place}.role is {shown(role)}; with continue_final_message it must be 'assistant'"
        )
    if messages[-1]["content"] is None:
        raise ValueError(f"{place}.content is None; with continue_final_message it must be a text")


def check_variables(variables: Iterable[str], reserved: Collection[str]) -> None:
    """Raises ValueError if a template's variable, which a request may name, is something else."""
    for name in variables:
        if name in reserved:
            raise ValueError(f"{name} is no variable that can be given to a chat template")


def check_capability(place: str, capability: Any) -> str:
    if not isinstance(capability, str):
        raise wrong_type(place, capability, f"one of {', '.join(CAPABILITIES)}")
    if capability not in CAPABILITIES:
        raise ValueError(f"{place} is {capability!r}; it must be one of {', '.join(CAPABILITIES)}")
    return capability


def check_stop_words(place: str, words: Any) -> list[str] | None:
    if words is None:
        return None
    if not isinstance(words, (list, tuple)):
        raise wrong_type(place, words, "a list of str")
    for index, word in enumerate(words):
        if not isinstance(word, str):
            raise wrong_type(f"{place}[{index}]", word, "a str")
    return list(words)


def json_text(value: Any) -> str:
    """What tells a model about tools. Raises ValueError for what JSON has not."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"tools cannot be written as JSON: {error}") from None
