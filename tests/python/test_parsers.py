"""What parsers of outputs find: content, reasoning and tool calls, however the output is cut."""

from __future__ import annotations

import itertools
import json
import random
import re
import time

import pytest
from allspark.serve.parsers import (
    ContentDelta,
    Message,
    MessageParser,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    choose_reasoning_parser,
    choose_tool_parser,
    read_tools,
)
from allspark.serve.parsers.json_texts import is_json_object
from allspark.serve.parsers.reader import Markers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tool_samples import AWKWARD, SYNTAXES, TOOLS

READ_TOOLS = read_tools(TOOLS)
CITY = ("get_weather", {"city": "Paris"})
DAYS = ("get", {"days": 3})
NOW = ("now", {})


def new_parser(syntax=None, reasoning=None, **options) -> MessageParser:
    """Of these names; the ids of its calls are 0, 1, ..."""
    ids = itertools.count()
    return MessageParser(
        choose_tool_parser(None, syntax),
        choose_reasoning_parser(None, reasoning),
        **{"tools": READ_TOOLS, "make_id": lambda: str(next(ids)), **options},
    )


def added(deltas) -> Message:
    """The message that a client of a stream puts together."""
    message = Message()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            message.content += delta.text
        elif isinstance(delta, ReasoningDelta):
            message.reasoning += delta.text
        elif isinstance(delta, ToolCallBegin):
            assert delta.index == len(message.tool_calls)
            message.tool_calls.append(ToolCall(delta.id, delta.name, "", False))
        else:
            assert isinstance(delta, ToolCallArguments) and delta.text
            assert delta.index == len(message.tool_calls) - 1
            message.tool_calls[delta.index].arguments += delta.text
    return message


def in_pieces(pieces, *names, **options) -> Message:
    """The message of an output in these pieces. What was streamed adds up to it."""
    parser = new_parser(*names, **options)
    deltas = [delta for piece in pieces for delta in parser.put(piece)] + parser.flush()
    message = parser.message()
    streamed = added(deltas)
    for mine, call in zip(streamed.tool_calls, message.tool_calls, strict=True):
        mine.is_complete = call.is_complete
    assert streamed == message
    return message


def parse(text, *names, **options) -> Message:
    return new_parser(*names, **options).parse(text)


def calls_of(message: Message):
    """The calls as they were written; all are complete."""
    assert all(call.is_complete for call in message.tool_calls), message
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def every_cut(text):
    return ((text[:i], text[i:]) for i in range(len(text) + 1))


CALLS = {
    "one": [CITY],
    "two": [CITY, DAYS],
    "empty": [NOW],
    "awkward": [("get_weather", AWKWARD), NOW],
    "unknown": [("nobody", {"a": 1, "b": "x", "c": [1, {"d": None}]})],
}
BARE = "llama3-bare"


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_calls(syntax, calls):
    name, write = SYNTAXES[syntax]
    message = parse(write(calls), name)
    assert calls_of(message) == calls
    assert (message.content, message.reasoning) == ("", "")
    assert [call.id for call in message.tool_calls] == [str(i) for i in range(len(calls))]


@pytest.mark.parametrize("syntax", [syntax for syntax in SYNTAXES if syntax != BARE])
def test_text_around_calls(syntax):
    name, write = SYNTAXES[syntax]
    message = parse(f"  I look.\n\n{write([CITY])}\n Done. ", name)
    assert calls_of(message) == [CITY]
    assert message.content == "  I look.\n\n\n Done. "
    assert parse(f"I look.\n\n{write([CITY])}\n", name).content == "I look."
    assert parse(f"\n{write([CITY])}\nDone.", name).content == "Done."


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_reasoning_before_calls(syntax):
    name, write = SYNTAXES[syntax]
    text = f"<think>\nWith {write([DAYS])}?\n</think>\n\n{write([CITY, NOW])}"
    for reasoning, output, options in (
        ("default", text, {}),
        ("default", "\n" + text, {}),
        ("default", text.removeprefix("<think>"), {"begins_in_reasoning": True}),
        ("default", text, {"begins_in_reasoning": True}),
        ("deepseek-v3", text.removeprefix("<think>"), {"enable_thinking": True}),
    ):
        message = parse(output, name, reasoning, **options)
        assert message.reasoning == f"With {write([DAYS])}?"
        assert message.content == ""
        assert calls_of(message) == [CITY, NOW]


