"""Requests that ended early, by a stop or for lack of memory, are continued from where they
were."""

from __future__ import annotations

import pytest
from allspark import ASGenerationConfigBuilder, AsStatus, GenerateRequestStatus, TextQueue
from allspark.text_options import TextOptions
from engine_fixture import VOCAB_SIZE, read_all, start_engine
from test_text_queue import FakeQueue

OK = AsStatus.ALLSPARK_SUCCESS
DRAWN = {
    "seed": 5, "temperature": 1.5, "top_k": 0, "max_new_tokens": 60,
    "frequency_penalty": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3,
}  # fmt: skip


def start_model(checkpoint, **settings):
    settings = {"cache_span_size": 16, "engine_max_length": 256, **settings}
    engine, _ = start_engine(checkpoint, **settings)
    return engine


def prompt(length: int, step: int = 7) -> list[int]:
    return [(step * i + i // 5) % VOCAB_SIZE for i in range(length)]


def start(engine, ids, config):
    status, handle, queue = engine.start_request_ids("m", None, ids, config)
    assert status == OK, engine.last_error()
    return handle, queue


def resume(engine, ids, output, config):
    fields = {**config, "num_generated_in_prompt": len(output)}
    return start(engine, [*ids, *output], fields)[1]


def test_a_stopped_request_goes_on_as_if_nothing_had_been(checkpoint):
    engine = start_model(checkpoint)
    _, whole = start(engine, prompt(50), DRAWN)
    expected = read_all(whole)
    engine.clear_prefix_cache("m")
    handle, queue = start(engine, prompt(50), DRAWN)
    output = queue.Get().ids_from_generate
    assert engine.stop_request("m", handle) == OK
    output += read_all(queue)
    if len(output) < len(expected):  # it was stopped before its end
        assert queue.finish_reason == "cancelled"
        rest = resume(engine, prompt(50), output, DRAWN)
        elements = rest.Get()
        assert elements.prefix_cache_len == (50 + len(output) - 1) // 16 * 16
        output += elements.ids_from_generate + read_all(rest)
    assert output == expected
    # From any position, also with one sequence of several.
    for count in (1, 30, 59):
        config = ASGenerationConfigBuilder().update({**DRAWN, "n": 2, "seed": 4})
        config.num_generated_in_prompt(count)
        ids = [*prompt(50), *expected[:count]]
        status, _, queues = engine.start_request_ids("m", None, ids, config)
        assert status == OK, engine.last_error()
        assert [len(read_all(queues[0])), read_all(queues[1])] == [60 - count, expected[count:]]


def test_interrupted_requests_are_collected_and_started_again(checkpoint):
    engine = start_model(
        checkpoint, cache_span_num_init=20, interrupt_on_cache_exhaustion=True
    )  # a request of the maximum length needs 16 blocks
    jobs = [(prompt(40, step), {**DRAWN, "seed": step, "max_new_tokens": 120}) for step in range(8)]
    queues = [start(engine, *job)[1] for job in jobs]
    ends, outputs = [], []
    for queue in queues:
        outputs.append(read_all(queue))
        ends.append(queue.GenerateStatus())
        interrupted = ends[-1] == GenerateRequestStatus.GenerateInterrupted
        assert (queue.finish_reason, bool(queue.error)) == (
            ("interrupted", True) if interrupted else ("length", False)
        )
    finished = GenerateRequestStatus.GenerateFinished
    assert set(ends) == {finished, GenerateRequestStatus.GenerateInterrupted}
    assert engine.get_as_engine_stat("m").num_preemptions == 0
    for (ids, config), output, end in zip(jobs, outputs, ends, strict=True):
        if end != finished:
            output += read_all(resume(engine, ids, output, config))
        assert output == read_all(start(engine, ids, config)[1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_generated_in_prompt": 3}, "below the length of input_ids, which is 3"),
        ({"num_generated_in_prompt": -1}, "num_generated_in_prompt is -1; it must be in"),
        ({"num_generated_in_prompt": 2, "max_new_tokens": 2}, "below max_new_tokens, which is 2"),
        ({"num_generated_in_prompt": 2, "best_of": 2}, "must be 0 where best_of is 2"),
    ],
)
def test_what_cannot_be_resumed_is_refused(checkpoint, config, message):
    engine = start_model(checkpoint)
    status, handle, queue = engine.start_request_ids("m", None, [1, 2, 3], config)
    assert (status, handle, queue) == (AsStatus.ALLSPARK_PARAM_ERROR, None, None)
    assert message in engine.last_error()


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("minimum", [0, 7])
def test_text_goes_on_where_it_was(include, minimum):
    def read(ids: list[int], generated: list[int]) -> tuple[str, str | None]:
        queue = TextQueue(
            FakeQueue([ids]), Letters(), TextOptions(("stop",), include), stop=lambda: None,
            min_tokens=minimum, generated=generated,
        )  # fmt: skip
        return "".join(elements.text for elements in queue), queue.finish_reason

    ids = list(map(ord, "abstorstop, stop, on"))
    whole, reason = read(ids, [])
    assert reason == "stop"
    # If a part of the stop string was returned already, that stays.
    for count, given in ((2, "ab"), (5, "absto"), (6, "abstor"), (9, "abstorsto")):
        first, _ = read(ids[:count], [])
        assert first == given
        rest, reason = read(ids[count:], ids[:count])
        assert reason == "stop"
        assert first + rest == (whole if whole.startswith(first) else first)
