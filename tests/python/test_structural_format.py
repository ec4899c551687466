"""Structural tags that are trees of texts, schemas and tags."""

from __future__ import annotations

import pytest
from allspark.grammar_compiler import Compiler
from allspark.model_loader.tokenizer import load_tokenizer
from allspark.response_format import to_grammar
from support.vocabularies import tokenizer_directory


@pytest.fixture(scope="module")
def tokenizer():
    """It has <tool_call> and </tool_call> as special tokens."""
    return load_tokenizer(tokenizer_directory("byte_level"))


def accepts(tokenizer, node, text: str) -> bool:
    """Whether the text is a whole output of the format."""
    matcher = Compiler.of(tokenizer).matcher({"type": "structural_tag", "format": node})
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def text(value):
    return {"type": "const_string", "value": value}


def tag(begin, content, end, **fields):
    return {"type": "tag", "begin": begin, "content": content, "end": end, **fields}


ANY = {"type": "any_text"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALLS = [tag("<a>", INTEGER, "</a>"), tag("<b>", text("x"), "</b>")]
# As a tool's marker is in some tokenizers: one token.
TOKENS = [tag("<tool_call>a", INTEGER, "</tool_call>"), tag("<tool_call>b", ANY, "</tool_call>")]


def triggered(tags=CALLS, triggers=("<a>", "<b"), **fields):
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags, **fields}


def separated(tags=CALLS, **fields):
    return {"type": "tags_with_separator", "separator": "; ", "tags": tags, **fields}


@pytest.mark.parametrize(
    ("node", "good", "bad"),
    [
        (text("a \"b\"\n/\\"), ['a "b"\n/\\'], ["", "a"]),
        (text(""), [""], ["a"]),
        (text("\x00\x1f\x7f\u2028"), ["\x00\x1f\x7f\u2028"], [""]),
        (text("<tool_call>a</tool_call>"), ["<tool_call>a</tool_call>"], ["<tool_call>a"]),
        (INTEGER, ["12"], ["", "a", "1.5"]),
        ({"type": "json_schema", "json_schema": True}, ["{}", "3"], ["", "x"]),
        ({"type": "regex", "pattern": r"a/b\/c|\\/|x\d+"}, ["a/b/c", "\\/", "x12"], ["", "x", "a"]),
        ({"type": "regex", "pattern": "a?"}, ["", "a"], ["aa"]),
        (ANY, ["", "a\n<b>"], []),
        ({**ANY, "excludes": ["a/b", "c"]}, ["", "ab /"], ["xa/by", "c"]),
        ({"type": "sequence", "elements": [text("a"), INTEGER]}, ["a1"], ["a", "1", "a1a"]),
        ({"type": "or", "elements": [text("a"), text("ab")]}, ["a", "ab"], ["", "b", "aab"]),
        ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": text("a")}, ["", "aaa"], ["b"]),
        ({"type": "plus", "content": text("a")}, ["a", "aaa"], [""]),
        (tag("<", INTEGER, ">"), ["<1>"], ["<1", "1>", "<>"]),
        (tag("<", ANY, ">"), ["<>", "<a <b>"], ["<a", "<a>b>"]),
        (tag("<", {**ANY, "excludes": ["b"]}, "!>"), ["<a > !>"], ["<b!>", "<a>"]),
        (tag("", ANY, ""), ["", "a"], []),
        (tag("<tool_call>", ANY, "</tool_call>"), ["<tool_call>a\n</tool_call>"], ["<tool_call>a"]),
        # The end is text and a token, or a token and text.
        (
            tag("", ANY, "\n</tool_call>"),
            ["a\n</tool_call>", "\n\n</tool_call>", "a\nb\n</tool_call>"],
            ["a</tool_call>", "a\n", "a\n</tool_call>b"],
        ),
        (tag("", ANY, "</tool_call>\n"), ["a</tool_call>\n"], ["a</tool_call>", "a\n"]),
        (
            triggered(),
            ["", "x", "x<a>1</a>y<b>x</b>z", "<a", "<b>x</b><a>1</a>"],
            ["<a>", "<a>x</a>", "<b", "<bc", "x<a>1</a><b>y</b>"],
        ),
        (triggered(stop_after_first=True), ["", "x<a>1</a>"], ["<a>1</a>x", "<a>1</a><b>x</b>"]),
        (
            triggered(at_least_one=True),
            ["<a>1</a>", "<a>1</a>y<b>x</b>z"],
            ["", "x", "x<a>1</a>", "<a>1</a><a>"],
        ),
        (
            triggered(at_least_one=True, stop_after_first=True),
            ["<a>1</a>", "<b>x</b>"],
            ["", "x<a>1</a>", "<a>1</a>x"],
        ),
        (triggered(excludes=["no/"]), ["x<a>1</a>no"], ["xno/", "x<a>1</a>no/", "no/<a>1</a>"]),
        (
            triggered(begins_without=["{", "[x"]),
            ["", "a{", "[", "a{<a>1</a>{"],
            ["{", " \n{", "[x", "{<a>1</a>"],
        ),
        (
            triggered(TOKENS, ["<tool_call>"]),
            ["", "x<tool_call>a1</tool_call>y<tool_call>b<a></tool_call>", "<tool_call"],
            ["<tool_call>", "<tool_call>c", "<tool_call>b", "</tool_call>"],
        ),
        (
            triggered(TOKENS, ["<tool_call>"], at_least_one=True),
            ["<tool_call>a1</tool_call>y"],
            ["", "x<tool_call>a1</tool_call>"],
        ),
        (separated(), ["", "<a>1</a>", "<a>1</a>; <b>x</b>; <a>2</a>"], ["x", "<a>1</a>; "]),
        (separated(at_least_one=True), ["<a>1</a>", "<a>1</a>; <b>x</b>"], [""]),
        (separated(stop_after_first=True), ["", "<a>1</a>"], ["<a>1</a>; <b>x</b>"]),
        (separated(stop_after_first=True, at_least_one=True), ["<a>1</a>"], [""]),
        ({**separated(), "separator": ""}, ["<a>1</a><b>x</b>"], ["<a>1</a>; <b>x</b>"]),
    ],
)  # fmt: skip
def test_formats(tokenizer, node, good, bad):
    for output in good:
        assert accepts(tokenizer, node, output), output
    for output in bad:
        assert not accepts(tokenizer, node, output), output


