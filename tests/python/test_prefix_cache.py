"""The prefix cache from Python: lookups, pins, and what is refused."""

from __future__ import annotations

import pytest
from allspark import AllSparkError, AsStatus, OutOfMemoryError
from engine_fixture import GREEDY, VOCAB_SIZE, read_all, start_engine

OK = AsStatus.ALLSPARK_SUCCESS


def start(checkpoint, **settings):
    engine, loader = start_engine(checkpoint, cache_span_size=16, engine_max_length=128, **settings)
    return engine, loader


def prompt(length: int, step: int = 7) -> list[int]:
    return [(step * i + i // 5) % VOCAB_SIZE for i in range(length)]


def ask(engine, ids, **config) -> tuple[list[int], int]:
    """The output, and how many tokens of the prompt were found in the cache."""
    status, handle, queue = engine.start_request_ids("m", None, ids, {**GREEDY, **config})
    assert status == OK, engine.last_error()
    assert engine.sync_request("m", handle) == OK
    elements = queue.Get()
    assert elements.prefix_len_gpu == 0 and elements.prefix_len_cpu == elements.prefix_cache_len
    assert queue.RequestStatInfo()["context_cached_length"] == elements.prefix_cache_len
    assert engine.release_request("m", handle) == OK
    return elements.ids_from_generate, elements.prefix_cache_len


def test_found_tokens_are_reported_and_change_nothing(checkpoint):
    engine, _ = start(checkpoint)
    first = ask(engine, prompt(70))
    assert first[1] == 0 and ask(engine, prompt(70)) == (first[0], 64)
    turn = [*prompt(70), *first[0], 1, 2, 3]
    assert ask(engine, turn)[1] == 64
    assert ask(engine, turn, prompt_logprobs=True)[1] == 0
    assert engine.find_prefix("m", []) == 0  # answered between steps, so the last step is counted
    stat = engine.get_as_engine_stat("m")
    assert stat.prefix_cache_hit_token == 128
    assert stat.prefix_cache_miss_token == stat.total_prefill_token == 70 + 6 + 17 + 81
    assert stat.prefix_cache_hit_rate == pytest.approx(128 / (128 + 174))
    assert stat.prefix_cache_hit_rate + stat.prefix_cache_miss_rate == pytest.approx(1)
    assert stat.used_span == 0 and stat.cached_span == 5

    off, _ = start(checkpoint, enable_prefix_cache=False)
    assert ask(off, prompt(70)) == ask(off, prompt(70)) == (first[0], 0)
    assert off.get_as_engine_stat("m").prefix_cache_hit_rate == 0


def test_requests_at_once_compute_a_common_beginning_once(checkpoint):
    engine, _ = start(checkpoint, engine_max_prefill_length=32)
    status, handles, queues = engine.start_request_ids(
        "m", None, prompt(70), {"n": 8, "max_new_tokens": 10, "seed": 3}
    )
    assert status == OK and engine.sync_request("m", handles) == OK
    assert [queue.RequestStatInfo()["context_cached_length"] for queue in queues] == [0] + [64] * 7
    assert engine.find_prefix("m", prompt(70)) == 64
    assert engine.get_as_engine_stat("m").total_prefill_token == 70 + 7 * 6
    assert len({tuple(read_all(queue)) for queue in queues}) > 1


def test_find_pin_and_clear(checkpoint):
    engine, _ = start(checkpoint, cache_span_num_init=12)  # a request of the maximum length needs 8
    assert engine.find_prefix("m", prompt(70)) == engine.pin_prefix("m", prompt(70)) == 0
    ask(engine, prompt(70))
    assert engine.find_prefix("m", prompt(70)) == 64
    assert engine.find_prefix("m", []) == 0
    assert engine.pin_prefix("m", prompt(70)) == 64
    for step in (3, 5, 9, 11):
        ask(engine, prompt(110, step))
    assert engine.find_prefix("m", prompt(70)) == 64
    with pytest.raises(OutOfMemoryError, match=r"4 blocks are pinned and \d more .* at most 4"):
        engine.pin_prefix("m", prompt(110, 11))
    assert engine.unpin_prefix("m", prompt(70)) == 64
    assert engine.unpin_prefix("m", prompt(70)) == 0
    assert engine.clear_prefix_cache("m") == 11 * 16
    assert engine.find_prefix("m", prompt(70)) == 0


def test_calls_that_cannot_be_served_say_why(checkpoint):
    engine, _ = start(checkpoint)
    with pytest.raises(KeyError, match="no model 'x'"):
        engine.find_prefix("x", [1])
    with pytest.raises(ValueError, match=rf"input_ids\[1\] is {VOCAB_SIZE}; it must be in"):
        engine.pin_prefix("m", [1, VOCAB_SIZE])
    with pytest.raises(TypeError, match="integers"):
        engine.unpin_prefix("m", [0.5])
    engine.stop_model("m")
    with pytest.raises(AllSparkError, match="is Stop; a call on the prefix cache needs it Running"):
        engine.clear_prefix_cache("m")
    off, _ = start(checkpoint, enable_prefix_cache=False)
    with pytest.raises(AllSparkError, match="enable_prefix_cache of model 'm' is false"):
        off.clear_prefix_cache("m")
