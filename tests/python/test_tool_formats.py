"""The response formats of tools: what they let a model write is what the parsers read."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from allspark.grammar_compiler import Compiler
from allspark.model_loader.tokenizer import load_tokenizer
from allspark.serve.parsers import (
    MessageParser,
    ToolChoice,
    ToolFormat,
    choose_reasoning_parser,
    choose_tool_parser,
    content_format,
    read_tools,
    tool_format,
)
from allspark.serve.parsers.validation import argument_problem
from support.checkpoints import shared_data
from support.tool_samples import SYNTAXES, TOOLS
from support.vocabularies import tokenizer_directory

# Some models have their markers as special tokens, others spell them.
SPECIAL = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<|action_start|>", "<|plugin|>",
    "<|action_end|>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<think>", "</think>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
READ_TOOLS = read_tools(TOOLS)
CITY = ("get_weather", {"city": 'São "P" \\ {[x]}\n', "count": -1.5, "flags": [1, {"a": "}"}]})
UNIT = ("get_weather", {"city": "", "unit": "celsius"})
DAYS = ("get", {"days": 3})
NOW = ("now", {})
BARE = "llama3-bare"


class Vocabulary:
    """A tokenizer, and what its tokens may be under a format."""

    def __init__(self, name: str, special=()):
        self.tokenizer = load_tokenizer(tokenizer_directory(name))
        self.tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        self.compiler = Compiler.of(self.tokenizer)

    def form(self, name, choice=AUTO, tools=READ_TOOLS, **options):
        return tool_format(choose_tool_parser(None, name), tools, choice, self.compiler, **options)

    def accepts(self, form, text: str) -> bool:
        """Whether the text is a whole output."""
        matcher = self.compiler.matcher(form.response_format)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, form, rng, max_tokens=3000) -> str | None:
        """A random output; None where it has not ended."""
        matcher, ids = self.compiler.matcher(form.response_format), []
        while not matcher.is_stopped() and len(ids) < max_tokens:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            ids.append(int(rng.choice(allowed)))
            assert matcher.consume_token(ids[-1])
        if not matcher.is_stopped():
            return None
        if ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return self.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def qwen() -> Vocabulary:
    return Vocabulary("qwen2.5")


@pytest.fixture(scope="module", params=["spelt", "special"])
def vocabulary(request) -> Vocabulary:
    """One that spells most markers, and one that has them as tokens."""
    if request.param == "spelt":
        return request.getfixturevalue("qwen")
    return Vocabulary("byte_level", SPECIAL)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_auto(vocabulary, syntax):
    name, write = SYNTAXES[syntax]
    form = vocabulary.form(name)
    assert form.unchecked == ()
    assert vocabulary.accepts(form, "Hello <b> {x} [1].\n")
    assert vocabulary.accepts(form, "")
    for calls in ([CITY], [UNIT], [NOW], [DAYS, CITY, NOW]):
        assert vocabulary.accepts(form, write(calls)), write(calls)
        if syntax != BARE:
            assert vocabulary.accepts(form, "I look.\n" + write(calls))
    begin = write([NOW])[: -len("}")] if syntax == BARE else write([NOW])[:-4]
    assert not vocabulary.accepts(form, begin)


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=lambda choice: choice.mode)
def test_what_is_no_valid_call(vocabulary, syntax, choice):
    name, write = SYNTAXES[syntax]
    form = vocabulary.form(name, choice)
    assert vocabulary.accepts(form, write([DAYS]))
    for call in (
        ("nobody", {}),
        ("get", {}),
        ("get", {"days": 1.5}),
        ("get", {"days": "three"}),
        ("get", {"days": 3, "more": 1}),
        ("get_weather", {"city": "Paris", "unit": "kelvin"}),
        ("get_weather", {"unit": "celsius"}),
        ("now", {"days": 3}),
        ("ge", {"days": 3}),
        ("get_", {"days": 3}),
    ):
        assert not vocabulary.accepts(form, write([call])), call
        assert not vocabulary.accepts(form, write([DAYS, call])), call


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_required(vocabulary, syntax):
    name, write = SYNTAXES[syntax]
    form = vocabulary.form(name, REQUIRED)
    for calls in ([CITY], [NOW], [DAYS, CITY, NOW]):
        assert vocabulary.accepts(form, write(calls)), write(calls)
    for text in ("", "Hello.", "Hello. " + write([NOW]), write([NOW]) + " Done."):
        assert not vocabulary.accepts(form, text), text


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_one_call(vocabulary, syntax):
    name, write = SYNTAXES[syntax]
    for choice in (AUTO, REQUIRED):
        form = vocabulary.form(name, choice, parallel=False)
        assert vocabulary.accepts(form, write([CITY]))
        assert not vocabulary.accepts(form, write([CITY, NOW]))
        assert not vocabulary.accepts(form, write([CITY]) + write([NOW]))
        assert vocabulary.accepts(form, "") == vocabulary.accepts(form, "Hi.") == (choice is AUTO)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_some_of_the_tools(qwen, syntax):
    name, write = SYNTAXES[syntax]
    for mode in ("auto", "required"):
        form = qwen.form(name, ToolChoice(mode, ("get", "now")))
        assert qwen.accepts(form, write([DAYS, NOW]))
        assert not qwen.accepts(form, write([CITY]))
    assert qwen.form(name, ToolChoice("none")).response_format is None


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_reasoning_is_free(vocabulary, syntax):
    name, write = SYNTAXES[syntax]
    reasoning = {"reasoning_parser": choose_reasoning_parser(None, "default")}
    thought = "Is it {x}? [TOOL} <tool_ca> or <function\n"
    if vocabulary.tokenizer.convert_tokens_to_ids("<|python_tag|>") is None:
        thought += "<|python_tag|> [TOOL_CALLS]f <｜tool▁calls▁begin｜>"
    for choice in (AUTO, REQUIRED):
        form = vocabulary.form(name, choice, **reasoning)
        for begin in ("", f"<think>{thought}</think>", f"\n<think>\n{thought}\n</think>\n\n"):
            assert vocabulary.accepts(form, begin + write([CITY])), begin
            assert vocabulary.accepts(form, begin + "Hi.") == (choice is AUTO)
            assert not vocabulary.accepts(form, begin + write([("nobody", {})]))
        assert not vocabulary.accepts(form, f"<think>{thought}")
        form = vocabulary.form(name, choice, **reasoning, begins_in_reasoning=True)
        for begin in (f"{thought}</think>", f"\n{thought}</think>\n\n"):
            assert vocabulary.accepts(form, begin + write([CITY])), begin
            assert vocabulary.accepts(form, begin + "Hi.") == (choice is AUTO)
        assert not vocabulary.accepts(form, write([CITY]))
        assert not vocabulary.accepts(form, thought)
    flagged = {"reasoning_parser": choose_reasoning_parser(None, "deepseek-v3")}
    plain = vocabulary.form(name, REQUIRED)
    assert vocabulary.form(name, REQUIRED, **flagged) == plain
    form = vocabulary.form(name, REQUIRED, **flagged, enable_thinking=True)
    assert vocabulary.accepts(form, f"{thought}</think>{write([NOW])}")


# A response_format of the content: what is in it, and what is not.
CONTENTS = [
    ({"type": "json_object"}, ['{"a": [1, "<think> [TOOL_CALLS]"]}'], ["[1]", "x"]),
    (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {
            "properties": {"a": {"$ref": "#/$defs/q"}}, "required": ["a"], "type": "object",
            "$defs": {"q": {"type": "integer"}}, "additionalProperties": False}}},
        ['{"a": 3}'], ['{"a": "x"}'],
    ),
    ({"type": "json_object", "json_schema": '{"type": "integer"}'}, ["12"], ["x"]),
    (
        {"type": "json_schema", "oneOf": "anyOf",
         "json_schema": {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 9}]}},
        ["12", "3.5"], ["x"],
    ),
    ({"type": "regex", "regex": r"a/b{2}\n?c"}, ["a/bbc", "a/bb\nc"], ["abc"]),
    ({"type": "regex_schema", "regex_schema": "[0-9]+"}, ["12"], ["x"]),
    ({"type": "choice", "choice": ["yes", "no } x", '"q"']}, ["yes", "no } x", '"q"'], ["n", ""]),
    (
        {"type": "grammar", "grammar": 'start: "a" TEXT_1 x\nTEXT_1: /[0-9]+/\nx: "}" | "{"'},
        ["a12}", "a1{"], ["a12", "b"],
    ),
    ({"type": "grammar", "grammar": 'root ::= "yes" | "no" [0-9]{2}'}, ["yes", "no12"], ["no"]),
    (
        {"type": "structural_tag", "triggers": ["<f"],
         "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]},
        ["hi <f>1</f> x", ""], ["<f>x</f>"],
    ),
    (
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "X"},
            {"type": "response_format", "response_format": {"type": "regex", "regex": "[ab]+"}},
        ]}},
        ["Xab"], ["Xc", "X"],
    ),
    ({"type": "text"}, ["x", ""], []),
]  # fmt: skip


@pytest.mark.parametrize(("content", "good", "bad"), CONTENTS, ids=lambda _: "")
def test_content_in_a_format(qwen, content, good, bad):
    parser = choose_reasoning_parser(None, "default")
    assert content_format(content, None) is content
    free = ToolFormat(content_format(content, parser))
    opened = ToolFormat(content_format(content, parser, begins_in_reasoning=True))
    tools = qwen.form("qwen", content=content, reasoning_parser=parser)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for form, begins in (
        (free, ("", "<think>a {}</think>", "\n<think>x</think>\n\n")),
        (opened, ("x</think>", "\n{\n</think>\n\n")),
        (tools, ("", "<think>x</think>\n")),
    ):
        for begin in begins:
            assert [text for text in good if not qwen.accepts(form, begin + text)] == []
            assert [text for text in bad if qwen.accepts(form, begin + text)] == []
            if form is tools and content["type"] not in ("text", "structural_tag"):
                assert qwen.accepts(form, begin + call)
                assert not qwen.accepts(form, begin + good[0] + call)
    required = qwen.form("qwen", REQUIRED, content=content)
    assert required == qwen.form("qwen", REQUIRED)


SHORT = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "n": {"type": "integer", "minimum": 1, "maximum": 99},
                        "e": {"enum": ["a b", "c\nd", "e"]},
                        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                    },
                    "required": ["n", "e"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)


@pytest.mark.parametrize("name", sorted({name for name, _ in SYNTAXES.values()}))
def test_what_a_model_can_write_is_read(vocabulary, name):
    """Random outputs: each is calls and nothing else, and each call is valid."""
    rng = np.random.default_rng(1)
    form = vocabulary.form(name, REQUIRED, SHORT)
    one = vocabulary.form(name, REQUIRED, SHORT, parallel=False)
    tools = {tool.name: tool for tool in SHORT}
    numbers = []
    for index in range(16):
        text = vocabulary.walk(one if index % 4 == 0 else form, rng)
        if text is None:
            continue
        message = MessageParser(choose_tool_parser(None, name), tools=SHORT).parse(text)
        assert message.content == "" and message.tool_calls, text
        for call in message.tool_calls:
            assert call.is_complete, text
            assert argument_problem(tools[call.name], call.arguments) is None, text
        numbers.append(len(message.tool_calls))
        assert index % 4 or numbers[-1] == 1
    assert len(numbers) > 8 and max(numbers) > 1


def function(name, properties=None, strict=False, **keywords):
    parameters = {"type": "object", "properties": properties or {}, **keywords}
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


NOT_A = {"not": {"const": "a"}}


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_schemas_that_cannot_be_enforced(qwen, syntax):
    name, write = SYNTAXES[syntax]
    tools = [function("f", {"x": NOT_A}), function("get", {"days": {"type": "integer"}})]
    form = qwen.form(name, tools=read_tools(tools))
    assert form.unchecked == ("f",)
    # Any object is left; the other tool is held to its schema.
    assert qwen.accepts(form, write([("f", {"x": "a", "other": "1"}), DAYS]))
    assert not qwen.accepts(form, write([("get", {"days": "x"})]))
    tools[0]["function"]["strict"] = True
    with pytest.raises(ValueError, match="tool 'f' is strict.*not"):
        qwen.form(name, tools=read_tools(tools))
    # Only tools that may be called count.
    assert qwen.form(name, ToolChoice("auto", ("get",)), read_tools(tools)).unchecked == ()


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (NOT_A, '"not"'),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "branches of the oneOf"),
    ],
)
def test_what_a_strict_tool_has_that_cannot_be_enforced_is_named(qwen, schema, problem):
    with pytest.raises(ValueError, match="the tool 'f' is strict") as caught:
        qwen.form("qwen", tools=read_tools([function("f", {"x": schema}, True)]))
    assert problem in str(caught.value) and "%json" not in str(caught.value)
    assert ("oneOf" in str(caught.value)) == ("oneOf" in schema)


@pytest.mark.parametrize("name", ["qwen3coder", "glm47"])
@pytest.mark.parametrize(
    ("properties", "keywords", "problem"),
    [
        ({"x": {"type": "string"}}, {}, None),
        ({"x": {"type": "string", "format": "zebra", "description": "x"}}, {}, None),
        ({"x": {"type": ["string", "null"]}}, {}, None),
        ({"x": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}, {}, None),
        ({"x": {"type": "integer", "minimum": 3}}, {}, None),
        ({"x": {"type": "array", "items": {"type": "string", "pattern": "a"}}}, {}, None),
        ({"x": {"$ref": "#/$defs/e"}}, {"$defs": {"e": {"enum": ["a", "b"]}}}, None),
        ({"x": {"$ref": "#/$defs/e"}}, {"$defs": {"e": {"type": "integer"}}}, None),
        ({"x": {}, "y": True}, {"required": ["z"]}, None),
        ({"x": {"type": "string", "pattern": "a"}}, {}, "'pattern' of the property 'x'"),
        ({"x": {"type": "string", "format": "date"}}, {}, "'format'"),
        ({"x": {"type": "string", "minLength": 1}}, {}, "'minLength'"),
        ({"x": {"type": ["string", "integer"]}}, {}, "'type'"),
        ({"x": {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}}, {}, "'items'"),
        ({"x": {"enum": ["1", 1]}}, {}, "'enum'"),
        ({"<x>": {}}, {}, "the name of the property '<x>'"),
        ({}, {"minProperties": 1}, "'minProperties'"),
        ({}, {"anyOf": [{"required": ["x"]}]}, "'anyOf'"),
    ],
)
def test_schemas_in_plain_text(qwen, name, properties, keywords, problem):
    form = qwen.form(name, tools=read_tools([function("f", properties, **keywords)]))
    assert form.unchecked == (("f",) if problem else ())
    if problem:
        with pytest.raises(ValueError, match=f"tool 'f' is strict, and .*{problem}"):
            qwen.form(name, tools=read_tools([function("f", properties, True, **keywords)]))


@pytest.mark.parametrize("name", ["qwen", "qwen3coder"])
def test_schemas_that_are_none(qwen, name):
    tools = read_tools([function("g"), function("f", {"x": {"type": "dict"}})])
    with pytest.raises(ValueError, match="the tool 'f' are no JSON Schema.*dict"):
        qwen.form(name, tools=tools)


def test_formats_that_are_too_large(qwen):
    tools = [function(f"f{i}", {"x": {"enum": ["x" * 1000]}}) for i in range(1000)]
    with pytest.raises(ValueError, match="characters; the bound is"):
        qwen.form("qwen", tools=read_tools(tools))


def test_a_tool_that_is_too_large_alone_is_not_checked(qwen):
    large = function("large", {"x": {"enum": [f"{i}" + "x" * 1000 for i in range(1000)]}})
    form = qwen.form("qwen", tools=read_tools([large, function("f", {"x": {"type": "integer"}})]))
    assert form.unchecked == ("large",)


def test_many_schemas_that_are_slow_are_refused_in_time(qwen, monkeypatch):
    monkeypatch.setattr("allspark.serve.parsers.guided._MAX_SECONDS", 0.0)
    tools = [function("a"), function("f", {"x": NOT_A})]
    with pytest.raises(ValueError, match="take more than 0 s"):
        qwen.form("qwen", tools=read_tools(tools))


def test_a_format_is_compiled_once(qwen):
    form = qwen.form("qwen").response_format
    before = time.thread_time()
    assert qwen.compiler.prepare(form) is qwen.compiler.prepare(qwen.form("qwen").response_format)
    assert time.thread_time() - before < 1


# BFCL writes Python's names of types.
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def _schema(value):
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _schema(item) for key, item in value.items()}
    if schema.get("type") == "any":
        del schema["type"]
    elif isinstance(schema.get("type"), str):
        schema["type"] = _TYPES.get(schema["type"], schema["type"])
    return schema


def published_tools():
    """The different functions of a benchmark, all with the words of its questions."""
    folder = shared_data() / "json" / "bfcl"
    found = {}
    for path in sorted(folder.glob("*.json")):
        for line in path.read_text().splitlines():
            for entry in json.loads(line)["function"]:
                parameters = _schema(entry["parameters"])
                name = re.sub(r"[^\w.-]", "_", entry["name"])[:64]
                found[name] = {"name": name, "parameters": parameters}
    return read_tools([{"type": "function", "function": entry} for entry in found.values()])


@pytest.mark.parametrize("name", sorted({name for name, _ in SYNTAXES.values()}))
def test_published_tools(qwen, name):
    tools = published_tools()
    assert len(tools) > 400
    unchecked = set()
    for begin in range(0, 200, 50):
        unchecked |= set(qwen.form(name, tools=tools[begin : begin + 50]).unchecked)
    assert not unchecked
