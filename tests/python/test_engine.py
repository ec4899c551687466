"""The engine's Python API: calls, types, statuses, messages."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from allspark import (
    AsCacheMode,
    ASGenerationConfigBuilder,
    AsStatus,
    Engine,
    GenerateRequestStatus,
    ModelState,
    RequestHandle,
    TargetDevice,
)
from allspark._allspark import testing
from allspark.engine import RequestStatInfo
from engine_fixture import (
    GREEDY,
    MAX_LENGTH,
    VOCAB_SIZE,
    install_engine,
    read_all,
    start_endless,
    start_engine,
)
from support.checkpoints import CONFIG, llama_tensors, write_checkpoint
from support.waiting import wait_until

OK = AsStatus.ALLSPARK_SUCCESS


@pytest.fixture
def running(checkpoint):
    engine, _ = start_engine(checkpoint)
    return engine


def run(engine, ids, config=GREEDY):
    status, handle, queue = engine.start_request_ids("m", None, ids, config)
    assert status == OK, engine.last_error()
    tokens = read_all(queue)
    assert engine.release_request("m", handle) == OK
    return tokens


def test_a_model_for_cuda_runs_on_the_cpu_with_a_warning(checkpoint, repo_root, capfd):
    readme = (repo_root / "README.md").read_text(encoding="utf-8")
    assert "configured for CUDA runs on the CPU, and a warning in the log says so" in readme
    expected, _ = install_engine(checkpoint)
    engine, _ = install_engine(checkpoint, compute_unit="CUDA:0")
    log = capfd.readouterr().err
    assert "'CUDA:0'" in log and "'m' runs on CPU:0" in log, log
    for each in (expected, engine):
        assert each.start_model("m") == OK, each.last_error()
    assert run(engine, [1, 2, 3]) == run(expected, [1, 2, 3])


def test_states_and_refusals(checkpoint):
    engine, _ = install_engine(checkpoint)
    assert engine.get_model_state("m") == ModelState.Initial
    assert engine.stop_model("m") == AsStatus.ALLSPARK_INVALID_CALL_ERROR
    assert "Initial" in engine.last_error()
    assert engine.start_model("m") == OK
    assert engine.start_model("m") == AsStatus.ALLSPARK_INVALID_CALL_ERROR
    assert engine.start_model("nobody") == AsStatus.ALLSPARK_PARAM_ERROR
    assert "nobody" in engine.last_error()
    assert engine.list_models() == ["m"]
    assert engine.stop_model("m", drain=True, timeout_ms=1000) == OK
    assert engine.release_model("m") == OK
    with pytest.raises(KeyError, match="m"):
        engine.get_model_state("m")
    with pytest.raises(TypeError):
        engine.start_model(7)


def test_model_info_before_the_start(checkpoint):
    engine, _ = install_engine(checkpoint, kv_cache_mode="AsCacheQuantI8", cache_span_num_init=20)
    info = engine.get_as_model_info("m")
    assert info.total_token == 20 * info.span_size == 20 * 32
    assert info.num_longest_request == 20 * 32 // MAX_LENGTH
    assert info.cache_mode == AsCacheMode.AsCacheQuantI8
    assert info.kv_pool_bytes == info.total_token * info.bytes_per_token
    assert f"total_token={info.total_token}, " in engine.get_model_info("m")
    assert "cache_mode=AsCacheQuantI8" in engine.get_model_info("m")
    with pytest.raises(KeyError, match="nobody"):
        engine.get_model_info("nobody")


def test_the_digest_of_a_model_is_that_of_its_spec_and_weights(checkpoint, tmp_path):
    def digest(directory):
        return install_engine(directory)[0].get_as_model_info("m").model_digest

    own = digest(checkpoint)
    assert re.fullmatch("[0-9a-f]{16}", own) and digest(checkpoint) == own
    config = {**CONFIG, "max_position_embeddings": MAX_LENGTH}
    tensors = llama_tensors(config)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    write_checkpoint(tmp_path, config=config, tensors=tensors)
    assert digest(tmp_path) != own


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3], dtype=np.int32),
        np.array([[1, 2, 3]], dtype=np.uint8),
        np.array([1, 9, 2, 9, 3], dtype=np.int64)[::2],
        range(1, 4),
    ],
    ids=["list", "tuple", "int32", "uint8 [1, n]", "strided", "range"],
)
def test_accepts_ids_of_any_integer_form(running, ids):
    assert run(running, ids) == run(running, [1, 2, 3])


@pytest.mark.torch
def test_accepts_torch_tensors(running):
    torch = pytest.importorskip("torch")
    expected = run(running, [1, 2, 3])
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int16):
        assert run(running, torch.tensor([1, 2, 3], dtype=dtype)) == expected
        assert run(running, torch.tensor([[1, 2, 3]], dtype=dtype)) == expected
    with pytest.raises(TypeError, match="float32"):
        run(running, torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([1.5, 2.0], "float64"),
        ("text", "integers"),
        (np.zeros((2, 3), dtype=np.int64), r"\[2, 3\]"),
        (7, "^input_ids is a int; it must be a list"),
        ([True, False], "bool"),
        (None, "^input_ids is None; it must be a list"),
    ],
)
def test_wrong_types_of_ids_raise(running, ids, match):
    with pytest.raises(TypeError, match=match):
        running.start_request_ids("m", None, ids, GREEDY)


@pytest.mark.parametrize(
    ("ids", "config", "status", "words"),
    [
        ([], {}, "EXCEED_LIMIT", ["empty"]),
        ([VOCAB_SIZE], {}, "PARAM", [f"input_ids[0] is {VOCAB_SIZE}", str(VOCAB_SIZE - 1)]),
        ([1] * MAX_LENGTH, {}, "EXCEED_LIMIT", [str(MAX_LENGTH)]),
        ([1], {"max_length": MAX_LENGTH + 1}, "EXCEED_LIMIT", ["max_length", "engine_max_length"]),
        ([1], {"top_p": 2.0}, "PARAM", ["top_p", "2", "[0, 1]"]),
        ([1], {"temperature": -1}, "PARAM", ["temperature", "-1"]),
        ([1], {"top_k": 1.5}, "PARAM", ["top_k", "1.5", "integer"]),
        ([1], {"top_k": True}, "PARAM", ["top_k", "True"]),
        ([1], {"do_sample": "yes"}, "PARAM", ["do_sample", "yes", "bool"]),
        ([1], {"stop_words_ids": [1]}, "PARAM", ["stop_words_ids"]),
        ([1], {"max_lenght": 5}, "PARAM", ["max_lenght", "max_length"]),
        ([1], {"num_beams": 4}, "PARAM", ["do_sample is true", "num_beams is 4"]),
        ([1], 5, "PARAM", ["int"]),
    ],
)
def test_bad_input_is_refused_with_a_message(running, ids, config, status, words):
    result, handle, queue = running.start_request_ids("m", None, ids, config)
    assert result.name == f"ALLSPARK_{status}_ERROR"
    assert handle is None and queue is None
    for word in words:
        assert word in running.last_error()


def test_last_error_belongs_to_the_thread(running):
    running.start_model("nobody")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(running.last_error()))
    thread.start()
    thread.join()
    assert seen == [""]
    assert "nobody" in running.last_error()


def test_builder_is_fluent_and_passed_straight(running):
    config = (
        ASGenerationConfigBuilder().do_sample().max_length(12).temperature(0.7).top_k(50).seed(3)
    )
    assert config.build() == {
        "do_sample": True, "max_length": 12, "temperature": 0.7, "top_k": 50, "seed": 3,
    }  # fmt: skip
    tokens = run(running, [1, 2], config)
    assert tokens == run(running, [1, 2], config.build())
    assert len(tokens) == 10


def test_results_and_statistics(running):
    status, handle, queue = running.start_request_ids("m", None, [1, 2, 3], GREEDY)
    assert running.sync_request("m", handle) == OK
    assert queue.GenerateStatus() == GenerateRequestStatus.GenerateFinished
    assert queue.finish_reason == "length" and queue.finished and queue.error is None
    elements = queue.Get()
    assert len(elements.ids_from_generate) == queue.GeneratedLength() == 8
    assert elements.prefix_cache_len == 0 and elements.log_probs_list == []
    assert queue.Get() is None and queue.GetNoWait() is None and queue.GetWithTimeout(5) is None
    with pytest.raises(ValueError, match="-1"):
        queue.GetWithTimeout(-1)
    info = RequestStatInfo(queue.RequestStatInfo())
    assert {key.value for key in RequestStatInfo.Key} == set(queue.RequestStatInfo())
    assert info.context_token_length == 3 and info.generated_token_length == 8
    stat = running.get_as_engine_stat("m")
    assert stat.total_generated_token >= 8 and stat.used_span == 0
    assert stat.to_dict()["model_name"] == "m"


def test_logprobs_come_with_the_tokens(running):
    config = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    _, _, queue = running.start_request_ids("m", None, [1, 2, 3], config)
    count = 0
    for elements in queue:
        ids = elements.ids_from_generate
        count += len(ids)
        assert len(elements.token_logprobs_list) == len(elements.log_probs_list) == len(ids)
        for token, logprob, top in zip(
            ids, elements.token_logprobs_list, elements.log_probs_list, strict=True
        ):
            assert len(top) == 3 and top[0] == (token, logprob)
            assert 0 >= top[0][1] >= top[1][1] >= top[2][1]
    assert count == 8
    _, _, queue = running.start_request_ids("m", None, [1], {**GREEDY, "logprobs": True})
    elements = queue.Get()
    assert elements.log_probs_list == [[]] * len(elements.ids_from_generate)
    _, _, queue = running.start_request_ids("m", None, [1], {**GREEDY, "top_logprobs": 3})
    elements = queue.Get()
    assert elements.log_probs_list == elements.token_logprobs_list == []


def test_prompt_logprobs_are_those_of_generation(running):
    # A token has the same log-probability, to the bit, as output and as part of a prompt.
    prompt = [7 * i % VOCAB_SIZE for i in range(50)]
    config = {"max_new_tokens": 60, "seed": 1, "logprobs": True, "logprobs_mode": "raw"}
    config["top_logprobs"] = 4
    _, _, queue = running.start_request_ids("m", None, prompt, config)
    elements = list(queue)
    output = [i for e in elements for i in e.ids_from_generate]
    logprobs = [p for e in elements for p in e.token_logprobs_list]
    top = [t for e in elements for t in e.log_probs_list]
    assert all(e.prompt_token_logprobs_list == e.prompt_log_probs_list == [] for e in elements)

    config = {"max_new_tokens": 2, "prompt_logprobs": True, "top_logprobs": 4}
    _, _, queue = running.start_request_ids("m", None, prompt + output, config)
    first, *rest = list(queue)
    assert len(first.prompt_token_logprobs_list) == len(prompt) + len(output) - 1
    assert first.prompt_token_logprobs_list[len(prompt) - 1 :] == logprobs
    assert first.prompt_log_probs_list[len(prompt) - 1 :] == top
    assert first.token_logprobs_list == [] and all(e.prompt_log_probs_list == [] for e in rest)
    # A prompt of one token has no log-probabilities.
    _, _, queue = running.start_request_ids("m", None, [1], config)
    assert queue.Get().prompt_token_logprobs_list == []


def test_prompt_logprobs_may_start_later(running):
    prompt = [5 * i % VOCAB_SIZE for i in range(100)]
    config = {"prompt_only": True, "prompt_logprobs": True, "top_logprobs": 2}
    _, _, queue = running.start_request_ids("m", None, prompt, config)
    whole = queue.Get()
    assert len(whole.prompt_token_logprobs_list) == 99 and whole.prefix_cache_len == 0
    for start in (0, 1, 2, 40, 99):
        later = {**config, "prompt_logprobs_start": start}
        _, _, queue = running.start_request_ids("m", None, prompt, later)
        elements = queue.Get()
        begin = max(start - 1, 0)
        assert elements.prompt_token_logprobs_list == whole.prompt_token_logprobs_list[begin:]
        assert elements.prompt_log_probs_list == whole.prompt_log_probs_list[begin:]
        # Whole blocks before the first that is scored come from the cache.
        block = running.get_as_model_info("m").span_size
        assert elements.prefix_cache_len == begin // block * block
    status, _, _ = running.start_request_ids(
        "m", None, prompt, {**config, "prompt_logprobs_start": 100}
    )
    assert status == AsStatus.ALLSPARK_PARAM_ERROR
    assert "prompt_logprobs_start is 100; it must be below the length" in running.last_error()


def test_queue_survives_release_stop_and_engine(checkpoint):
    engine, _ = start_engine(checkpoint)
    _, handle, queue = engine.start_request_ids("m", None, [1, 2, 3], GREEDY)
    engine.sync_request("m", handle)
    assert engine.release_request("m", handle) == OK
    assert engine.release_request("m", handle) == AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID
    _, _, running_queue = engine.start_request_ids("m", None, [1], {"max_new_tokens": 500})
    del engine
    gc.collect()
    assert len(read_all(queue)) == 8
    assert running_queue.finished
    assert running_queue.finish_reason in ("cancelled", "length")


def test_lists_start_as_one_batch(checkpoint):
    engine, loader = start_engine(checkpoint)

    class Words:  # the checkpoint has no tokenizer
        def encode(self, text):
            return [len(word) for word in text.split()]

    loader._tokenizer = Words()
    status, handles, queues = engine.start_request_text("m", loader, ["a bb", "ccc", "d"], GREEDY)
    assert status == OK and len(handles) == len(queues) == 3
    assert engine.sync_request("m", handles) == OK
    assert read_all(queues[0]) == run(engine, [1, 2])
    assert engine.stop_request("m", handles) == OK
    assert engine.release_request("m", handles) == OK

    # All or none: the second text is empty, so the first does not run either.
    status, handles, queues = engine.start_request_text("m", loader, ["a", "", "d"], GREEDY)
    assert status == AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR and handles == [] and queues == []
    assert engine.last_error().startswith("input 1:")
    # Tokenizers raise at such a text.
    status, handles, queues = engine.start_request_text("m", loader, ["a", "b\ud800"], GREEDY)
    assert status == AsStatus.ALLSPARK_PARAM_ERROR and handles == [] and queues == []
    assert engine.last_error() == "input 1: the text has a lone surrogate at character 1"
    status, handle, queue = engine.start_request_text("m", loader, "\udfff", GREEDY)
    assert status == AsStatus.ALLSPARK_PARAM_ERROR and handle is None and queue is None
    status, handle, queue = engine.start_request_text("m", loader, "a bb", GREEDY)
    assert status == OK and read_all(queue) == run(engine, [1, 2])
    assert engine.sync_request("m", None) == OK


def test_n_sequences_are_those_of_n_seeds(running):
    config = {"temperature": 1.5, "top_k": 0, "max_new_tokens": 20, "seed": 7}
    prompt = [7 * i % VOCAB_SIZE for i in range(80)]
    status, handles, queues = running.start_request_ids("m", None, prompt, {**config, "n": 4})
    assert status == OK and len(handles) == len(queues) == 4
    tokens = [read_all(queue) for queue in queues]
    alone = [run(running, prompt, {**config, "seed": 7 + i}) for i in range(4)]
    assert tokens == alone and len(set(map(tuple, tokens))) == 4
    assert running.release_request("m", handles) == OK
    # Without a seed each one draws its own.
    config.pop("seed")
    _, handles, queues = running.start_request_ids("m", None, prompt, {**config, "n": 2})
    assert read_all(queues[0]) != read_all(queues[1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"n": 0}, ["n is 0", "[1, 128]"]),
        ({"n": 129}, ["n is 129", "[1, 128]"]),
        ({"n": 1.0}, ["n is 1.0", "integer"]),
        ({"n": True}, ["n is True", "integer"]),
        ({"n": 2, "do_sample": False}, ["n is 2", "do_sample"]),
        ({"n": 2, "top_p": 3.0}, ["sequence 0: top_p is 3", "[0, 1]"]),
    ],
)
def test_bad_n_is_refused(running, config, words):
    status, handles, queues = running.start_request_ids("m", None, [1, 2], config)
    assert status == AsStatus.ALLSPARK_PARAM_ERROR and not handles and not queues
    assert all(word in running.last_error() for word in words), running.last_error()


def test_all_sequences_start_or_none(checkpoint):
    engine, loader = start_engine(checkpoint, max_waiting_requests=2, engine_max_batch=2)
    config = {"n": 16, "max_new_tokens": 400}
    status, handles, queues = engine.start_request_ids("m", None, [1], config)
    assert status == AsStatus.ALLSPARK_REQUEST_DENIED and handles == queues == []
    assert "max_waiting_requests" in engine.last_error()
    while engine.get_as_engine_stat("m").used_span > 0:  # released ones end after the running step
        time.sleep(0.001)


def test_raw_start_request_takes_dlpack(running):
    capsule = np.array([[1, 2, 3]], dtype=np.int64).__dlpack__()
    status, _, queue = running.start_request("m", {"input_ids": capsule}, GREEDY)
    assert status == OK and read_all(queue) == run(running, [1, 2, 3])


def test_stop_from_another_thread_wakes_a_blocked_get(running):
    config = {"max_new_tokens": 500}
    _, handle, queue = running.start_request_ids("m", None, [1], config)
    timer = threading.Timer(0.01, lambda: running.stop_request("m", handle))
    timer.start()
    tokens = read_all(queue)
    timer.join()
    assert len(tokens) == queue.GeneratedLength()
    assert queue.finished


def test_a_sync_that_gives_up_says_how_long_it_waited(checkpoint):
    engine, _ = start_engine(checkpoint, token_mask_timeout_ms=10**6)
    (handle,) = start_endless(engine)
    for handles in (handle, [handle], None):
        # Longer than the slices in which signals are looked for.
        assert engine.sync_request("m", handles, timeout_ms=130) == AsStatus.ALLSPARK_RUNTIME_ERROR
        assert engine.last_error().endswith(" has not ended within 130 ms")
    engine.stop_model("m")


def test_a_list_has_one_limit_of_time(checkpoint):
    engine, _ = start_engine(checkpoint, token_mask_timeout_ms=10**6)
    handles = start_endless(engine)
    assert engine.sync_request("m", [handles[0]], timeout_ms=5) == AsStatus.ALLSPARK_RUNTIME_ERROR
    engine.unload_device_mem("m")  # those that follow wait, too
    handles += [engine.start_request_ids("m", None, [1], GREEDY)[1] for _ in range(299)]
    begin = time.monotonic()
    assert engine.sync_request("m", handles, timeout_ms=200) == AsStatus.ALLSPARK_RUNTIME_ERROR
    assert 0.2 <= time.monotonic() - begin < 30  # with a limit for each it takes 60
    assert engine.last_error().endswith(" has not ended within 200 ms")
    engine.stop_model("m")
    assert engine.sync_request("m", handles, timeout_ms=0) == OK


@pytest.mark.parametrize("as_list", [False, True])
def test_the_longest_limit_of_time(running, as_list):
    handle = running.start_request_ids("m", None, [1], GREEDY)[1]
    handles = [handle] if as_list else handle
    assert running.sync_request("m", handles, timeout_ms=2**63 - 1) == OK


def test_the_limit_of_a_list_is_named(checkpoint):
    engine, _ = start_engine(checkpoint, token_mask_timeout_ms=10**6)
    ended = engine.start_request_ids("m", None, [1], GREEDY)[1]
    assert engine.sync_request("m", ended) == OK
    handles = [ended, *start_endless(engine)]
    assert engine.sync_request("m", handles, timeout_ms=100) == AsStatus.ALLSPARK_RUNTIME_ERROR
    assert engine.last_error().endswith(" has not ended within 100 ms")
    engine.stop_model("m")


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, handle: engine.sync_request("m", handle, timeout_ms=-1),
        lambda engine, handle: engine.sync_request("m", [handle], timeout_ms=-1),
        lambda engine, handle: engine.sync_request("m", timeout_ms=-1),
        lambda engine, handle: engine.stop_model("m", drain=True, timeout_ms=-1),
    ],
    ids=["one", "list", "all", "drain"],
)
def test_a_negative_limit_of_time_is_refused(running, call):
    handle = running.start_request_ids("m", None, [1], GREEDY)[1]
    assert call(running, handle) == AsStatus.ALLSPARK_PARAM_ERROR
    assert running.last_error() == "timeout_ms is -1; it must be at least 0"
    assert running.get_model_state("m") == ModelState.Running


def test_sync_times_out(running):
    _, handle, queue = running.start_request_ids("m", None, [1], {"max_new_tokens": 500})
    # Either it ended in time, or the call says that it did not.
    assert running.sync_request("m", handle, timeout_ms=0) in (OK, AsStatus.ALLSPARK_RUNTIME_ERROR)
    assert running.stop_request("m", handle) == OK
    assert running.sync_request("m", handle, timeout_ms=10000) == OK
    assert running.sync_request("m", RequestHandle(10**9)) == AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID


def test_a_step_that_throws_ends_its_requests_only(checkpoint):
    engine, _ = install_engine(checkpoint)
    testing.enable_step_faults(engine._native, "m")
    engine.start_model("m")
    expected = run(engine, [1, 2, 3])
    testing.inject_step_fault(2)
    _, handle, queue = engine.start_request_ids("m", None, [4, 5], {"max_new_tokens": 100})
    tokens = read_all(queue)
    assert queue.GenerateStatus() == GenerateRequestStatus.InternalError
    assert queue.finish_reason == "error" and "injected fault" in queue.error
    assert len(tokens) == queue.GeneratedLength() <= 3
    assert run(engine, [1, 2, 3]) == expected


def test_ctrl_c_ends_a_blocking_get(checkpoint):
    engine, _ = install_engine(checkpoint)
    testing.enable_step_faults(engine._native, "m")
    engine.start_model("m")
    # Reads until the signal comes, 50 ms from now.
    _, handle, queue = engine.start_request_ids("m", None, [1], {"max_new_tokens": 500})
    old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            while True:
                read_all(queue)
                time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    engine.stop_model("m")


def test_completion_descriptor(running):
    import select

    assert select.select([running], [], [], 0)[0] == []
    _, handle, queue = running.start_request_ids("m", None, [1, 2], GREEDY)
    seen = set()
    while not (queue.finished and handle in seen):
        assert select.select([running], [], [], 10)[0] == [running]
        seen |= set(running.drain_completions())
    assert seen == {handle}


def other_threads_run(path, call):
    """Whether another thread of Python runs while `call` waits for a reader of the FIFO `path`. The
    reader comes once that thread has run often, or after a minute."""
    num_ticks, ends = 0, threading.Event()
    # A process: without the GIL a thread could not open it.
    script = 'sleep 0.5; timeout 60 head -c 50 > /dev/null; cat "$0" > /dev/null'
    reader = subprocess.Popen(["sh", "-c", script, str(path)], stdin=subprocess.PIPE, bufsize=0)

    def tick():
        nonlocal num_ticks
        while not ends.wait(0.001):
            num_ticks += 1
            with contextlib.suppress(BrokenPipeError):  # it has read what it reads
                reader.stdin.write(b".")

    ticking = threading.Thread(target=tick)
    ticking.start()
    call()
    found = num_ticks
    ends.set()
    ticking.join()
    reader.communicate()
    return found >= 50


def sleeps(thread):
    """Whether a thread has slept for a tenth of a second without a break."""

    def last_sleep():
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return re.search(r"State:\tS.*\nvoluntary_ctxt_switches:\t(\d+)", status, re.DOTALL)

    before = last_sleep()
    time.sleep(0.1)
    after = last_sleep()
    return before is not None and after is not None and before[1] == after[1]


def test_other_threads_run_while_an_image_waits_to_be_registered(checkpoint, tmp_path):
    engine, loader = install_engine(checkpoint)
    engine.release_model("m")
    loader.serialize_to_memory(engine)
    path = tmp_path / "trace"
    os.mkfifo(path)
    builder = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU)
    config = builder.update_from_dict({"trace_path": str(path)}).build()
    installing = threading.Thread(target=engine.install_model, args=[config])
    installing.start()  # it writes the trace, to see whether it can be written
    wait_until(lambda: sleeps(installing))
    assert other_threads_run(path, lambda: engine.register_image("other", loader._image))
    installing.join()
    assert engine.list_models() == ["m"]


def test_other_threads_run_while_an_engine_goes(checkpoint, tmp_path):
    path = tmp_path / "trace"
    engines = [start_engine(checkpoint, trace_path=str(path))[0]]
    path.unlink()
    os.mkfifo(path)
    assert other_threads_run(path, engines.clear)


def test_eight_threads(running):
    expected = run(running, [1, 2, 3])
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], GREEDY)
                action = rng.integers(3)
                if action == 0:
                    running.stop_request("m", handle)
                tokens = read_all(queue)
                assert tokens == expected[: len(tokens)]
                assert action == 0 or len(tokens) == len(expected)
                assert running.release_request("m", handle) == OK
        except BaseException as error:  # reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert running.get_as_engine_stat("m").used_span == 0


def test_engine_repr_and_version():
    engine = Engine()
    assert engine.get_version_full().count("(GitSha1:") == 1
    assert "models=[]" in repr(engine)
