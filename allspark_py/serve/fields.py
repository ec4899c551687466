"""From the body of a request to the generation config of the engine's request."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from allspark.error_text import shown
from allspark.serve.catalog import Entry
from allspark.serve.choice import Own
from allspark.serve.errors import ApiError, invalid_value
from allspark.serve.field_names import not_served
from allspark.serve.protocol.common import (
    FORMAT_FIELDS,
    MAX_TIMEOUT_MS,
    GenerationBody,
    StructuredOutputs,
)
from allspark.serve.settings import ServerSettings

# Where neither the request nor the model says anything.
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 40}
_MAX_ID_DIGITS = 10
# The same name and meaning in the engine's config.
_SAME = (
    "typical_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "suppress_repetition_in_generation", "seed", "stop_words_ids", "bad_words", "bad_words_ids",
    "ignore_eos", "max_length", "min_length", "skip_special_tokens", "include_stop_str_in_output",
    "priority", "no_repeat_ngram_size", "logprobs_mode", "prompt_lookup_num_tokens",
    "use_draft_model", "beam_early_stopping", "length_penalty",
)  # fmt: skip


def to_fields(
    body: GenerationBody,
    entry: Entry,
    settings: ServerSettings,
    max_tokens: int | None,
    sampling: Mapping[str, float] = SAMPLING,
) -> dict[str, Any]:
    """The fields of start_request_ids.

    Args:
        max_tokens: None: up to the model's length.
        sampling: where neither the request nor the model says anything.

    Raises:
        ApiError: a field is refused.
    """
    fields = entry.model.request_fields()
    fields.update(_sampling(body, sampling_defaults(entry, settings, sampling)))
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    if max_tokens is not None:
        fields["max_new_tokens"] = max_tokens
    fewest = max(body.min_tokens or 0, body.min_new_tokens or 0)
    if fewest:
        fields["min_new_tokens"] = fewest if max_tokens is None else min(fewest, max_tokens)
    ends = [] if body.ignore_eos else fields.get("stop_token_ids", [])
    fields["stop_token_ids"] = [*ends, *(body.stop_token_ids or ())]
    fields["stop_words"] = _stops(body, entry, settings)
    if body.bad_token_ids:
        own = [[token] for token in body.bad_token_ids]
        fields["bad_words_ids"] = [*fields.get("bad_words_ids", ()), *own]
    if body.logit_bias:
        fields["logit_bias"] = _biases(body.logit_bias)
    if body.repetition_ngram_size and body.repetition_ngram_threshold:
        fields["repetition_ngram_size"] = body.repetition_ngram_size
        fields["repetition_ngram_threshold"] = body.repetition_ngram_threshold
    if entry.adapter is not None:
        fields["lora_name"] = entry.adapter
    fields.update(_outputs(body, entry))
    own_ms = min(MAX_TIMEOUT_MS, math.ceil(1000 * settings.request_timeout))
    fields["timeout_ms"] = min((ms for ms in (body.timeout_ms or 0, own_ms) if ms), default=0)
    response_format = to_format(body, settings)
    if response_format is not None:
        fields["response_format"] = response_format
    return fields


def words_of(fields: dict[str, Any]) -> tuple[Any, ...]:
    """What a start reads of a request's fields that may be long."""
    return tuple(map(fields.get, ("stop_words", "stop_words_ids", "bad_words", "bad_words_ids")))


def check_outputs(name: str, count: int, entry: Entry) -> None:
    """Raises ApiError where a request asks for more outputs than there is ever room for: it could
    try again for ever."""
    bound = entry.model.max_outputs
    if bound is not None and count > bound:
        flags = "--max-batch-size, --max-waiting-requests"
        message = f"{name} asks for {count} outputs; at most {bound} run and wait at once ({flags})"
        raise invalid_value(message, name)