OUTPUTS = {
    **{
        syntax: (name, write([("get_weather", {"city": 'a "b" </tool_call>\\ é'}), DAYS]))
        for syntax, (name, write) in SYNTAXES.items()
    },
    "markers": ("qwen", "a <tool_ca <tool_call>\n<tool_call></tool_call> <tool_call b < </tool"),
    "broken": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>\n {"b'),
    "no call": ("qwen", 'x <tool_call> [1, {"a": "b"}, {"name": 3}] </tool_call> y <tool_call>'),
    "early": ("qwen", '<tool_call>{"arguments": {"a": "}"}, "type": [], "name": "f"}</tool_call>'),
    "string": ("qwen", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}'),
    "bare": ("llama3", ' \n {"type": "function", "name": "Bob", "age": 3} and {"name": "now"} '),
    "mixed": ("mistral", ' a [TOOL_CALLS] [] b [TOOL_CALLS]f{"a": 1} [TOOL_CALLS]say what[ARGS]'),
    "id": ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": [1]}[TOOL_CALLS]g[CALL_ID]x'),
    "values": (
        "qwen3coder",
        "<function=f><parameter=a>\n\n x\n\n</parameter><parameter=b>True</parameter></function>"
        "<function=get><parameter=days>\n3\n</parameter>\n junk <parameter=city> <",
    ),
    "glm": ("glm47", "<tool_call>\nls <arg_key>k</arg_key> <arg_value>a\n</arg_value></tool_call>"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_the_message_does_not_depend_on_the_cuts(case):
    name, text = OUTPUTS[case]
    text = f" <think>\n so </thi <tool_call> </think>\n{text}\n"
    whole = in_pieces([text], name, "default")
    assert in_pieces(text, name, "default") == whole == parse(text, name, "default")
    for pieces in every_cut(text):
        assert in_pieces(pieces, name, "default") == whole, pieces


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_more_cuts(data):
    name, text = data.draw(st.sampled_from(list(OUTPUTS.values())))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert in_pieces(pieces, name) == in_pieces([text], name)


PARTS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<|action_start|>", "<|plugin|>",
    "<|action_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n", "```", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<function=", "<parameter=", "</parameter>", "</function>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "<|end|>", "f", ">", "\n",
    " ", '"', "\\", "{", "}", "[", "]", ",", ":", '{"name": "f"', ', "arguments": {', '"a": 1',
    '{"name": "now", "parameters": {}}', "1", "null", "\ud800", "é",
    # Beginnings and ends of markers, between which others may be left out.
    "<tool", "_call>", "</thi", "nk>", "[TOOL_", "CALLS]", "<｜tool▁", "sep｜>", "<|e", "nd|>",
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(sorted({name for name, _ in SYNTAXES.values()})),
    st.lists(st.sampled_from(PARTS), max_size=25),
    st.booleans(),
)
def test_any_text_is_a_message(name, parts, begins):
    options = {"begins_in_reasoning": begins, "left_out": ["<|end|>"]}
    whole = in_pieces(["".join(parts)], name, "default", **options)
    assert in_pieces(parts, name, "default", **options) == whole
    assert in_pieces("".join(parts), name, "default", **options) == whole
    parser = choose_tool_parser(None, name)
    for marker in (*parser.begins, *parser.ends, "<think>", "</think>", "<|end|>"):
        assert marker not in whole.content
    for call in whole.tool_calls:
        assert call.is_complete <= is_json_object(call.arguments)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_cut_off_at_every_position(syntax):
    """A call whose name is there is delivered, with a beginning of its arguments."""
    name, write = SYNTAXES[syntax]
    calls = [("get_weather", {"city": 'a "b" \\ é', "flags": [1, {"x": "}"}]}), DAYS]
    text = write(calls)
    whole = [json.dumps(arguments) for _, arguments in calls]
    given_so_far = 0
    for end in range(len(text)):
        message = in_pieces([text[:end]], name)
        assert len(message.tool_calls) >= given_so_far
        given_so_far = len(message.tool_calls)
        for call, (expected, _), arguments in zip(message.tool_calls, calls, whole, strict=False):
            assert call.name == expected
            if call.is_complete:
                assert json.loads(call.arguments) == json.loads(arguments)
            else:
                assert not is_json_object(call.arguments)
        assert all(call.is_complete for call in message.tool_calls[:-1])
        # What is no call yet comes as it is, without whole markers.
        assert message.content in text[:end]
        parser = choose_tool_parser(None, name)
        assert not any(marker in message.content for marker in (*parser.begins, *parser.ends))
    assert given_so_far == 2


def test_a_call_without_its_name_is_content():
    assert parse('<tool_call>\n{"na', "qwen") == Message('{"na')
    assert parse('<tool_call>\n{"name": "get_we', "qwen").content == '{"name": "get_we'
    assert parse('<tool_call>\n{"arguments": {"a": 1}', "qwen").content == '{"arguments": {"a": 1}'
    assert parse("<tool_call>get_we", "glm47").content == "get_we"
    assert parse("<tool_call>\n<function=get_we", "qwen3coder").content == "get_we"
    assert parse("[TOOL_CALLS]get_we", "mistral").content == "get_we"
    assert parse("<｜tool▁call▁begin｜>get", "deepseek-v3").content == "get"
    assert parse('<tool_call>\n{"city": 1}\n</tool_call>', "qwen").content == '{"city": 1}'


def test_text_that_is_no_marker_comes_back():
    parser = new_parser("qwen")
    assert parser.put("a <tool_") == [ContentDelta("a")]
    assert parser.put("box") == [ContentDelta(" <tool_box")]
    assert parser.put("<tool_call") == []
    assert parser.flush() == [ContentDelta("<tool_call")]
    assert parser.flush() == []
    with pytest.raises(RuntimeError, match="flush"):
        parser.put("more")


def test_arguments_stream_as_they_come():
    parser = new_parser("qwen")
    assert parser.put('<tool_call>\n{"name": "get_weather"') == [
        ToolCallBegin(0, "0", "get_weather")
    ]
    assert parser.put(', "arguments": {"city": "Pa') == [ToolCallArguments(0, '{"city": "Pa')]
    assert parser.put('ris"}') == [ToolCallArguments(0, 'ris"}')]
    assert parser.put("}\n</tool_call>") == []
    parser = new_parser("qwen3coder")
    parser.put("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.put('Pa"') == [ToolCallArguments(0, 'Pa\\"')]
    assert parser.put("ris\n") == [ToolCallArguments(0, "ris")]
    assert parser.put("</parameter>") == [ToolCallArguments(0, '"')]
    assert parser.put("</function>") == [ToolCallArguments(0, "}")]


def test_neighbours_are_one_delta():
    parser = new_parser("qwen", "default")
    deltas = parser.put('<think>a b</think> c d <tool_call>{"name": "now", "arguments": {"a": 1}}')
    assert deltas == [
        ReasoningDelta("a b"), ContentDelta("c d"), ToolCallBegin(0, "0", "now"),
        ToolCallArguments(0, '{"a": 1}'),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (" a \n", " a \n"),
        ("\n\n", "\n\n"),
        ("", ""),
        ("</tool_call>", ""),
        ("a</tool_call>b", "ab"),
        ("a <tool_call> \n </tool_call>\n<tool_call></tool_call>\n b", "a \n b"),
        ("a\n<tool_call>", "a"),
    ],
)
def test_blanks(text, content):
    assert parse(text, "qwen").content == content


def test_blanks_of_reasoning():
    assert parse("<think>\n\n</think>\n\nHi ", None, "default") == Message("Hi ")
    assert parse("\n a", None, "default") == Message("\n a")
    assert parse("<think> a \n", None, "default") == Message("", "a")
    assert parse("a </think> b", None, "default") == Message("a  b")
    assert parse("<think>a</think>b<think>c</think>", None, "default") == Message("b", "a\nc")
    assert parse("<think>a</th", None, "default") == Message("", "a</th")


def test_reasoning_that_is_not_enabled_is_text():
    for flag in (None, False):
        text = "<think>a</think>b"
        assert parse(text, None, "deepseek-v3", enable_thinking=flag) == Message(text)
    message = parse("a</think>b", None, "deepseek-v3", enable_thinking=True)
    assert message == Message("b", "a")
    message = parse("b", None, "deepseek-v3", enable_thinking=True, begins_in_reasoning=False)
    assert message == Message("b")


def test_what_the_prompt_opened():
    parser = choose_reasoning_parser(None, "default")
    assert parser.is_opened_by("<|im_start|>assistant\n<think>\n")
    assert not parser.is_opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not parser.is_opened_by("<|im_start|>assistant\n")


@pytest.mark.parametrize("reasoning", ["", "<think>a</think>", "\n<think> a\n</think>\n\n"])
@pytest.mark.parametrize("name", sorted({name for name, _ in SYNTAXES.values()}))
def test_content_in_a_format_has_no_markers(name, reasoning):
    """Content or calls: once content has begun, markers are text. Without a format they are not."""
    content = '{"a": "<think> </think> <tool_call> [TOOL_CALLS] </tool_call> "}'
    if name == "llama3":
        content = '["<think>"]'  # it begins calls with a brace
    text = reasoning + content
    for pieces in ([text], text, [text[:3], text[3:30], text[30:]]):
        message = in_pieces(pieces, name, "default", content_has_format=True)
        assert message.content == content and message.tool_calls == []
        assert message.reasoning == ("a" if reasoning else "")
    assert new_parser(name, "default").parse(text).content != content
    _, write = next(each for each in SYNTAXES.values() if each[0] == name)
    for pieces in ([reasoning + write([CITY, NOW])], reasoning + write([CITY, NOW])):
        message = in_pieces(pieces, name, "default", content_has_format=True)
        assert [call.name for call in message.tool_calls] == ["get_weather", "now"]
        assert message.content == ""


def test_texts_that_are_left_out():
    end = {"left_out": ["<|im_end|>"]}
    assert parse("Hi<|im_end|>", "qwen", **end) == Message("Hi")
    assert parse("<think>a<|im_end|>", None, "default", **end) == Message("", "a")
    message = parse('<tool_call>\n{"name": "now"}<|im_end|>', "qwen", **end)
    assert calls_of(message) == [NOW] and message.content == ""
    with pytest.raises(ValueError, match="begins another"):
        new_parser("qwen", left_out=["<tool"])


@pytest.mark.parametrize(
    ("body", "arguments", "is_complete"),
    [
        ('{"name": "f"}', "{}", True),
        ('{"name": "f", "arguments": null}', "{}", True),
        ('{"name": "f", "arguments": ""}', "{}", True),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', '{"a": "\\n"}', True),
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}', True),
        ('{"name": "f", "parameters": {"a": 1}, "arguments": {}}', '{"a": 1}', True),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}', True),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}', True),
        ('{"name": "f", "arguments": {"a": 1e400, "b": ' + "9" * 5000 + "}}", None, True),
        ('{"name": "f", "arguments": [1]}', "[1]", False),
        ('{"name": "f", "arguments": 3}', "3", False),
        ('{"name": "f", "arguments": {"a": Paris}}', '{"a": Paris}', False),
        ('{"name": "f", "arguments": {"a": NaN}}', '{"a": NaN}', False),
        ('{"name": "f", "arguments": {"a": 1', '{"a": 1', False),
        ('{"name": "f", "arguments": "{\\"a\\"', '{"a"', False),
        ('{"name": "f", "arguments": "\\u00e', "", False),
        ('{"name": "f", "argu', "", False),
        ('{"name": "f" "arguments": {"a": 1}}', '{"a": 1}', True),
        ('{"name": "f" + "g"}', "", False),
    ],
)
def test_objects_that_are_written_otherwise(body, arguments, is_complete):
    for text in (f"<tool_call>{body}", f"<tool_call>{body}</tool_call>"):
        (call,) = parse(text, "qwen").tool_calls
        if not text.startswith('<tool_call>{"name": "f", "arguments": "\\u'):
            assert call.is_complete == is_complete
        assert call.name == "f"
        if text.endswith("}</tool_call>") and arguments is not None:
            assert call.arguments == arguments


