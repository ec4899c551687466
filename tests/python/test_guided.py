"""Guided decoding from end to end: random weights, high temperature, a small vocabulary and, if the
shared data exists, a real one.

Whatever the weights are, an output that ends by itself matches its format, and an output that is
cut is the beginning of such a text.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from allspark import AsStatus, grammar_compiler
from allspark import guided as guided_module
from allspark.grammar_compiler import Compiler
from allspark.guided import GuidedDecoding
from allspark.json_schema import MAX_DEPTH
from allspark.model_loader.tokenizer import load_tokenizer
from engine_fixture import read_all
from guided_fixture import OK, PROMPT, Guided, second_engine, start_guided
from support.checkpoints import shared_data
from support.versions import is_before
from support.vocabularies import DATA, SMALL, tokenizer_directory
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE


@pytest.fixture(scope="module", params=["byte_level", "qwen2.5"])
def guided(request, tmp_path_factory):
    guided = start_guided(tmp_path_factory.mktemp("guided"), request.param)
    yield guided
    guided.engine.stop_model("m")


# With a vocabulary of real size, from the shared data.
qwen = pytest.mark.parametrize("guided", ["qwen2.5"], indirect=True)
small = pytest.mark.parametrize("guided", ["byte_level"], indirect=True)


SEEDS = range(6)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        {"type": "json_schema", "json_schema": {"schema": PERSON, "strict": True, "name": "p"}},
        {"type": "json_schema", "json_schema": PERSON},
        {"type": "json_schema", "json_schema": json.dumps(PERSON)},
        {"type": "json_object", "json_schema": json.dumps(PERSON)},
    ],
    ids=["lmdeploy", "strict", "bare", "text", "dashinfer"],
)
def test_every_form_of_a_schema_is_the_same_schema(guided, form):
    for seed in SEEDS:
        ids, text, reason = guided.run(form, seed=seed, max_new_tokens=300)
        assert reason == "stop" and ids[-1] == guided.eos
        jsonschema.validate(json.loads(text), PERSON)


def test_blanks_are_few_or_none(guided):
    texts = {}
    for flexible in (True, False):
        schema = {**PERSON, "x-guidance": {"whitespace_flexible": flexible}}
        form = {"type": "json_schema", "json_schema": schema}
        texts[flexible] = [guided.run(form, seed=seed, max_new_tokens=300)[1] for seed in SEEDS]
    assert all(max(map(len, re.findall(r"\s+", text))) <= 32 for text in texts[True])
    assert not any(re.search(r"\s", text) for text in texts[False])


def test_json_object(guided):
    for seed in SEEDS:
        _, text, reason = guided.run({"type": "json_object"}, seed=seed)
        assert text.startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "regex", [r"call me [A-Za-z]{1,10}", r"\d{3}-\d{4}", r"(ab|c)*d", r"[^a]é?.", r"^x+$"]
)
@pytest.mark.parametrize("key", ["regex", "regex_schema"])
def test_regex_outputs_match_in_full(guided, regex, key):
    for seed in SEEDS:
        _, text, reason = guided.run({"type": key, key: regex}, seed=seed, max_new_tokens=200)
        assert reason == "stop"
        # The compiler knows the digits of a newer Unicode than Python may know.
        assert re.fullmatch(regex.replace(r"\d", r"(\d|[^\x00-\x7f])"), text), text


@small
def test_classes_are_unicode_s_in_expressions_and_ascii_s_in_schemas(guided):
    for regex, text in (("\\d", "\u0663"), ("\\w", "é")):
        matcher = guided.compiler.matcher({"type": "regex", "regex": regex})
        assert guided.accepts(matcher, text)
        schema = {"type": "string", "pattern": f"^{regex}$"}
        matcher = guided.compiler.matcher({"type": "json_schema", "json_schema": schema})
        assert guided.accepts(matcher, '"1"') and not guided.accepts(matcher, f'"{text}"')


def test_choice_gives_each_of_them(guided):
    choices = ["yes", "yes, but", "néin ☃", 'a "quoted" one', "back\\slash\nline"]
    texts = [
        guided.run({"type": "choice", "choice": choices}, seed=seed, temperature=20.0)[1]
        for seed in range(40)
    ]
    assert set(texts) <= set(choices)
    assert len(set(texts)) >= 3


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "(" root ")" | [0-9]', 'start: "(" start ")" | DIGIT\nDIGIT: /[0-9]/'],
    ids=["ebnf", "lark"],
)
def test_grammar(guided, grammar):
    for seed in SEEDS:
        _, text, reason = guided.run({"type": "grammar", "grammar": grammar}, seed=seed)
        digit = text.strip("()")
        if reason == "stop":
            assert len(digit) == 1 and text == "(" * text.count("(") + digit + ")" * text.count("(")
        else:
            assert re.fullmatch(r"\(+", text)


@small
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "\u00e9\U0001F600\u0041"', ["é😀A"], ["é"]),
        (r'root ::= "\u0022\u005c\"\\"', ['"\\"\\'], []),
        (r'root ::= "\[\]" "[]"', ["[][]"], []),
        (r"root ::= [\u00e9\[\]\u005d\u002d\U00000078]", ["é", "[", "]", "-", "x"], ["u", "y"]),
        (r"root ::= [^\u00e8-\u00ea]", ["z", "ë"], ["é"]),
        ('root ::= ("a" # " [ \\q\n "b" | x) # \\u0\nx ::= "\\u0063"', ["ab", "c"], ["a"]),
        ('start: "\\u00e9" | "::="', ["é", "::="], []),
    ],
)  # fmt: skip
def test_escapes_of_ebnf(guided, grammar, good, bad):
    matcher = guided.compiler.matcher({"type": "grammar", "grammar": grammar})
    for text in good:
        assert guided.accepts(matcher, text), text
    for text in bad:
        assert not guided.accepts(matcher, text), text


TAGS = {
    "type": "structural_tag",
    "triggers": ["<tool_call>", "#f"],
    "structures": [
        {"begin": "<tool_call>", "schema": {"type": "boolean"}, "end": "</tool_call>"},
        {"begin": "#f1 ", "schema": {"enum": ["one"]}, "end": ";"},
        {"begin": "#f2 ", "schema": {"type": "integer"}, "end": ";"},
    ],
}


def test_structural_tags_bind_what_follows_a_trigger(guided):
    matcher = guided.compiler.matcher(TAGS)
    encode = guided.tokenizer.encode

    def accepts(text: str) -> bool:
        ids = encode(text, add_special_tokens=False)
        return matcher.deep_copy().try_consume_tokens(ids) == len(ids)

    assert accepts('free <text> <tool_call>true</tool_call> more #f1 "one"; #f2 12; end')
    for bad in ("<tool_call>1", "a #f3", '#f1 "two"', "#f2 1</tool_call>"):
        assert not accepts(bad), bad
    # A trigger that occurs in free text of this model: its first letter.
    trigger = re.search("[A-Za-z]", guided.run(None)[1])[0]
    structures = [
        {"begin": f"{trigger}1 ", "schema": {"enum": [False]}, "end": ";"},
        {"begin": f"{trigger}2 ", "schema": {"type": "integer"}, "end": ";"},
    ]
    form = {"type": "structural_tag", "triggers": [trigger], "structures": structures}
    found = 0
    for seed in SEEDS:
        text = guided.run(form, seed=seed, max_new_tokens=200)[1].replace("false", "F")
        tails = text.split(trigger)[1:]
        found += len(tails)
        for tail in tails[:-1]:  # the last may be cut
            assert re.match(r"1 F;|2 -?\d+;", tail), tail
    assert found > 20


def walk(compiler: Compiler, form: Any, rng: np.random.Generator) -> list[int]:
    """Ids of a random walk through the masks, to the first end."""
    matcher, ids = compiler.matcher(form), []
    while not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        ids.append(int(rng.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    return ids


def skip_if_unreadable(name: str) -> None:
    if name == "characters" and is_before("transformers", 5):
        pytest.skip("transformers 4 converts no SentencePiece model of characters")


def load_copy(name: str, directory):
    directory = shutil.copytree(tokenizer_directory(name), directory / name)
    if not (directory / "tokenizer_config.json").exists():
        config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    "name", [*SMALL, "gpt2", "chatglm3", "mistral-v3", "internlm2", "stories260K"]
)
def test_tokenizers_of_other_kinds(name, tmp_path):
    """Random walks through the masks decode to full matches: byte-level BPE and SentencePiece."""
    skip_if_unreadable(name)
    tokenizer = load_copy(name, tmp_path)
    compiler = Compiler.of(tokenizer)
    # Some have no token for a snowman: then it is never allowed.
    regex = r'\{"[a-zé☃ ]{0,12}": \[[0-9]{1,3}\]\}'
    rng = np.random.default_rng(7)
    for _ in range(10):
        ids = walk(compiler, {"type": "regex", "regex": regex}, rng)
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=True)
        assert re.fullmatch(regex, text), text


class Odd:
    """The minimum of a tokenizer for guided decoding: one token, and ways to write and read it."""

    eos_token_id = 0
    added_tokens_decoder: dict = {}

    def __init__(self, vocabulary: dict, decoder=None):
        self.backend_tokenizer = Tokenizer(BPE(vocabulary, []))
        if decoder is not None:
            self.backend_tokenizer.decoder = decoder

    def encode(self, text, add_special_tokens):
        return [token for letter in text for token in self.written(letter)]

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(map(self.read, ids))


def test_a_tokenizer_that_the_compiler_misreads_is_refused():
    class Upper(Odd):
        def written(self, letter):
            return [1]

        def read(self, token):
            return "a"

    with pytest.raises(ValueError, match="otherwise"):
        Compiler.of(Upper({"</s>": 0, "A": 1}, ByteLevel()))
    with pytest.raises(ValueError, match="cannot read this Upper: .*decoder"):
        Compiler.of(Upper({"</s>": 0, "A": 1}))
    with pytest.raises(ValueError, match="fast tokenizer.*object"):
        Compiler.of(type("object", (), {})())


def test_a_vocabulary_need_not_have_every_character():
    class Digits(Odd):
        def written(self, letter):
            return [1 + int(letter)] if letter.isdigit() else []

        def read(self, token):
            return str(token - 1)

    digits = Digits({"</s>": 0, **{str(digit): 1 + digit for digit in range(10)}}, ByteLevel())
    form = {"type": "regex", "regex": "[0-9a-f]{5}"}
    ids = walk(Compiler.of(digits), form, np.random.default_rng(7))
    assert re.fullmatch("[0-9]{5}", "".join(map(digits.read, ids)))

    class Mute(Odd):
        def written(self, letter):
            return []

    with pytest.raises(ValueError, match="this Mute has a token for none of 'a"):
        Compiler.of(Mute({"</s>": 0, "\u732b": 1}, ByteLevel()))


def test_a_character_that_the_vocabulary_lacks_ends_in_an_error(tmp_path):
    skip_if_unreadable("characters")
    guided = start_guided(tmp_path, "characters")
    _, text, reason = guided.run({"type": "regex", "regex": "[0-9]{3}(☃|[a-c])"})
    assert reason == "stop" and re.fullmatch("[0-9]{3}[a-c]", text)
    status, _, queue = guided.start({"type": "regex", "regex": "[0-9]{3}☃"})
    assert status == OK and len(read_all(queue)) == 3
    assert queue.finish_reason == "error"
    assert "no token of the vocabulary can follow" in queue.error


def test_text_and_none_are_not_guided(guided):
    free = guided.run(None)
    assert guided.run({"type": "text"}) == free
    builder = guided.loader.create_reference_generation_config_builder()
    built = builder.response_format({"type": "choice", "choice": ["ab"]}).build()
    status, _, queue = guided.engine.start_request_text("m", guided.loader, PROMPT, built)
    assert status == OK
    assert guided.tokenizer.decode(read_all(queue), skip_special_tokens=True) == "ab"


def test_without_eos_a_complete_output_ends_by_itself(guided):
    form = {"type": "regex", "regex": "[ab]{4}"}
    for settings in ({"eos_token_id": -1}, {"early_stopping": False}, {"ignore_eos": True}):
        ids, text, reason = guided.run(form, **settings)
        assert reason == "stop" and guided.eos not in ids
        assert re.fullmatch("[ab]{4}", text)
        for empty in ({"type": "choice", "choice": [""]}, {"type": "regex", "regex": ""}):
            assert guided.run(empty, **settings) == ([], "", "stop")


def test_a_special_stop_word_ends_like_eos_and_others_follow_the_grammar(guided):
    im_start = guided.tokenizer.convert_tokens_to_ids("<|im_start|>")
    form = {"type": "regex", "regex": "[ab]{4}"}
    for stop in ({"stop_words_ids": [[im_start]]}, {"stop_token_ids": [im_start]}):
        ids, _, reason = guided.run(form, eos_token_id=-1, **stop)
        assert reason == "stop" and ids[-1] == im_start
    (a,) = guided.tokenizer.encode("a")
    ends = []
    for seed in SEEDS:
        ids, text, reason = guided.run(form, seed=seed, temperature=20.0, stop_words_ids=[[a]])
        assert reason == "stop" and a not in ids[:-1]
        ends.append(ids[-1])
        # Other tokens may contain the letter, too.
        assert re.fullmatch("[ab]{1,4}" if ids[-1] == a else "[ab]{4}", text)
    assert a in ends


def test_a_stop_token_with_a_text_ends_like_eos(guided):
    (a,) = guided.tokenizer.encode("a")
    form = {"type": "regex", "regex": "[ab]{4}"}
    for seed in SEEDS:
        ids, text, reason = guided.run(form, seed=seed, eos_token_id=-1, stop_token_ids=[a])
        assert reason == "stop" and ids[-1] == a and a not in ids[:-1]
        assert re.fullmatch("[ab]{4}a", text)
    status, _, queue = guided.start({"type": "regex", "regex": "a"}, stop_token_ids=[a])
    assert status == OK and read_all(queue) == []
    assert "no token that the mask allows" in queue.error
    for token in (2**31, -1, 2**40):
        assert f"stop_token_ids[0] is {token}; " in guided.refusal(form, stop_token_ids=[token])


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("json", ["response_format is a str"]),
        ({}, ["type None", "'json_schema'"]),
        ({"type": "xml"}, ["'xml'", "'regex'"]),
        ({"type": "json_object", "schema": {}}, ["'schema'", "'json_schema'"]),
        ({"type": "json_schema"}, ["lacks 'json_schema'"]),
        ({"type": "json_schema", "json_schema": 7}, ["int"]),
        ({"type": "json_schema", "json_schema": "{"}, ["not JSON"]),
        ({"type": "json_schema", "json_schema": {"type": "zebra"}}, ["zebra"]),
        ({"type": "json_schema", "json_schema": False}, ["bool"]),
        ({"type": "json_schema", "json_schema": {"not": {}}}, ["not"]),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, ["uniqueItems"]),
        (
            {"type": "json_schema", "json_schema": {"items": {"oneOf": [{}, {}]}}},
            ["json_schema#/items/oneOf", "may overlap", "'oneOf': 'anyOf' in the response_format"],
        ),
        (
            {"type": "json_schema", "json_schema": {}, "oneOf": "all"},
            ["'oneOf' is 'all'", "'anyOf'"],
        ),
        ({"type": "regex", "regex": "a", "oneOf": "anyOf"}, ["'oneOf'", "its keys are"]),
        (
            {"type": "grammar", "grammar": 'start: %json {"oneOf": [{}, {}]}'},
            ["may overlap", "write anyOf"],
        ),
        (
            {
                "type": "structural_tag", "triggers": ["#"],
                "structures": [{"begin": "#", "schema": {"oneOf": [{}, {}]}, "end": ""}],
            },
            ["structures[0].schema#/oneOf"],
        ),
        ({"type": "grammar", "grammar": 'start: "a"' + " " * 1_000_000}, ["characters", "1000000"]),
        (
            {"type": "json_schema", "json_schema": {"not": {}, "x-guidance": {"lenient": True}}},
            ["not"],
        ),
        # The compiler would overflow its stack.
        (
            {"type": "json_schema", "json_schema": {"items": {"enum": [1, {"a": -(2**63)}]}}},
            ["-9223372036854775808 at #/items/enum/1/a", "must be above -9223372036854775296"],
        ),
        (
            {"type": "json_schema", "json_schema": {"minimum": -1e26, "maximum": -1e25}},
            ["-1e+26 at #/minimum"],
        ),
        (
            {"type": "grammar", "grammar": 'start: %json {"const": -9223372036854775807}'},
            ["-9223372036854775807 beside %json", "must be above -9223372036854775296"],
        ),
        ({"type": "json_schema", "json_schema": {"x-guidance": 3}}, ["x-guidance"]),
        (
            {"type": "json_schema", "json_schema": {"x-guidance": {"foo": 1}}},
            ["unknown field `foo`, expected one of `item_separator`"],
        ),
        (
            {"type": "json_schema", "json_schema": {"minProperties": 2}},
            ["'json_schema': the schema has 2 at #/minProperties"],
        ),
        ({"type": "json_schema", "json_schema": {"const": {1}}}, ["JSON"]),
        ({"type": "regex", "regex": "(a"}, ["unclosed"]),
        ({"type": "regex", "regex": "(?=a)b"}, ["look-around"]),
        ({"type": "regex", "regex_schema": "a"}, ["regex_schema"]),
        ({"type": "choice", "choice": []}, ["empty"]),
        ({"type": "choice", "choice": ["a", 1]}, ["int"]),
        ({"type": "choice", "choice": "ab"}, ["list"]),
        ({"type": "grammar", "grammar": "start: nothing"}, ["nothing"]),
        ({"type": "grammar", "grammar": "root ::= nothing"}, ["nothing"]),
        ({"type": "grammar", "grammar": r'root ::= "\ud83d"'}, ["cannot be enforced"]),
        ({**TAGS, "triggers": []}, ["no trigger"]),
        ({**TAGS, "triggers": ["<tool_call>"]}, ["#f1"]),
        ({**TAGS, "structures": []}, ["one another"]),
        ({**TAGS, "structures": [{"begin": "#f"}]}, ["structures[0]", "schema"]),
    ],
)
def test_what_cannot_be_served_is_refused(guided, form, words):
    message = guided.refusal(form)
    for word in words:
        assert word in message, message
    assert guided.engine.get_as_engine_stat("m").pending_request == 0


def nested(depth: int) -> dict:
    """A schema of this many nested objects."""
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@small
def test_schemas_are_nested_to_a_bound(guided):
    bound = [f"{MAX_DEPTH + 1} levels deep or more", f"the bound is {MAX_DEPTH}"]
    endless: list = []
    endless.append(endless)
    too_deep = nested(MAX_DEPTH + 1)
    for schema in (
        too_deep, json.dumps(too_deep), nested(100_000), {"enum": endless},
        '{"not":' * 80_000 + "{}" + "}" * 80_000, "[" * 100_000,
    ):  # fmt: skip
        message = guided.refusal({"type": "json_schema", "json_schema": schema})
        assert all(word in message for word in bound), message
    # Up to the bound the compiler itself reads it, and gives its own message.
    message = guided.refusal({"type": "json_schema", "json_schema": json.dumps(nested(MAX_DEPTH))})
    assert '["not"]' in message


HOSTILE = """
import json, sys
from allspark.grammar_compiler import Compiler
from allspark.model_loader.tokenizer import load_tokenizer
from pathlib import Path

