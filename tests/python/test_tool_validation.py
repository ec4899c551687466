"""Arguments that are validated after they were written."""

from __future__ import annotations

import json
import sys
import time

import jsonschema
import pytest
from allspark.serve.parsers import MessageParser, Tool, choose_tool_parser
from allspark.serve.parsers.plain_text import parameters, unenforced
from allspark.serve.parsers.typed_values import kinds
from allspark.serve.parsers.validation import argument_problem, check_schema
from hypothesis import given, settings
from hypothesis import strategies as st


def problem(schema, arguments: str) -> str | None:
    return argument_problem(Tool("f", {"type": "object", **schema}), arguments)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ["{}", '{"a": 1e400}'], ["[]", "", '{"a": NaN}', "{", "[" * 100_000]),
        ({"required": ["a"]}, ['{"a": 1}'], ["{}"]),
        ({"properties": {"a": {"not": {"const": 1}}}}, ['{"a": 2}'], ['{"a": 1}']),
        ({"properties": {"a": {"pattern": "^a+$"}}}, ['{"a": "aa"}', '{"a": 1}'], ['{"a": "b"}']),
        (
            {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
            ["{}", '{"x": 1}'],
            ['{"x": "1"}', '{"y": 1}'],
        ),
        ({"additionalProperties": {"type": "null"}}, ['{"a": null}'], ['{"a": 1}']),
        (
            {"properties": {"a": {"uniqueItems": True}}},
            ['{"a": [1, "1", true, [1], {"a": 1}]}', '{"a": 3}'],
            ['{"a": [1, 1.0]}', '{"a": [{"a": 1, "b": 2}, {"b": 2, "a": 1.0}]}'],
        ),
        ({"minProperties": 1}, ['{"a": 1}'], ["{}"]),
        (
            {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "maxProperties": 1}},
             "properties": {"a": {"$ref": "#/$defs/n"}}},
            ['{"a": {"n": {"n": {}}}}'],
            ['{"a": {"n": {"n": {"x": 1, "y": 2}}}}'],
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#",
             "properties": {"a": {"items": [{"type": "null"}]}}},
            ['{"a": [null, 1]}'],
            ['{"a": [1]}'],
        ),
        ({"properties": {"a": {"format": "date"}}}, ['{"a": "x"}'], []),
    ],
)  # fmt: skip
def test_arguments(schema, good, bad):
    for arguments in good:
        assert problem(schema, arguments) is None
        jsonschema.validate(json.loads(arguments), schema)
    for arguments in bad:
        assert problem(schema, arguments)


def test_messages_say_where():
    schema = {"properties": {"a": {"items": {"minimum": 3}}}}
    assert problem(schema, '{"a": [3, 1]}') == "$.a[1]: 1 is less than the minimum of 3"
    assert len(problem({"properties": {"a": {"const": 1}}}, '{"a": "' + "x" * 10_000 + '"}')) <= 300


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}, "cannot be used"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "cannot be used"),
        ({"properties": {"a": {"type": "dict"}}}, "cannot be used"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "cannot be used"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "nested too deeply"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ],
)
def test_schemas_that_cannot_be_used(schema, words):
    assert words in problem(schema, '{"a": "x"}')


def test_hostile_schemas_take_bounded_time():
    begin = time.thread_time()
    evil = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    assert "does not match" in problem(evil, '{"a": "' + "a" * 100_000 + '!"}')
    doubling = {f"d{i}": {"allOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(40)}
    doubling["d40"] = {"type": "object"}
    assert "steps" in problem({"$defs": doubling, "$ref": "#/$defs/d0"}, "{}")
    many = ", ".join(map(str, range(20_000)))
    assert problem({"properties": {"a": {"uniqueItems": True}}}, f'{{"a": [{many}]}}') is None
    assert time.thread_time() - begin < 20


def test_schemas():
    check_schema(Tool("f", {"type": "object", "properties": {"a": {"not": {}}}}))
    for schema in ({"properties": {"a": {"type": "dict"}}}, {"properties": 3}, {"required": [3]}):
        with pytest.raises(ValueError, match="the tool 'f' are no JSON Schema"):
            check_schema(Tool("f", {"type": "object", **schema}))


def test_without_jsonschema(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match=r"the tool 'f' .* needs the extra 'serve' \(docs/"):
        problem({}, "{}")


WORDS = st.sampled_from(
    ["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "required", "$defs",
     "additionalProperties", "nullable", "string", "integer", "object", "dict", "#", "#/$defs/a",
     "#/properties/a", "a", "</parameter>", "format", "pattern", ""]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(WORDS, JSON, max_size=6))
def test_any_schema_is_read(schema):
    """What a schema says wrongly says nothing."""
    assert isinstance(kinds(schema, schema), frozenset)
    unenforced(schema)
    list(parameters(schema))
    text = "<function=f><parameter=a>1</parameter><parameter=b>x</parameter></function>"
    parser = MessageParser(choose_tool_parser(None, "qwen3coder"), tools=[Tool("f", schema)])
    assert parser.parse(text).tool_calls[0].is_complete