def _outputs(body: GenerationBody, entry: Entry) -> dict[str, Any]:
    """The fields about the number of outputs, and how they come about."""
    n, best_of, num_beams = body.n or 1, body.best_of or body.n or 1, body.num_beams or 1
    if best_of < n:
        message = f"best_of is {best_of}; it must be at least n, which is {n}"
        raise invalid_value(message, "best_of")
    # The engine refuses equal outputs where they are asked for by do_sample False. A temperature of
    # 0 gives them all the same.
    sampled = {"n": n, "do_sample": body.do_sample is not False}
    if num_beams > 1:
        _check_ranked("num_beams", num_beams, body, entry)
        return {
            "num_beams": num_beams,
            "num_return_sequences": n,
            "best_of": body.best_of or 1,
            "do_sample": bool(body.do_sample),
            # Not the model's own, which a search does not take.
            "prompt_lookup_num_tokens": body.prompt_lookup_num_tokens or 0,
        }
    if best_of > n:
        _check_ranked("best_of", best_of, body, entry)
        return {**sampled, "best_of": best_of}
    check_outputs("n", n, entry)
    return sampled if n > 1 else {}


def _check_ranked(name: str, count: int, body: GenerationBody, entry: Entry) -> None:
    """Raises ApiError where a request for the best of several outputs cannot be served."""
    if body.stream:
        message = f"stream is true; it must be false where {name} is {count}: outputs are ranked "
        message += "once all of them have ended"
        raise ApiError(400, message, param="stream", code="unsupported_feature")
    check_outputs(name, count, entry)


def sampling_defaults(
    entry: Entry, settings: ServerSettings, sampling: Mapping[str, float] = SAMPLING
) -> dict[str, float]:
    """The values of what a request does not say."""
    return {**sampling, **entry.model.sampling_defaults, **settings.sampling_defaults}


def _sampling(body: GenerationBody, defaults: Mapping[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: value if (value := getattr(body, name)) is not None else defaults[name]
        for name in ("temperature", "top_p", "top_k")
    }
    if body.repetition_penalty is None and "repetition_penalty" in defaults:
        found["repetition_penalty"] = defaults["repetition_penalty"]
    found["top_k"] = max(0, found["top_k"])
    found["do_sample"] = found["temperature"] > 0 and body.do_sample is not False
    return found


def own_of(body: GenerationBody) -> Own:
    """What the outputs' ends are told by."""
    stops = frozenset([*_own_stops(body), *(body.stop_token_ids or ())])
    name = _format_name(body)
    return Own(stops) if name is None else Own(stops, name)


def _own_stops(body: GenerationBody) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else list(body.stop or ())


def _stops(body: GenerationBody, entry: Entry, settings: ServerSettings) -> list[str]:
    own = _own_stops(body)
    check_stops("stop", own, settings)
    return own if body.ignore_eos else [*own, *entry.model.stop_strings()]


def check_stops(name: str, stops: list[str], settings: ServerSettings) -> None:
    """Raises ApiError where the stop strings of a field are too many, or one is empty."""
    if len(stops) > settings.max_stops:
        bound = settings.max_stops
        message = f"{name} has {len(stops)} strings; the bound is {bound}"
        raise invalid_value(message, name)
    for index, word in enumerate(stops):
        if not word:
            message = f"{name}[{index}] is empty; it must have a character at least"
            raise invalid_value(message, f"{name}[{index}]")


def _biases(biases: dict[str, float]) -> dict[int, float]:
    found = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) <= _MAX_ID_DIGITS):
            message = f"logit_bias has the key {shown(token)}; it must be a token id"
            raise invalid_value(message, "logit_bias")
        found[int(token)] = float(bias)
    return found


def to_format(body: GenerationBody, settings: ServerSettings) -> dict[str, Any] | None:
    """The engine's response_format, whatever the request calls it. Raises ApiError where it is too
    large, or not the only one."""
    given = _given_formats(body)
    if not given:
        return None
    if len(given) > 1:
        message = f"{given[0]} and {given[1]} are both given; there is one format"
        raise invalid_value(message, given[1])
    (name,) = given
    value = getattr(body, name)
    plain = value.model_dump(by_alias=True) if isinstance(value, StructuredOutputs) else value
    check_schema_size(name, plain, settings)
    if name == "response_format":
        return _response_format(value)
    if isinstance(value, StructuredOutputs):
        return _structured(value)
    if name in ("guided_json", "json_schema"):
        return {"type": "json_schema", "json_schema": value}
    if name in ("guided_regex", "regex"):
        return {"type": "regex", "regex": value}
    if name == "structural_tag":
        return _structural_tag(value)
    if name == "guided_choice":
        return {"type": "choice", "choice": value}
    return {"type": "grammar", "grammar": value}


