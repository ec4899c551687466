"""Answers lines of allspark's own form by a pipeline: prompts and conversations."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from allspark.batch.answer import Answer, to_line
from allspark.batch.lines import LineError
from allspark.batch.origin import line_seed
from allspark.error_text import shown
from allspark.pipeline import GenerationConfig, Response
from allspark.pipeline.inputs import to_prompt
from allspark.pipeline.pipe import Pipeline

logger = logging.getLogger("allspark")

# Tensors have no place in a line, and each line of a run has a seed of its own.
_NOT_FIELDS = ("output_logits", "output_last_hidden_state")
NOT_SETTINGS = (*_NOT_FIELDS, "random_seed")
_CONFIG_FIELDS = {field.name for field in dataclasses.fields(GenerationConfig)}


@dataclasses.dataclass
class PromptLines:
    """The lines of one run.

    Args:
        config: of all lines, but for what a line says.
        do_preprocess: False: texts go to the model without a chat template.
        adapter_name: an adapter that is loaded; None: the base model.
        seed: the seeds of lines without one follow from it and the line's number.
    """

    pipe: Pipeline
    config: GenerationConfig
    do_preprocess: bool = True
    adapter_name: str | None = None
    seed: int = 0

    async def answer(self, number: int, value: Any) -> Answer:
        """The output line of a line's JSON value. It never raises for one."""
        head: dict[str, Any] = {"line": number}
        try:
            if isinstance(value, str):
                value = {"prompt": value}
            if not isinstance(value, dict):
                kind = type(value).__name__
                raise LineError(f"the line is a JSON {kind}; it must be an object or a string")
            head.update(_custom_id(value))
            response = await self._run(number, value)
        except LineError as error:
            return error_line(head, error.code, str(error))
        except (TypeError, ValueError) as error:
            return error_line(head, "invalid_request", str(error))
        except Exception as error:  # of this line alone
            logger.exception("line %d failed", number)
            return error_line(head, "internal_error", f"{type(error).__name__}: {error}")
        if response.error_code is not None:
            message = response.error_message or response.error_code
            return error_line(head, response.error_code, message)
        return _answer_line(head, response)

    async def _run(self, number: int, value: Mapping[str, Any]) -> Response:
        fields = {key: each for key, each in value.items() if key not in _OWN_FIELDS}
        for name in fields:
            if name not in _CONFIG_FIELDS:
                raise LineError(f"{shown(name)} is not a field of a line", "unknown_field")
            if name in _NOT_FIELDS and fields[name] is not None:
                raise LineError(f"{name} is not written to a line", "unsupported_feature")
        config = dataclasses.replace(self.config, **fields)
        if config.random_seed is None:
            config.random_seed = line_seed(self.seed, number)
        pieces = self.pipe.generate(
            _prompt_of(value),
            session_id=number,
            gen_config=config,
            stream_response=False,
            do_preprocess=_own(value, "do_preprocess", bool, self.do_preprocess),
            adapter_name=_own(value, "adapter_name", str, self.adapter_name),
        )
        # Read to its end: a generator that is left earlier is closed by a task of its own.
        responses = [response async for response in pieces]
        if len(responses) != 1:
            raise RuntimeError(f"the pipeline gave {len(responses)} responses, not one")
        return responses[0]


_OWN_FIELDS = {"prompt", "messages", "custom_id", "do_preprocess", "adapter_name"}


def _own(value: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    given = value.get(name)
    if given is None:
        return default
    if not isinstance(given, kind):
        raise LineError(f"{name} is {shown(given)}; it must be a {kind.__name__}")
    return given


def _custom_id(value: Mapping[str, Any]) -> dict[str, Any]:
    given = _own(value, "custom_id", str, None)
    return {} if given is None else {"custom_id": given}


def _prompt_of(value: Mapping[str, Any]) -> Any:
    given = [name for name in ("prompt", "messages") if value.get(name) is not None]
    if len(given) != 1:
        which = "both given" if given else "both missing"
        raise LineError(f"prompt and messages are {which}; a line has one of them")
    (name,) = given
    found = value[name]
    prompt = to_prompt(name, found)
    if name == "messages" and (isinstance(prompt, str) or not isinstance(prompt[0], Mapping)):
        raise LineError(f"messages is {shown(found)}; it must be a list of objects")
    return prompt


def _answer_line(head: dict[str, Any], response: Response) -> Answer:
    value = {
        **head,
        "text": response.text,
        "finish_reason": response.finish_reason,
        "input_token_len": response.input_token_len,
        "generate_token_len": response.generate_token_len,
    }
    if response.logprobs is not None:
        value["token_ids"] = response.token_ids
        value["logprobs"] = response.logprobs
    return Answer(
        to_line(value),
        num_prompt_tokens=response.input_token_len,
        num_output_tokens=response.generate_token_len,
    )


def error_line(head: Mapping[str, Any], code: str, message: str) -> Answer:
    """The output line of a line that has no answer."""
    return Answer(to_line({**head, "error": {"code": code, "message": message}}), is_error=True)
