"""Guided decoding from end to end: a real vocabulary, random weights, high temperature.

Whatever the weights say, an output that ends by itself is in its format, and one that is cut is the
beginning of such a text.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from allspark import AsStatus, Engine
from allspark.guided import Compiler
from allspark.model_loader.tokenizer import load_tokenizer
from engine_fixture import read_all, start_engine
from support.checkpoints import CONFIG, llama_tensors, shared_data, write_checkpoint
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

OK = AsStatus.ALLSPARK_SUCCESS
EOS = 151645
VOCAB_SIZE = 151936  # the tokenizer has 151,665
PROMPT = "Give me one."


class Guided:
    """A running engine with the qwen2.5 tokenizer."""

    def __init__(self, directory):
        self.engine, self.loader = start_engine(directory)
        assert self.engine.start_model("m") == OK, self.engine.last_error()
        self.tokenizer = self.loader.get_tokenizer()

    def start(self, response_format, **settings):
        config = {
            "temperature": 2.0, "top_k": 0, "max_new_tokens": 80, "eos_token_id": EOS, "seed": 3,
            "response_format": response_format, **settings,
        }  # fmt: skip
        return self.engine.start_request_text("m", self.loader, PROMPT, config)

    def run(self, response_format, **settings) -> tuple[list[int], str, str]:
        """Ids, the text without EOS, and the finish reason."""
        status, handle, queue = self.start(response_format, **settings)
        assert status == OK, self.engine.last_error()
        ids = read_all(queue)
        self.engine.release_request("m", handle)
        return ids, self.tokenizer.decode(ids, skip_special_tokens=True), queue.finish_reason

    def refusal(self, response_format, **settings) -> str:
        """The message with which it is refused."""
        status, handle, queue = self.start(response_format, **settings)
        assert (status, handle, queue) == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
        return self.engine.last_error()


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    directory = tmp_path_factory.mktemp("guided")
    config = {**CONFIG, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
    tensors = llama_tensors(config)
    # Tokens of one or two characters and EOS are the likely ones: texts come to their ends.
    head = tensors["lm_head.weight"]
    likely = [*range(600), EOS]
    rows = 3 * head[likely]
    head[:] = 0
    head[likely] = rows
    write_checkpoint(directory, config=config, tensors=tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data() / "tokenizers" / "qwen2.5" / name, directory)
    guided = Guided(directory)
    yield guided
    guided.engine.stop_model("m")


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
        assert reason == "stop" and ids[-1] == EOS
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
        assert re.fullmatch(regex, text), text


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
    matcher = Compiler.of(guided.tokenizer).matcher(TAGS)
    encode = guided.tokenizer.encode

    def accepts(text: str) -> bool:
        ids = encode(text, add_special_tokens=False)
        return matcher.deep_copy().try_consume_tokens(ids) == len(ids)

    assert accepts('free <text> <tool_call>true</tool_call> more #f1 "one"; #f2 12; end')
    for bad in ("<tool_call>1", "a #f3", '#f1 "two"', "#f2 1</tool_call>"):
        assert not accepts(bad), bad
    # A trigger that free text of this model has: its first letter.
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


@pytest.mark.parametrize("name", ["gpt2", "chatglm3", "mistral-v3", "internlm2", "stories260K"])
def test_tokenizers_of_other_kinds(name, tmp_path):
    """Random walks through the masks decode to full matches: byte-level BPE and SentencePiece."""
    folder = "checkpoints" if name == "stories260K" else "tokenizers"
    directory = shutil.copytree(shared_data() / folder / name, tmp_path / name)
    if not (directory / "tokenizer_config.json").exists():
        config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(directory)
    compiler = Compiler.of(tokenizer)
    regex = r'\{"[a-zé☃ ]{0,12}": \[[0-9]{1,3}\]\}'
    rng = np.random.default_rng(7)
    for _ in range(10):
        matcher, ids = compiler.matcher({"type": "regex", "regex": regex}), []
        while not matcher.is_stopped():
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(mask, bitorder="little")
            ids.append(int(rng.choice(np.flatnonzero(bits))))
            assert matcher.consume_token(ids[-1])
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False, skip_special_tokens=True)
        assert re.fullmatch(regex, text), text


def test_a_tokenizer_that_the_compiler_misreads_is_refused():
    class Upper:
        eos_token_id = 0
        added_tokens_decoder: dict = {}

        def __init__(self):
            self.backend_tokenizer = Tokenizer(BPE({"</s>": 0, "A": 1}, []))
            self.backend_tokenizer.decoder = ByteLevel()

        def encode(self, text, add_special_tokens):
            return [1] * len(text)

    with pytest.raises(ValueError, match="otherwise"):
        Compiler.of(Upper())
    with pytest.raises(ValueError, match="fast tokenizer.*object"):
        Compiler.of(type("object", (), {})())


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
        assert reason == "stop" and EOS not in ids
        assert re.fullmatch("[ab]{4}", text)


def test_a_special_stop_word_ends_like_eos_and_others_follow_the_grammar(guided):
    im_start = 151644
    form = {"type": "regex", "regex": "[ab]{4}"}
    for stop in ({"stop_words_ids": [[im_start]]}, {"stop_token_ids": [im_start]}):
        ids, _, reason = guided.run(form, eos_token_id=-1, **stop)
        assert reason == "stop" and ids[-1] == im_start
    (a,) = guided.tokenizer.encode("a")
    for seed in SEEDS:
        _, text, reason = guided.run(form, seed=seed, stop_words_ids=[[a]])
        assert reason == "stop"
        assert re.fullmatch("b*a|b{4}", text)


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
            {"type": "json_schema", "json_schema": {"not": {}, "x-guidance": {"lenient": True}}},
            ["not"],
        ),
        ({"type": "json_schema", "json_schema": {"x-guidance": 3}}, ["x-guidance"]),
        ({"type": "json_schema", "json_schema": {"const": {1}}}, ["JSON"]),
        ({"type": "regex", "regex": "(a"}, ["unclosed"]),
        ({"type": "regex", "regex": "(?=a)b"}, ["look-around"]),
        ({"type": "regex", "regex_schema": "a"}, ["regex_schema"]),
        ({"type": "choice", "choice": []}, ["empty"]),
        ({"type": "choice", "choice": ["a", 1]}, ["int"]),
        ({"type": "choice", "choice": "ab"}, ["list"]),
        ({"type": "grammar", "grammar": "start: nothing"}, ["nothing"]),
        ({"type": "grammar", "grammar": "root ::= nothing"}, ["nothing"]),
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


def test_a_tokenizer_is_needed(guided):
    config = {"response_format": {"type": "json_object"}}
    status, _, _ = guided.engine.start_request_ids("m", None, [1], config)
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert "tokenizer" in guided.engine.last_error()


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


def test_stop_in_the_middle(guided):
    form = {"type": "regex", "regex": "[a-f0-9]{400}"}
    for _ in range(5):
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
    assert engine.sync_request("m", handle, timeout_ms=5000) == OK
    hang.set()


def second_engine(guided) -> Engine:
    """Another engine with the fixture's model and its own thread for masks."""
    engine, _ = start_engine(guided.loader.directory)
    assert engine.start_model("m") == OK
    return engine