def _response_format(value: dict[str, Any]) -> dict[str, Any] | None:
    if value.get("type") != "text":
        return value
    for name in value:
        if name != "type":
            message = f"response_format of type 'text' has the key {shown(name)}; it has no other"
            raise invalid_value(message, "response_format")
    return None


_OUTPUT_FORMS = ("schema_", "regex", "choice", "grammar", "json_object", "structural_tag")


def _structured(outputs: StructuredOutputs) -> dict[str, Any] | None:
    for name, value in (outputs.model_extra or {}).items():
        if value:  # it binds the output in a way that is not known here
            raise not_served(f"structured_outputs.{name[:100]}")
    given = [name for name in _OUTPUT_FORMS if getattr(outputs, name) is not None]
    if not given:
        return None
    if len(given) > 1:
        first, second = (each.rstrip("_").replace("schema", "json") for each in given[:2])
        message = f"structured_outputs has {first} and {second}; it must have one"
        raise invalid_value(message, "structured_outputs")
    name, value = given[0], getattr(outputs, given[0])
    if name == "schema_":
        return {"type": "json_schema", "json_schema": value}
    if name == "json_object":
        return {"type": "json_object"} if value else None
    if name == "structural_tag":
        return _structural_tag(value)
    return {"type": name, name: value}


def _structural_tag(value: dict[str, Any] | str) -> dict[str, Any]:
    """A structural tag, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise _wrong_tag(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise _wrong_tag(f"a JSON {type(value).__name__}; it must be an object")
    return {**value, "type": "structural_tag"}


def _wrong_tag(problem: str) -> ApiError:
    message = f"structural_tag is {problem}"
    return invalid_value(message, "structural_tag")


def check_schema_size(name: str, value: Any, settings: ServerSettings) -> None:
    """Raises ApiError where a schema or a grammar is too large."""
    size, bound = len(orjson.dumps(value)), settings.max_schema_bytes
    if size > bound:
        message = f"{name} has {size} bytes as JSON; the bound is {bound}"
        raise invalid_value(message, name)


# How the engine's message begins where a field is wrong.
_ENGINE_FIELD = re.compile(r"(?:sequence \d+: )?([a-z_]+)((?:\[\d+\])*)(?=[ '])")
_LENGTHS = ("max_completion_tokens", "max_tokens", "request_output_len")


@contextlib.contextmanager
def naming(body: GenerationBody) -> Iterator[None]:
    """Around a start: what the engine refuses is named as the request has it."""
    try:
        yield
    except ApiError as error:
        if error.param is None and error.status == 400:
            raise _named(error, body) from None
        raise


def _named(error: ApiError, body: GenerationBody) -> ApiError:
    found = _ENGINE_FIELD.match(error.message)
    field, place = found.groups() if found is not None else ("", "")
    name, message = _request_name(field, body), error.message
    if name is not None:
        message = f"{name}{message[found.end(1) :]}" if found is not None else message
    elif error.code == "invalid_request" and (form := _format_name(body)) is not None:
        name, place = form, ""
        message = message if form in message else f"{form}: {message}"
    return ApiError(error.status, message, name and name + place, error.code)


def _request_name(field: str, body: GenerationBody) -> str | None:
    """What a request calls a field of the engine's; None where it has no such field."""
    if field == "max_new_tokens":
        return next((name for name in _LENGTHS if getattr(body, name, None)), None)
    if field == "input_ids" and getattr(body, "input_ids", None) is None:
        return "messages" if hasattr(body, "messages") else "prompt"
    if field == "response_format":
        return None
    if field == "bad_words_ids" and getattr(body, field) is None:
        return "bad_token_ids"
    name = {"num_return_sequences": "n", "stop_words": "stop"}.get(field, field)
    return name if name in type(body).model_fields else None


def _format_name(body: GenerationBody) -> str | None:
    return next(iter(_given_formats(body)), None)


def _given_formats(body: GenerationBody) -> list[str]:
    return [name for name in FORMAT_FIELDS if getattr(body, name) is not None]
