"""Validates arguments that could not be enforced while they were written.

Schemas are somebody else's: nothing is fetched, expressions are matched in linear time, and the
work is bounded. The package `jsonschema` comes with the extra `serve`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import re2
from allspark.error_text import needs_extra
from allspark.serve.parsers.json_texts import refuse_constant
from allspark.serve.parsers.tools import Tool

# Keywords that are looked at, in a schema and in its parts.
_MAX_STEPS = 100_000
_MAX_MESSAGE = 300


class _TooMuchError(Exception):
    """The bound is reached."""


def check_schema(tool: Tool) -> None:
    """Raises ValueError where a tool's parameters are no JSON Schema."""
    meta_schema = _validator_class(tool).META_SCHEMA
    problem = _first_problem(tool, meta_schema, tool.parameters)
    if problem:
        raise ValueError(f"the parameters of the tool {tool.name!r} are no JSON Schema: {problem}")


def argument_problem(tool: Tool, arguments: str) -> str | None:
    """Why a call's arguments, JSON text, are not valid for the tool; None if they are."""
    try:
        value = json.loads(arguments, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"the arguments are not JSON: {error}"
    return _first_problem(tool, tool.parameters, value)


def _first_problem(tool: Tool, schema: Any, value: Any) -> str | None:
    validator_class = _validator_class(tool)
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    specifications: Registry = jsonschema.validators.SPECIFICATIONS  # type: ignore[attr-defined]
    # A registry that retrieves nothing; the default one opens URLs.
    validator = _bounded(validator_class)(schema, registry=specifications)
    try:
        error = next(validator.iter_errors(value), None)
    except _TooMuchError:
        return f"the validation takes more than {_MAX_STEPS} steps"
    except RecursionError:
        return "the validation is nested too deeply"
    except (Unresolvable, re2.error, jsonschema.exceptions.UnknownType) as problem:
        return f"the schema cannot be used: {problem}"[:_MAX_MESSAGE]
    if error is None:
        return None
    return f"{error.json_path}: {error.message}"[:_MAX_MESSAGE]


def _validator_class(tool: Tool) -> Any:
    """Of the schema's draft."""
    try:
        from jsonschema import Draft202012Validator, validators
    except ImportError as error:
        what = f"validating the arguments of the tool {tool.name!r} after they are written"
        raise ImportError(needs_extra(what, "serve")) from error
    schema = tool.parameters
    return validators.validator_for({"$schema": schema.get("$schema", "")}, Draft202012Validator)


def _bounded(base: Any) -> Any:
    """A class of validators that take no more than _MAX_STEPS, all together."""
    from jsonschema import validators

    num_left = _MAX_STEPS

    def counted(keyword: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def check(*arguments: Any) -> Iterator[Any]:
            nonlocal num_left
            num_left -= 1
            if num_left < 0:
                raise _TooMuchError
            yield from keyword(*arguments) or ()

        return check

    changed = {**base.VALIDATORS, **_LINEAR}
    return validators.extend(base, {name: counted(check) for name, check in changed.items()})


@lru_cache(maxsize=256)
def _expression(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)


def _error(message: str) -> Any:
    from jsonschema import ValidationError

    return ValidationError(message)


def _pattern(validator: Any, pattern: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and not _expression(pattern).search(value):
        yield _error(f"the text does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for pattern, part in patterns.items():
            for key, item in value.items():
                if _expression(pattern).search(key):
                    yield from validator.descend(item, part, path=key, schema_path=pattern)


def _additional_properties(validator: Any, part: Any, value: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(value, dict):
        return
    patterns = schema.get("patternProperties", {})
    for key, item in value.items():
        if key in schema.get("properties", {}):
            continue
        if any(_expression(pattern).search(key) for pattern in patterns):
            continue
        if part is False:
            yield _error(f"{key!r} is not one of the properties")
        elif isinstance(part, Mapping):
            yield from validator.descend(item, part, path=key)


def _unique_items(validator: Any, is_set: Any, value: Any, schema: Any) -> Iterator[Any]:
    if is_set is True and isinstance(value, list):
        texts = {json.dumps(_normal(item), sort_keys=True) for item in value}
        if len(texts) < len(value):
            yield _error("the elements are not unique")


def _normal(value: Any) -> Any:
    """Equal numbers as one: 1 and 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if isinstance(value, dict):
        return {key: _normal(item) for key, item in value.items()}
    return value


def _unevaluated(validator: Any, part: Any, value: Any, schema: Any) -> Iterator[Any]:
    # The library's function matches patternProperties by backtracking.
    yield _error("the keyword 'unevaluatedProperties' cannot be validated")


# Keywords that would take more than linear time, or match expressions by backtracking.
_LINEAR = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "unevaluatedProperties": _unevaluated,
}