def test_names_of_other_characters():
    (call,) = parse('<tool_call>{"name": "caf\\u00e9 \\"x\\""}</tool_call>', "qwen").tool_calls
    assert call.name == 'café "x"'
    (call,) = parse('<tool_call>{"name": "a\\qb"}</tool_call>', "qwen").tool_calls
    assert call.name == "a\\qb"


def test_several_objects_between_markers():
    text = '<tool_call>\n{"name": "now"}\n{"name": "get", "arguments": {"days": 3}}\n</tool_call>'
    assert calls_of(parse(text, "qwen")) == [NOW, DAYS]
    text = '<tool_call>{"name": "now"}<tool_call>{"name": "get", "arguments": {"days": 3}}'
    assert calls_of(parse(text, "qwen")) == [NOW, DAYS]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": {"name": "now", "parameters": {}}}',
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob"} is an object',
        '{"name": "Bob", "parameters": 3}',
        '{"parameters": {}}',
        "{}",
        "{",
        '{ "na',
        '[{"name": "now"}]',
        'A {"name": "now", "parameters": {}}',
    ],
)
def test_json_that_is_no_bare_call(text):
    assert parse(text, "llama3") == Message(text)


def test_bare_calls():
    assert calls_of(parse(' {"name": "now"}', "llama3")) == [NOW]
    text = '{"type": "function", "name": "nobody", "parameters": {"a": 1}}'
    assert calls_of(parse(text, "llama3")) == [("nobody", {"a": 1})]
    text = '{"parameters": {"a": 1}, "name": "nobody"}'
    assert calls_of(parse(text, "llama3")) == [("nobody", {"a": 1})]
    (call,) = parse('{"name": "now", "para', "llama3").tool_calls
    assert (call.name, call.arguments, call.is_complete) == ("now", "", False)
    message = parse('<|python_tag|>print("x")<|eom_id|>', "llama3")
    assert message == Message('print("x")')


