"""What a response_format may cost: its compilation, what is kept of it, and masks that are late."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from allspark import AsStatus, grammar_compiler, guided
from allspark import json_schema as schemas
from allspark.grammar_compiler import Compiler
from engine_fixture import read_all
from guided_fixture import OK, PROMPT, second_engine, start_guided

HEX = {"type": "regex", "regex": "[a-f0-9]{40}"}
# 25 characters, and a lexer of a billion states.
NESTED = {"type": "regex", "regex": "q0((a{1000}){1000}){1000}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = start_guided(tmp_path_factory.mktemp("guided"), "byte_level")
    yield model
    model.engine.stop_model("m")


@pytest.fixture
def compiler(model) -> Compiler:
    """One with nothing in its cache."""
    return Compiler(model.tokenizer)


def test_an_expression_that_explodes_ends_its_own_request_and_is_not_kept(model):
    other = model.start(HEX)[2]
    for _ in range(2):
        status, _, queue = model.start(NESTED)
        # Where the first tokens reach far into it, it is refused at its start.
        assert status == OK
        read_all(queue)
        assert queue.finish_reason == "error"
        assert "too many expressions" in queue.error and "use shorter repetitions" in queue.error
        assert "<" not in queue.error, "tags of the compiler"
        assert grammar_compiler._key(NESTED) not in model.compiler._compiled
    assert read_all(other) == model.run(HEX)[0]


def test_what_the_lexer_cannot_begin_is_refused_and_not_kept(compiler):
    branches = [{"properties": {f"{c}{i}": {"maxLength": i}}} for c in "ab" for i in range(10)]
    all_of = [{"anyOf": branches[i : i + 2]} for i in range(0, len(branches), 2)]
    form = {"type": "json_schema", "json_schema": {"type": "object", "allOf": all_of}}
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be enforced: .*too "):
            compiler.matcher(form)
    assert not compiler._compiled and compiler._num_bytes == 0


def test_long_honest_formats_are_served(model, compiler):
    names = [f"number {i}, {i * 7919 % 10007}" for i in range(20_000)]
    matcher = compiler.matcher({"type": "choice", "choice": names})
    assert model.accepts(matcher, names[777]) and not model.accepts(matcher, names[777] + "0")
    schema = {"type": "object", "properties": {f"field{i}": {"maxLength": 99} for i in range(400)}}
    assert model.accepts(compiler.matcher({"type": "json_schema", "json_schema": schema}), "{}")


def test_choices_may_begin_alike_or_be_empty(model):
    choices = ["", "a", "ab", "abc\n\"", "é", "a\x7f\x01"]
    matcher = model.compiler.matcher({"type": "choice", "choice": choices})
    for text in choices:
        assert model.accepts(matcher, text), text
    for text in ("b", "abc", "aa"):
        assert not model.accepts(matcher, text), text


def test_what_is_too_long_is_refused_before_it_is_compiled(model, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "to_grammar", lambda *_: pytest.fail("converted"))
    bound = f"the bound is {grammar_compiler.MAX_GRAMMAR_CHARS}"
    message = model.refusal({"type": "regex", "regex": "a" * grammar_compiler.MAX_GRAMMAR_CHARS})
    assert message.startswith("response_format has 10000") and message.endswith(bound)


def test_pattern_properties_are_few(model):
    def schema(count: int) -> dict:
        half = {f"^a{i:03}": {"type": "integer"} for i in range(count // 2)}
        other = {f"^b{i:03}": {"type": "integer"} for i in range(count - count // 2)}
        nested = {"type": "object", "patternProperties": other}
        return {"type": "object", "patternProperties": half, "properties": {"c": nested}}

    most = schemas.MAX_PATTERN_PROPERTIES
    model.compiler.matcher({"type": "json_schema", "json_schema": schema(most)})
    message = model.refusal({"type": "json_schema", "json_schema": schema(most + 1)})
    assert f"more than {most} patternProperties" in message


def test_the_cache_is_counted_in_bytes(compiler, monkeypatch):
    def format_of(i: int) -> dict:
        return {"type": "regex", "regex": f"[a-z]{{{i + 1}}}"}

    compiler.matcher(format_of(0))
    each = compiler._num_bytes
    assert each >= grammar_compiler._GROWTH_BYTES
    monkeypatch.setattr(grammar_compiler, "_MAX_CACHE_BYTES", int(each * 3.5))
    for i in range(10):
        compiler.matcher(format_of(i))
        compiler.matcher(format_of(0))  # the last one used is the last to go
    assert len(compiler._compiled) == 3
    kept = [compiled.num_bytes for compiled in compiler._compiled.values()]
    assert compiler._num_bytes == sum(kept) <= grammar_compiler._MAX_CACHE_BYTES
    assert grammar_compiler._key(format_of(0)) in compiler._compiled
    for i in range(10):
        compiler.forget(format_of(i))
    assert compiler._num_bytes == 0


def test_a_compilation_waits_for_the_stacks_of_others(compiler, monkeypatch):
    start, missing = threading.Thread.start, [2]

    def start_later(thread):
        if thread.name == "allspark-compile" and missing[0] > 0:
            missing[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    before = threading.stack_size()
    compiler.matcher({"type": "regex", "regex": "[a-c]{7}"})
    assert missing == [0]
    missing[0] = 10**6
    monkeypatch.setattr(grammar_compiler, "_MAX_THREAD_WAIT_SECONDS", 0.1)
    with pytest.raises(ValueError, match="the system gives no thread with a stack of 512 MiB"):
        compiler.matcher({"type": "regex", "regex": "[a-c]{8}"})
    assert threading.stack_size() == before


def test_a_compilation_that_does_not_end_is_given_up(model, monkeypatch):
    hang = threading.Event()
    build = Compiler._build

    def build_late(self, grammar):
        hang.wait()
        return build(self, grammar)

    monkeypatch.setattr(Compiler, "_build", build_late)
    form = {"type": "regex", "regex": "[x-z]{3}"}
    with monkeypatch.context() as patch:
        patch.setattr(grammar_compiler, "_MAX_WAIT_SECONDS", 0.05)
        assert "was not compiled within 0.05 s" in model.refusal(form)
    monkeypatch.setattr(grammar_compiler, "_MAX_COMPILE_SECONDS", -1)
    assert "takes more than -1 s to compile" in model.refusal(form)
    hang.set()


def test_a_lexer_that_failed_fails_for_nobody_who_comes_later(model, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_MAX_LEXER_STATES", 60)
    form = {"type": "regex", "regex": "[a-z ]*a[a-z ]{30}"}
    queues = [model.start(form, seed=seed)[2] for seed in range(20)]
    for queue in queues:
        read_all(queue)
    errors = {queue.error for queue in queues if queue.finish_reason == "error"}
    assert errors and all("too many states" in error for error in errors)
    monkeypatch.undo()
    assert [model.run(form, seed=seed)[2] == "error" for seed in range(3)] == [False] * 3


class Gate:
    """Lets the masks of one response_format wait."""

    def __init__(self, monkeypatch, form: dict):
        self.arrived, self.open = threading.Event(), threading.Event()
        self._form = form
        self._answer = guided._answer
        monkeypatch.setattr(guided, "_answer", self)

    def __call__(self, executor, compiler, asked):
        if any(guide.response_format == self._form for _, guide, _ in asked):
            # The first mask makes it known as slow; it is alone with the second.
            if asked[0][2] < 0:
                self.open.wait(2 * guided._SLOW_BATCH_SECONDS)
            else:
                self.arrived.set()
                assert self.open.wait(60)
        self._answer(executor, compiler, asked)


def test_a_late_mask_delays_no_other_request(model, monkeypatch):
    slow = {"type": "regex", "regex": "[a-f0-9]{30}"}
    alone = model.run(HEX)[0]
    slow_alone = model.run(slow)[0]
    gate = Gate(monkeypatch, slow)
    engine = second_engine(model)
    config = {"temperature": 2.0, "top_k": 0, "max_new_tokens": 80, "eos_token_id": model.eos}

    def start(form):
        config_of = {**config, "seed": 3, "response_format": form}
        status, _, queue = engine.start_request_text("m", model.loader, PROMPT, config_of)
        assert status == OK, engine.last_error()
        return queue

    late = start(slow)
    assert gate.arrived.wait(60)
    assert read_all(start(HEX)) == alone
    assert len(read_all(start(None))) > 0
    assert late.GeneratedLength() == 1
    gate.open.set()
    assert read_all(late) == slow_alone


@pytest.mark.parametrize("fails", [False, True])
def test_a_compilation_delays_no_plain_start(model, monkeypatch, fails):
    compiling, go_on = threading.Event(), threading.Event()
    compile_it, num_compiled = Compiler._compile, 0

    def compile_late(self, response_format):
        nonlocal num_compiled
        num_compiled += 1
        compiling.set()
        assert go_on.wait(60)
        if fails:
            raise ValueError("response_format takes too long")
        return compile_it(self, response_format)

    monkeypatch.setattr(Compiler, "_compile", compile_late)
    form = {"type": "regex", "regex": "[0-6]{17}" if fails else "[0-7]{17}"}  # new to the compiler

    async def main():
        start = model.engine.start_request_ids_async
        guided_config = {"max_new_tokens": 40, "eos_token_id": model.eos, "response_format": form}
        task = asyncio.create_task(start("m", model.loader, [1, 2], guided_config))
        await asyncio.to_thread(compiling.wait)
        status, _, plain = await start("m", model.loader, [1, 2], {"max_new_tokens": 3})
        assert status == AsStatus.ALLSPARK_SUCCESS and not task.done()
        go_on.set()
        return plain, *await task

    plain, status, _, queue = asyncio.run(main())
    assert len(read_all(plain)) > 0
    # Not once more on the thread of the starts, for which they would wait.
    assert num_compiled == 1
    if fails:
        assert (status, queue) == (AsStatus.ALLSPARK_PARAM_ERROR, None)
        assert model.engine.last_error() == "response_format takes too long"
    else:
        assert re.fullmatch("[0-7]{17}", model.tokenizer.decode(read_all(queue)[:-1]))


def test_a_start_needs_no_cache_of_what_was_compiled_for_it(model, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_MAX_CACHE_BYTES", 0)
    compile_it, num_compiled = Compiler._compile, 0

    def compile_and_count(self, response_format):
        nonlocal num_compiled
        num_compiled += 1
        return compile_it(self, response_format)

    monkeypatch.setattr(Compiler, "_compile", compile_and_count)
    form = {"type": "regex", "regex": "[0-7]{18}"}
    config = {"max_new_tokens": 40, "eos_token_id": model.eos, "response_format": form}
    start = model.engine.start_request_text_async("m", model.loader, [PROMPT] * 2, config)
    status, _, queues = asyncio.run(start)
    assert status == OK and num_compiled == 1
    for queue in queues:
        assert re.fullmatch("[0-7]{18}", model.tokenizer.decode(read_all(queue)[:-1]))


def test_an_asynchronous_start_says_what_is_wrong(model):
    config = {"response_format": {"type": "regex", "regex": "("}}
    start = model.engine.start_request_ids_async("m", model.loader, [1], config)
    status, handle, queue = asyncio.run(start)
    assert (status, handle, queue) == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
    assert "cannot be enforced" in model.engine.last_error()
