"""The flags about generation: the fields of the pipeline's GenerationConfig."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

# Where the note of a field is the name of the engine's alone.
_HELP = {
    "bad_token_ids": "ids that never come",
    "bad_words": "texts that never come",
    "do_sample": "draw tokens; else the likeliest is taken",
    "ignore_eos": "go on after an end of sequence",
    "include_stop_str_in_output": "the output ends with the stop word that ended it",
    "logprobs": "log-probabilities of so many tokens at each position",
    "min_new_tokens": "no end before so many output tokens",
    "min_p": "draw from tokens of at least this part of the likeliest one's probability",
    "repetition_ngram_size": "an output that repeats so many tokens",
    "repetition_ngram_threshold": "so many times ends; 0: never",
    "repetition_penalty": "above 1 makes tokens that were there less likely",
    "response_format": "JSON that says what outputs must look like",
    "skip_special_tokens": "leave special tokens out of the text",
    "stop_token_ids": "ids that end an output, which leaves them out",
    "stop_words": "texts that end an output",
    "temperature": "below 1 makes likely tokens likelier",
    "top_k": "draw from so many of the likeliest tokens; 0: from all",
    "top_p": "draw from the likeliest tokens that together have this probability",
}


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them; `to_generation_config` reads them."""
    group = parser.add_argument_group("generation")
    for name, (field, rule) in _fields().items():
        flag = "--" + name.replace("_", "-")
        text = _HELP.get(name) or rule.note.replace("`", "")
        if isinstance(field.default, bool):
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=None, help=text)
        elif str(field.type).startswith("list"):
            group.add_argument(flag, nargs="+", type=_element(field), metavar="X", help=text)
        else:
            group.add_argument(flag, type=_value, metavar="X", help=text)


def _fields() -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    from allspark.batch.prompts import NOT_SETTINGS
    from allspark.pipeline import GenerationConfig
    from allspark.pipeline.fields import rules

    rules_of = rules(GenerationConfig)
    return {
        field.name: (field, rules_of[field.name])
        for field in dataclasses.fields(GenerationConfig)
        if rules_of[field.name].treatment == "mapped" and field.name not in NOT_SETTINGS
    }


def _element(field: dataclasses.Field[Any]) -> Any:
    return int if "int" in str(field.type) else str


def _value(text: str) -> Any:
    """A number, an object or null where the text is one in JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def to_generation_config(options: argparse.Namespace) -> Any:
    """The GenerationConfig of the flags. Raises ValueError or TypeError for a refused value."""
    from allspark.pipeline import GenerationConfig

    given = {name: getattr(options, name) for name in _fields()}
    return GenerationConfig(**{name: value for name, value in given.items() if value is not None})