def test_the_thread_ends_with_its_engine(guided):
    def threads() -> int:
        return sum(thread.name == "allspark-guided" for thread in threading.enumerate())

    before = threads()
    engine = second_engine(guided)
    assert threads() == before, "an engine without guided requests has no such thread"
    config = {"response_format": {"type": "regex", "regex": "[ab]{400}"}, "max_new_tokens": 400}
    _, _, queue = engine.start_request_text("m", guided.loader, PROMPT, config)
    assert queue.Get() is not None
    assert threads() == before + 1
    del engine
    assert threads() == before
    read_all(queue)
    assert queue.finish_reason == "cancelled"


# -- schemas of others -------------------------------------------------------------------------


def suite_schemas() -> Iterable[tuple[str, Any]]:
    """The JSON Schema test suite's schemas, each with its draft."""
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
                yield f"{path.relative_to(folder)}: {case['description']}", schema


# Names of types in the function-calling schemas that JSON Schema does not know.
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
    """The validator divides floats; 22.6255 is a multiple of 0.0001 all the same."""
    if problem.validator != "multipleOf":
        return False
    return Decimal(str(problem.instance)) % Decimal(str(problem.validator_value)) == 0


def check_schemas(guided: Guided, schemas: list[tuple[str, Any]]) -> tuple[int, int, int]:
    """Runs each; returns how many ended by themselves, were cut, were refused."""
    compiler = Compiler.of(guided.tokenizer)
    started, refused = [], 0
    for seed, (name, schema) in enumerate(schemas):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        status, handle, queue = guided.start(form, seed=seed)
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
            matcher = compiler.matcher(form)
            assert matcher.try_consume_tokens(ids) == len(ids), name
            continue
        ended += 1
        text = guided.tokenizer.decode(ids, skip_special_tokens=True)
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        value = json.loads(text)
        try:
            problems = list(validator(schema).iter_errors(value))
        except re.error:  # the validator's own expressions lack \p{...}
            continue
        for problem in problems:
            if not is_rounding(problem):
                failures.append(f"{name}: {text!r}: {problem.message}")
    assert not failures, "\n".join(failures)
    return ended, len(started) - ended, refused


def test_some_schemas_of_others(guided):
    suite, functions = list(suite_schemas()), list(function_schemas())
    ended, cut, refused = check_schemas(guided, suite[::9] + functions[::12])
    assert ended > 40 and refused > 5
    assert cut > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a minute of computing; on a busy machine much more
@pytest.mark.parametrize(
    ("schemas", "least_ended", "most_refused"),
    [(suite_schemas, 300, 400), (function_schemas, 100, 5)],
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
        "temperature": 2.0, "top_k": 0, "max_new_tokens": 200, "eos_token_id": EOS, "seed": 3,
        "response_format": form,
    }  # fmt: skip

    def resume(generated: list[int]):
        fields = {**config, "num_generated_in_prompt": len(generated)}
        return guided.engine.start_request_ids(
            "m", guided.loader, [*prompt, *generated], fields
        )

    for count in (1, len(ids) // 2, len(ids) - 1):
        status, _, queue = resume(ids[:count])
        assert status == OK, guided.engine.last_error()
        assert read_all(queue) == ids[count:] and queue.finish_reason == "stop"
    status, _, _ = resume(guided.tokenizer.encode("[no"))
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert "do not begin a text of the response_format" in guided.engine.last_error()