def test_ids_of_the_model():
    text = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]now[ARGS]{}"
    assert [call.id for call in parse(text, "mistral").tool_calls] == ["abcdefghi", "0"]
    # Each is there once, and one that the chat templates refuse is not taken.
    text = "".join(f"[TOOL_CALLS]now[CALL_ID]{id}[ARGS]{{}}" for id in ("abcdefghi",) * 2 + ("x",))
    assert [call.id for call in parse(text, "mistral").tool_calls] == ["abcdefghi", "0", "1"]


def test_ids_that_are_made():
    parser = MessageParser(choose_tool_parser(None, "qwen"))
    first, second = parser.parse(2 * '<tool_call>{"name": "now"}').tool_calls
    assert first.id != second.id and first.id.startswith("chatcmpl-tool-")
    # Mistral's templates take no others.
    parser = MessageParser(choose_tool_parser(None, "mistral"))
    first, second = parser.parse(2 * "[TOOL_CALLS]now[ARGS]{}").tool_calls
    assert first.id != second.id and re.fullmatch("[A-Za-z0-9]{9}", first.id)


TYPED = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "$defs": {"color": {"enum": ["red", "1"]}, "self": {"$ref": "#/$defs/self"}},
                    "type": "object",
                    "properties": {
                        "text": {"type": "string"},
                        "count": {"type": "integer"},
                        "is_it": {"type": "boolean"},
                        "list": {"type": "array"},
                        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "color": {"$ref": "#/$defs/color"},
                        "loop": {"$ref": "#/$defs/self"},
                        "any": {},
                        "one": {"const": 1},
                        "both": {"allOf": [{"type": ["string", "number"]}, {"type": "string"}]},
                    },
                    "additionalProperties": {"type": "string"},
                },
            },
        }
    ]
)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "", ""),
        ("text", " a\n b ", " a\n b "),
        ("text", '"quoted" \\', '"quoted" \\'),
        ("text", "<b>&amp;</b>", "<b>&amp;</b>"),
        ("count", "5", 5),
        ("count", " 5 ", 5),
        ("count", "five", "five"),
        ("count", "[1]", [1]),
        ("is_it", "true", True),
        ("is_it", "False", False),
        ("is_it", "None", "None"),
        ("list", '["a", {"b": 1}]', ["a", {"b": 1}]),
        ("list", "[" * 100_000, "[" * 100_000),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "5", "5"),
        ("color", "1", "1"),
        ("loop", "1", 1),
        ("any", "1", 1),
        ("any", "one", "one"),
        ("any", '"one"', '"one"'),
        ("any", "NaN", "NaN"),
        ("one", "1", 1),
        ("both", "1", "1"),
        ("other", "1", "1"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3coder", "glm47"])
def test_types_of_plain_values(name, key, text, value):
    _, write = SYNTAXES[name]
    message = parse(write([("f", {key: text})]), name, tools=TYPED)
    assert calls_of(message) == [("f", {key: value})]


def test_newlines_of_plain_values():
    values = {"\n\na\n\n": "\na\n", "\n": "", "\n\n": "", "a\n": "a", " a": " a"}
    for text, value in values.items():
        output = f"<function=f><parameter=text>{text}</parameter></function>"
        assert calls_of(parse(output, "qwen3coder", tools=TYPED)) == [("f", {"text": value})]
        output = f"<tool_call>f<arg_key>text</arg_key><arg_value>{text}</arg_value></tool_call>"
        assert calls_of(parse(output, "glm47", tools=TYPED)) == [("f", {"text": text})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3coder", "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>"),
        ("qwen3coder", "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</func"),
        ("glm47", "<tool_call>f<arg_key>text</arg_key><arg_value>a</arg_value>"),
    ],
)
def test_an_end_that_is_missing(name, text):
    """Other arguments might have followed."""
    (call,) = parse(text, name, tools=TYPED).tool_calls
    assert (call.arguments, call.is_complete) == ('{"text": "a"', False)


