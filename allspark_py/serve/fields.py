"""From the body of a request to the generation config of the engine's request."""

from __future__ import annotations

from typing import Any

import orjson
from allspark.serve.catalog import Entry
from allspark.serve.errors import ApiError
from allspark.serve.protocol.common import (
    FORMAT_FIELDS,
    GenerationBody,
    RequestBody,
    StructuredOutputs,
)
from allspark.serve.settings import ServerSettings

# Where neither the request nor the model says anything.
_SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": 40}
# The same name and meaning in the engine's config.
_SAME = (
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop_token_ids", "bad_words", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output", "priority",
)  # fmt: skip


def to_fields(
    body: GenerationBody, entry: Entry, settings: ServerSettings, max_tokens: int | None
) -> dict[str, Any]:
    """The fields of start_request_ids. `max_tokens` None: up to the model's length.

    Raises:
        ApiError: a field is refused.
    """
    fields = entry.model.request_fields()
    fields.update(_sampling(body, entry, settings))
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            fields[name] = value
    if max_tokens is not None:
        fields["max_new_tokens"] = max_tokens
    fewest = max(body.min_tokens or 0, body.min_new_tokens or 0)
    if fewest:
        fields["min_new_tokens"] = fewest if max_tokens is None else min(fewest, max_tokens)
    ends = [] if body.ignore_eos else entry.model.request_fields().get("stop_token_ids", [])
    fields["stop_token_ids"] = [*ends, *(body.stop_token_ids or ())]
    fields["stop_words"] = _stops(body, entry, settings)
    if body.logit_bias:
        fields["logit_bias"] = _biases(body.logit_bias)
    if body.repetition_ngram_size and body.repetition_ngram_threshold:
        fields["repetition_ngram_size"] = body.repetition_ngram_size
        fields["repetition_ngram_threshold"] = body.repetition_ngram_threshold
    if entry.adapter is not None:
        fields["lora_name"] = entry.adapter
    if (n := body.n or 1) > 1:
        fields["n"] = n
        # The engine refuses n equal outputs where they are asked for by do_sample False. A
        # temperature of 0 gives them all the same.
        fields["do_sample"] = True
    timeouts = (body.timeout_ms or 0, round(1000 * settings.request_timeout))
    fields["timeout_ms"] = min((ms for ms in timeouts if ms > 0), default=0)
    response_format = to_format(body, settings)
    if response_format is not None:
        fields["response_format"] = response_format
    return fields


def _sampling(body: GenerationBody, entry: Entry, settings: ServerSettings) -> dict[str, Any]:
    defaults = {**_SAMPLING, **entry.model.sampling_defaults, **settings.sampling_defaults}
    found = {
        name: value if (value := getattr(body, name)) is not None else defaults[name]
        for name in ("temperature", "top_p", "top_k")
    }
    if body.repetition_penalty is None and "repetition_penalty" in defaults:
        found["repetition_penalty"] = defaults["repetition_penalty"]
    found["top_k"] = max(0, found["top_k"])
    found["do_sample"] = found["temperature"] > 0
    return found


def _stops(body: GenerationBody, entry: Entry, settings: ServerSettings) -> list[str]:
    own = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    check_stops("stop", own, settings)
    return own if body.ignore_eos else [*own, *entry.model.stop_strings()]


def check_stops(name: str, stops: list[str], settings: ServerSettings) -> None:
    """Raises ApiError where the stop strings of a field are too many, or one is empty."""
    if len(stops) > settings.max_stops:
        bound = settings.max_stops
        message = f"{name} has {len(stops)} strings; the bound is {bound}"
        raise ApiError(400, message, param=name, code="invalid_value")
    for index, word in enumerate(stops):
        if not word:
            message = f"{name}[{index}] is empty; it must have a character at least"
            raise ApiError(400, message, param=f"{name}[{index}]", code="invalid_value")


def _biases(biases: dict[str, float]) -> dict[int, float]:
    found = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit()):
            message = f"logit_bias has the key {token!r}; it must be a token id"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
        found[int(token)] = float(bias)
    return found


def to_format(body: GenerationBody, settings: ServerSettings) -> dict[str, Any] | None:
    """The engine's response_format, whatever the request calls it. Raises ApiError where it is too
    large."""
    name = next((name for name in FORMAT_FIELDS if getattr(body, name) is not None), None)
    if name is None:
        return None
    value = getattr(body, name)
    plain = value.model_dump(by_alias=True) if isinstance(value, StructuredOutputs) else value
    check_schema_size(name, plain, settings)
    if name == "response_format":
        return None if value.get("type") == "text" else value
    if isinstance(value, StructuredOutputs):
        return _structured(value)
    if name in ("guided_json", "json_schema"):
        return {"type": "json_schema", "json_schema": value}
    if name in ("guided_regex", "regex"):
        return {"type": "regex", "regex": value}
    if name == "guided_choice":
        return {"type": "choice", "choice": value}
    return {"type": "grammar", "grammar": value}


def _structured(outputs: StructuredOutputs) -> dict[str, Any] | None:
    given = [name for name in StructuredOutputs.model_fields if getattr(outputs, name) is not None]
    if not given:
        return None
    if len(given) > 1:
        message = f"structured_outputs has {given[0]} and {given[1]}; it must have one"
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    name, value = given[0], getattr(outputs, given[0])
    if name == "schema_":
        return {"type": "json_schema", "json_schema": value}
    if name == "json_object":
        return {"type": "json_object"} if value else None
    if name == "structural_tag":
        return {**value, "type": "structural_tag"} if isinstance(value, dict) else value
    return {"type": name, name: value}


def check_schema_size(name: str, value: Any, settings: ServerSettings) -> None:
    """Raises ApiError where a schema or a grammar is too large."""
    size, bound = len(orjson.dumps(value)), settings.max_schema_bytes
    if size > bound:
        message = f"{name} has {size} bytes as JSON; the bound is {bound}"
        raise ApiError(400, message, param=name, code="invalid_value")


def check_fields(
    body: RequestBody, settings: ServerSettings, beyond: tuple[str, ...] = ()
) -> str:
    """The unknown fields of a request, for the header that names them.

    Args:
        beyond: fields that are known and not served; each must be None or empty.

    Raises:
        ApiError: an unserved field asks for something, or, with strict_fields, one is unknown.
    """
    for name in beyond:
        if getattr(body, name, None):
            raise ApiError(400, f"{name} is not served", param=name, code="unsupported_feature")
    unknown = body.unknown_fields
    if unknown and settings.strict_fields:
        message = f"{unknown[0]} is not a field of this request"
        raise ApiError(400, message, param=unknown[0], code="unknown_field")
    return ", ".join(name.encode("unicode_escape").decode() for name in unknown)[:1000]