compiler = Compiler.of(load_tokenizer(Path(sys.argv[1])))
share = float(sys.argv[2])  # of what the bound on characters allows

def outcome(form):
    try:
        compiler.matcher(form)
    except ValueError as error:
        return str(error)
    return "taken"

def chain(next_one, most):
    count = int(share * most)
    defs = {str(i): next_one({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(count): {"type": "string"}}}

for schema in (
    chain(lambda ref: ref, 25_000),
    chain(lambda ref: {"type": "object", "properties": {"": ref}, "required": [""]}, 10_000),
    chain(lambda ref: {"oneOf": [ref]}, 20_000),
    chain(lambda ref: {"allOf": [ref, {}]}, 20_000),
):
    print(outcome({"type": "json_schema", "json_schema": schema})[:200])
rules = [f"a{i}: a{i + 1} a{i + 1}" for i in range(int(share * 40_000))]
grammar = "\\n".join(["start: a0", *rules, f'a{len(rules)}: "x"'])
print(outcome({"type": "grammar", "grammar": grammar})[:200])
print("alive")
"""


@pytest.mark.parametrize("share", ["0.2", pytest.param("1", marks=pytest.mark.slow)])
def test_chains_of_references_end_no_process(share):
    """The compiler follows such chains by recursion; a tenth of a share overflows a usual stack."""
    command = [sys.executable, "-c", HOSTILE, str(tokenizer_directory("byte_level")), share]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"ended by {result.returncode}: {result.stderr}"
    lines = result.stdout.splitlines()
    assert lines[-1] == "alive" and len(lines) == 6
    for line in lines[:-1]:
        assert line == "taken" or line.startswith("response_format cannot be enforced: "), line


def test_a_tokenizer_is_needed(guided):
    config = {"response_format": {"type": "json_object"}}
    status, _, _ = guided.engine.start_request_ids("m", None, [1], config)
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert "tokenizer" in guided.engine.last_error()


@small
def test_sequences_of_a_request_share_what_their_format_takes(guided, monkeypatch):
    form = {"type": "regex", "regex": "[a-z]{9}[0-9]{9}"}
    alone = [guided.run(form, seed=seed)[0] for seed in range(3, 6)]
    bounded_key, keys = grammar_compiler._bounded_key, []

    def note(response_format):
        keys.append(bounded_key(response_format))
        return keys[-1]

    monkeypatch.setattr(grammar_compiler, "_bounded_key", note)
    status, _, queues = guided.start(form, n=3)
    assert status == OK and len(keys) == 1
    assert [read_all(queue) for queue in queues] == alone
    assert len({*map(tuple, alone)}) == 3


def test_neighbours_change_no_token(guided):
    forms: list[Any] = [
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": PERSON},
        {"type": "regex", "regex": "[a-f0-9]{40}"},
    ]
    alone = [guided.run(form, seed=seed)[0] for seed in range(6) for form in forms]
    started = [guided.start(form, seed=seed) for seed in range(6) for form in forms]
    assert all(status == OK for status, _, _ in started)
    assert [read_all(queue) for _, _, queue in started] == alone


def make_few_masks(monkeypatch):
    """Afterwards a request that is alone has some tokens, and then waits until it is stopped."""
    answer, left = guided_module._answer, iter(range(3))

    def answer_some(*arguments):
        if next(left, None) is not None:
            answer(*arguments)

    monkeypatch.setattr(guided_module, "_answer", answer_some)


def test_stop_in_the_middle(guided, monkeypatch):
    form = {"type": "regex", "regex": "[a-f0-9]{400}"}
    for _ in range(5):
        with monkeypatch.context() as patch:
            make_few_masks(patch)
            _, handle, queue = guided.start(form, max_new_tokens=400)
            assert queue.Get() is not None
            assert guided.engine.stop_request("m", handle) == OK
            read_all(queue)
            assert queue.finish_reason == "cancelled"
    assert guided.run({"type": "choice", "choice": ["a"]})[1] == "a"


def break_executor(monkeypatch, hang=None):
    class BrokenExecutor:
        def __init__(self, num_threads):
            pass

        def unsafe_compute_mask_ptr(self, matchers, *_):
            if hang is not None:
                hang.wait()
            raise RuntimeError("the executor is broken")

    monkeypatch.setattr(llguidance, "LLExecutor", BrokenExecutor)


def test_a_failing_provider_ends_its_requests_alone(guided, monkeypatch):
    break_executor(monkeypatch)
    engine = second_engine(guided)
    free = engine.start_request_text("m", guided.loader, PROMPT, {"max_new_tokens": 50, "seed": 1})
    config = {"response_format": {"type": "json_object"}}
    status, _, queue = engine.start_request_text("m", guided.loader, PROMPT, config)
    assert status == OK
    assert read_all(queue) == []
    assert queue.finish_reason == "error"
    assert "RuntimeError: the executor is broken" in queue.error
    assert len(read_all(free[2])) == 50


def test_a_hanging_provider_hangs_nobody(guided, monkeypatch):
    hang = threading.Event()
    break_executor(monkeypatch, hang)
    engine = second_engine(guided)
    config = {"response_format": {"type": "json_object"}}
    _, _, queue = engine.start_request_text("m", guided.loader, PROMPT, config)
    assert queue.GetWithTimeout(100) is None
    assert engine.stop_model("m") == OK
    assert queue.finish_reason == "cancelled"
    assert engine.start_model("m") == OK
    status, handle, queue = engine.start_request_text("m", guided.loader, PROMPT, config)
    assert queue.GetWithTimeout(50) is None
    assert engine.stop_request("m", handle) == OK
    assert engine.sync_request("m", handle, timeout_ms=60000) == OK
    hang.set()


def test_the_thread_ends_with_its_engine(guided, monkeypatch):
    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "allspark-guided"}

    before = threads()
    engine = second_engine(guided)
    assert threads() <= before, "an engine without guided requests has no such thread"
    make_few_masks(monkeypatch)
    config = {"response_format": {"type": "regex", "regex": "[ab]{400}"}, "max_new_tokens": 400}
    _, _, queue = engine.start_request_text("m", guided.loader, PROMPT, config)
    assert queue.Get() is not None
    (thread,) = threads() - before
    del engine
    thread.join(60)
    assert not thread.is_alive()
    read_all(queue)
    assert queue.finish_reason == "cancelled"


def test_the_thread_that_closes_is_not_waited_for():
    decoding = GuidedDecoding()
    slow = decoding._slow_thread
    decoding._slow_thread = threading.current_thread()  # the garbage collector runs on any
    decoding.close()
    for thread in (slow, decoding._thread):
        thread.join(60)
        assert not thread.is_alive()


# -- schemas and documents ---------------------------------------------------------------------

SCHEMAS = json.loads((DATA / "schemas.json").read_text())


def validator_of(schema: Any):
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)


@small
@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case["what"])
def test_documents_are_taken_where_they_are_valid(guided, case):
    form = {"type": "json_schema", "json_schema": {"schema": case["schema"]}}
    if "refused" in case:
        assert case["refused"] in guided.refusal(form)
        return
    matcher = guided.compiler.matcher(form)
    validator = validator_of(case["schema"])
    for document in case["valid"]:
        assert guided.accepts(matcher, json.dumps(document, ensure_ascii=False)), document
        assert validator.is_valid(document), f"no valid document: {document}"
    for document in case["invalid"]:
        assert not guided.accepts(matcher, json.dumps(document, ensure_ascii=False)), document
        # For the validator formats are only annotations.
        if "format" not in json.dumps(case["schema"]):
            assert not validator.is_valid(document), f"a valid document: {document}"


@small
def test_outputs_are_valid_for_their_schemas(guided):
    schemas = [(case["what"], case["schema"]) for case in SCHEMAS]
    ended, cut, refused = check_schemas(guided, schemas, max_new_tokens=200)
    assert refused == sum("refused" in case for case in SCHEMAS)
    assert ended > 35 and cut > 0


@small
def test_a_one_of_is_any_of_where_the_request_says_so(guided):
    schema = {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "multipleOf": 2}]}
    for form in (
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_object", "json_schema": schema},
        {
            "type": "structural_tag", "triggers": ["#"],
            "structures": [{"begin": "#", "schema": schema, "end": ""}],
        },
    ):  # fmt: skip
        assert "may overlap" in guided.refusal(form)
        matcher = guided.compiler.matcher({**form, "oneOf": "anyOf"})
        mark = "#" if form["type"] == "structural_tag" else ""
        assert all(guided.accepts(matcher, mark + text) for text in ("5", "2", "6"))
        assert not guided.accepts(matcher, mark + "3")


# -- public schemas ----------------------------------------------------------------------------


def suite_cases() -> Iterable[tuple[str, Any, list[dict]]]:
    """The JSON Schema test suite's schemas, each with its draft, and their tests."""
    folder = shared_data() / "json" / "JSON-Schema-Test-Suite"
    for draft, uri in (
        ("draft7", "http://json-schema.org/draft-07/schema#"),
        ("draft2020-12", "https://json-schema.org/draft/2020-12/schema"),
    ):
        for path in sorted((folder / draft).rglob("*.json")):
            for case in json.loads(path.read_text()):
                schema = case["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": uri, **schema}
                name = f"{path.relative_to(folder)}: {case['description']}"
                yield name, schema, case["tests"]


def suite_schemas() -> Iterable[tuple[str, Any]]:
    return ((name, schema) for name, schema, _ in suite_cases())


# Type names in the function-calling schemas that JSON Schema does not have.
_BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


def _standard(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_standard(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _standard(value) for key, value in schema.items()}
    kind = result.get("type")
    if isinstance(kind, str) and kind in _BFCL_TYPES:
        result["type"] = _BFCL_TYPES[kind]
        if result["type"] is None:
            del result["type"]
    return result


def function_schemas() -> Iterable[tuple[str, Any]]:
    """Parameters of the functions in the function-calling leaderboard."""
    for path in sorted((shared_data() / "json" / "bfcl").glob("*.json")):
        for line in path.read_text().splitlines():
            case = json.loads(line)
            for function in case["function"]:
                yield f"{case['id']}: {function['name']}", _standard(function["parameters"])


def is_rounding(problem: jsonschema.ValidationError) -> bool:
    """The validator divides floats, although 22.6255 is a multiple of 0.0001."""
    if problem.validator != "multipleOf":
        return False
    return Decimal(str(problem.instance)) % Decimal(str(problem.validator_value)) == 0


def check_schemas(
    guided: Guided, schemas: list[tuple[str, Any]], **settings: Any
) -> tuple[int, int, int]:
    """Runs each; returns how many ended by themselves, were cut, were refused."""
    started, refused = [], 0
    for seed, (name, schema) in enumerate(schemas):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        status, handle, queue = guided.start(form, seed=seed, **settings)
        if status == OK:
            started.append((name, schema, form, handle, queue))
        else:
            assert status == AsStatus.ALLSPARK_PARAM_ERROR
            assert "response_format" in guided.engine.last_error()
            refused += 1
    ended, failures = 0, []
    for name, schema, form, handle, queue in started:
        ids = read_all(queue)
        guided.engine.release_request("m", handle)
        assert queue.finish_reason in ("stop", "length"), f"{name}: {queue.error}"
        if queue.finish_reason == "length":
            matcher = guided.compiler.matcher(form)
            assert matcher.try_consume_tokens(ids) == len(ids), name
            continue
        ended += 1
        text = guided.tokenizer.decode(ids, skip_special_tokens=True)
        value = json.loads(text)
        try:
            problems = list(validator_of(schema).iter_errors(value))
        except re.error:  # Python's re lacks \p{...}
            continue
        for problem in problems:
            if not is_rounding(problem):
                failures.append(f"{name}: {text!r}: {problem.message}")
    assert not failures, "\n".join(failures)
    return ended, len(started) - ended, refused


# Tests of the suite for features that are not promised: contents, formats that are annotations
# here, and a byte order mark as white space.
ANNOTATIONS = re.compile(
    r"optional/(content|ecmascript-regex|format/"
    r"(ecmascript-regex|idn-|iri|json-pointer|regex|relative-|uri-reference|uri-template))"
)


@small
def test_no_invalid_document_of_the_suite_is_taken(guided):
    num_invalid = 0
    for name, schema, tests in suite_cases():
        try:
            matcher = guided.compiler.matcher(
                {"type": "json_schema", "json_schema": {"schema": schema}}
            )
        except (TypeError, ValueError):
            continue
        for test in tests:
            if not test["valid"] and not ANNOTATIONS.search(name):
                num_invalid += 1
                text = json.dumps(test["data"], ensure_ascii=False)
                assert not guided.accepts(matcher, text), f"{name}: {test['description']}: {text}"
    assert num_invalid > 1000


@qwen
def test_some_schemas_of_others(guided):
    suite, functions = list(suite_schemas()), list(function_schemas())
    ended, cut, refused = check_schemas(guided, suite[::9] + functions[::12])
    assert ended > 40 and refused > 5
    assert cut > 0


@qwen
@pytest.mark.slow
@pytest.mark.timeout(3600)  # takes a minute of CPU time; on a busy machine much more
@pytest.mark.parametrize(
    ("schemas", "least_ended", "most_refused"),
    [(suite_schemas, 300, 320), (function_schemas, 100, 1)],
)
def test_all_schemas_of_others(guided, schemas, least_ended, most_refused):
    ended, cut, refused = check_schemas(guided, list(schemas()))
    print(f"{ended} ended by themselves, {cut} were cut, {refused} were refused")
    assert ended > least_ended and refused < most_refused


def test_a_guided_request_goes_on_in_its_format(guided):
    form = {"type": "json_schema", "json_schema": PERSON}
    ids, text, reason = guided.run(form, max_new_tokens=200)
    assert reason == "stop"
    prompt = guided.tokenizer.encode(PROMPT)
    config = {
        "temperature": 2.0, "top_k": 0, "max_new_tokens": 200, "eos_token_id": guided.eos,
        "seed": 3, "response_format": form,
    }  # fmt: skip

    def resume(generated: list[int], **others):
        fields = {**config, "num_generated_in_prompt": len(generated), **others}
        return guided.engine.start_request_ids(
            "m", guided.loader, [*prompt, *generated], fields
        )

    for count in (1, len(ids) // 2, len(ids) - 1):
        status, _, queue = resume(ids[:count])
        assert status == OK, guided.engine.last_error()
        assert read_all(queue) == ids[count:] and queue.finish_reason == "stop"
    _, _, queues = resume(ids[:3], n=2)
    assert read_all(queues[0]) == ids[3:] and queues[0].finish_reason == "stop"
    text = guided.tokenizer.decode(ids[:3] + read_all(queues[1]), skip_special_tokens=True)
    jsonschema.validate(json.loads(text), PERSON)
    status, _, _ = resume(guided.tokenizer.encode("[no"))
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert "do not begin a text of the response_format" in guided.engine.last_error()