LENGTH = 200_000
HOSTILE = {
    "text": ("qwen", "a" * LENGTH),
    "blanks": ("qwen", " " * LENGTH),
    "beginnings": ("qwen", "<tool_cal" * (LENGTH // 10)),
    "angles": ("deepseek-v3", "<" * LENGTH),
    "markers": ("qwen", "<tool_call>" * (LENGTH // 10)),
    "ends": ("qwen", "</tool_call>" * (LENGTH // 10)),
    "calls": ("qwen", '<tool_call>{"name": "f"}</tool_call>' * (LENGTH // 33)),
    "thoughts": ("qwen", "<think>a</think>" * (LENGTH // 17)),
    "arguments": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * LENGTH),
    "escapes": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * LENGTH),
    "brackets": ("qwen", '<tool_call>{"name": "f", "arguments": ' + "[" * LENGTH),
    "braces": ("qwen", '<tool_call>{"name": "f", "arguments": ' + "{" * LENGTH),
    "number": ("qwen", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * LENGTH + "}}"),
    "keys": ("qwen", '<tool_call>{"name": "f"' + ', "a": 1' * (LENGTH // 8)),
    "early": ("qwen", '<tool_call>{"arguments": {"a": "' + "x" * LENGTH),
    "name": ("qwen", '<tool_call>{"name": "' + "x" * LENGTH),
    "encoded": ("qwen", '<tool_call>{"name": "f", "arguments": "' + "\\u00e9" * (LENGTH // 6)),
    "bare": ("llama3", '{"name": "Bob", "id": "' + "x" * LENGTH),
    "tags": ("llama3", "<|python_tag|>" * (LENGTH // 14)),
    "list": ("mistral", "[TOOL_CALLS][" + '{"name": "f"}, ' * (LENGTH // 17)),
    "mistral": ("mistral", "[TOOL_CALLS]" * (LENGTH // 12)),
    "deepseek": ("deepseek-v3", "<｜tool▁call▁begin｜>" * (LENGTH // 20)),
    "value": ("qwen3coder", "<function=f><parameter=a>" + "x" * LENGTH),
    "newlines": ("qwen3coder", "<function=get_weather><parameter=city>" + "\n" * LENGTH),
    "parameters": ("qwen3coder", "<function=f>" + "<parameter=a>1</parameter>" * (LENGTH // 33)),
    "typed": ("qwen3coder", "<function=get><parameter=days>" + "[" * LENGTH),
    "glm": ("glm47", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 4000),
    "line": ("glm47", "<tool_call>" + "x" * LENGTH),
}


@pytest.mark.parametrize(
    "text", ["a", '<tool_call>{"name": "f", "arguments": {"a": "'], ids=["content", "arguments"]
)
def test_a_million_single_characters(text):
    def seconds(num_chars: int) -> float:
        begin = time.thread_time()
        parser = new_parser("qwen", "default")
        parser.put(text)
        for _ in range(num_chars):
            parser.put("a")
        parser.flush()
        return time.thread_time() - begin

    # The fourfold if linear, sixteenfold if quadratic.
    assert seconds(1_000_000) < 9 * seconds(250_000) + 0.5


@pytest.mark.parametrize("case", HOSTILE)
def test_long_outputs_take_linear_time(case):
    name, text = HOSTILE[case]
    begin = time.thread_time()
    whole = parse(text, name, "default")
    pieces = in_pieces([text[i : i + 100] for i in range(0, len(text), 100)], name, "default")
    # 0.1 to 0.5 s; the square of the length would take minutes.
    assert time.thread_time() - begin < 10
    assert pieces == whole


def test_markers_are_told_apart():
    for texts in (["a", "ab"], ["<x>", "<x>y"], [""]):
        with pytest.raises(ValueError, match="marker"):
            Markers(*texts)
    assert Markers().growing.search("abc") is None


def test_random_cuts_of_many_calls():
    rng = random.Random(5)
    for syntax, (name, write) in SYNTAXES.items():
        calls = [("get_weather", AWKWARD), DAYS, NOW] * 5
        text = write(calls)
        cuts = sorted(rng.randrange(len(text)) for _ in range(60))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert calls_of(in_pieces(pieces, name)) == calls, syntax