def test_a_special_token_is_not_spelt(tokenizer):
    """Its characters, in other tokens, would pass for it."""
    node = {"type": "structural_tag", "format": triggered(TOKENS, ["<tool_call>"])}
    ids = [token for char in "<tool_call>" for token in tokenizer.encode(char)]
    assert tokenizer.decode(ids) == "<tool_call>" and len(ids) > 1
    assert Compiler.of(tokenizer).matcher(node).try_consume_tokens(ids) == len(ids) - 1


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (None, ["'format'", "None", "'const_string'"]),
        ({"type": "token"}, ["'token'", "'any_text'"]),
        ({"type": []}, ["'format'", "[]"]),
        ({"type": "const_string"}, ["lacks 'value'"]),
        ({"type": "const_string", "value": 3}, ["format.value", "str"]),
        ({**ANY, "max_tokens": 3}, ["'max_tokens'"]),
        ({**ANY, "excludes": "a"}, ["format.excludes"]),
        ({**ANY, "excludes": [""]}, ["format.excludes"]),
        ({"type": "sequence", "elements": []}, ["format.elements", "empty"]),
        ({"type": "or", "elements": [ANY, {"type": 3}]}, ["'format.elements[1]'", "3"]),
        ({"type": "star", "content": 3}, ["'format.content'"]),
        (tag("a", ANY, None), ["format.end"]),
        (tag("a", {**ANY, "excludes": 3}, "b"), ["format.content.excludes"]),
        (triggered([]), ["format.tags"]),
        (triggered([ANY]), ["format.tags[0]", "'tag'"]),
        (triggered([tag("c", ANY, "d")]), ["format.tags[0]", "'c'", "no trigger"]),
        (triggered([tag("<a>", ANY, "d", x=1)]), ["'format.tags[0]'", "'x'"]),
        (triggered(CALLS[:1]), ["have one another"]),
        (triggered(at_least_one=1), ["format.at_least_one", "true or false"]),
        (separated([]), ["format.tags"]),
        ({"type": "regex", "pattern": "(?=a)"}, ["look-around"]),
        (
            {"type": "json_schema", "json_schema": {"not": {}}},
            ["not"],
        ),
        (
            {"type": "star", "content": {"type": "json_schema", "json_schema": 3}},
            ["format.content.json_schema", "int"],
        ),
        (
            {"type": "json_schema", "json_schema": {"items": {"oneOf": [{}, {}]}}},
            ["format.json_schema#/items/oneOf", "may overlap"],
        ),
    ],
)  # fmt: skip
def test_formats_that_are_refused(tokenizer, node, words):
    with pytest.raises((ValueError, TypeError)) as error:
        Compiler.of(tokenizer).matcher({"type": "structural_tag", "format": node})
    assert all(word in str(error.value) for word in words), error.value


def test_one_form_of_tags(tokenizer):
    with pytest.raises(ValueError, match="both 'format' and 'triggers'"):
        to_grammar({"type": "structural_tag", "format": ANY, "triggers": ["a"]}, {})
    node = {"type": "json_schema", "json_schema": {"oneOf": [{}, {}]}}
    form = {"type": "structural_tag", "format": node, "oneOf": "anyOf"}
    assert Compiler.of(tokenizer).matcher(form)


def test_deep_formats_are_refused(tokenizer):
    node = ANY
    for _ in range(1000):
        node = {"type": "star", "content": node}
    with pytest.raises(ValueError, match="levels deep"):
        Compiler.of(tokenizer).matcher({"type": "structural_tag", "format": node})


def test_a_check_keeps_nothing(tokenizer):
    compiler = Compiler(tokenizer)
    compiler.check({"type": "structural_tag", "format": ANY})
    assert not compiler._compiled
    with pytest.raises(ValueError, match="not"):
        compiler.check({"type": "json_schema", "json_schema": {"not": {}}})
    with pytest.raises(ValueError, match="levels deep"):
        compiler.check({"type": "json_schema", "json_schema": _nested(200)})


def _nested(depth):
    value: dict = {}
    for _ in range(depth):
        value = {"not": value}
    return value
