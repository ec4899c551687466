"""Reading in turns, as DashInfer's scripts do, whatever the engine does between two of their calls.

The engine is a fake that takes steps when it is told to: any number of steps before any two of the
calls that a script makes. All combinations are tried, so no token is kept or lost by chance.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time

import pytest
from allspark import AsStatus
from allspark import ResultQueue as PlainQueue
from allspark._allspark import GenerateRequestStatus as Status
from allspark.dashinfer_compat.result_queue import ResultQueue, TextQueue
from allspark.text_options import TextOptions
from engine_fixture import GREEDY, start_engine
from support.native_queue import NativeElements, SteppedNative

TOKENS = [7, 8, 9]
NUM_CALLS = 16  # of the native queue; a loop makes at least four rounds


def ids_of(elements):
    return [] if elements is None else list(elements.ids_from_generate)


RUNNING = (Status.Init, Status.ContextFinished, Status.Generating)


def documented_loop(queue, native):
    """The loop of the documents and the examples, with prints in between."""
    ids = []
    status = queue.GenerateStatus()
    while status in RUNNING:
        print(queue.GenerateStatus())
        ids += ids_of(queue.Get())
        status = queue.GenerateStatus()
    return ids


def benchmark_loop(queue, native):
    """The loop of the throughput benchmark and of the JSON test: any other status is an error."""
    ids = []
    while True:
        status = queue.GenerateStatus()
        if status == Status.Init:
            continue
        if status not in (Status.Generating, Status.GenerateFinished):
            return f"unexpected status: {status.name}"
        ids += ids_of(queue.Get())
        if status == Status.GenerateFinished:
            return ids


def worker_loop(queue, native):
    """The loop of FastChat's worker example: it reads while tokens come, and never after that."""
    ids = []
    while True:
        status = queue.GenerateStatus()
        if status == Status.Generating:
            ids += ids_of(queue.Get())
        elif status == Status.GenerateFinished:
            return ids
        elif status != Status.Init:
            return f"generate failed with status: {status.name}"


def patient_loop(queue, native):
    """Asks until the request has ended, and then reads once."""
    while queue.GenerateStatus() != Status.GenerateFinished:
        pass
    return ids_of(queue.Get())


def synchronous_loop(queue, native):
    """The loop of the test of mixtures of experts: patient_loop after sync_request."""
    native.run_to_the_end()
    queue.know_end()
    assert queue.GenerateStatus() == Status.GenerateFinished
    return patient_loop(queue, native)


def polling_loop(queue, native):
    """Never waits."""
    ids = []
    while (status := queue.GenerateStatus()) in RUNNING:
        if status != Status.Init:
            ids += ids_of(queue.GetNoWait())
    return ids


def timeout_loop(queue, native):
    ids = []
    while queue.GenerateStatus() in RUNNING:
        ids += ids_of(queue.GetWithTimeout(1))
    return ids


LOOPS = [
    documented_loop, benchmark_loop, worker_loop, patient_loop, synchronous_loop, polling_loop,
    timeout_loop,
]  # fmt: skip


def schedules():
    """Up to four steps before each of two of the first calls, and none before their other calls."""
    for i, j in itertools.combinations(range(NUM_CALLS), 2):
        for first, second in itertools.product((1, 2, 3, 4), repeat=2):
            choices = [0] * NUM_CALLS
            choices[i], choices[j] = first, second
            yield choices


def all_results(loop, make_queue, **native):
    """The results of the loop for every schedule of the engine."""
    for choices in schedules():
        stepped = SteppedNative(choices, **{"tokens": TOKENS, **native})
        yield choices, loop(make_queue(stepped), stepped)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("tokens", [TOKENS, [5]], ids=["three", "one"])
def test_every_loop_reads_every_token(loop, tokens):
    for choices, ids in all_results(loop, ResultQueue, tokens=tokens):
        assert ids == tokens, choices


def test_the_loops_would_miss_tokens_of_a_status_that_does_not_wait():
    """With allspark's own queue, whose status is that of the request."""
    for loop in (documented_loop, worker_loop):
        assert any(ids != TOKENS for _, ids in all_results(loop, PlainQueue)), loop
    assert any(
        ids == "unexpected status: ContextFinished"
        for _, ids in all_results(benchmark_loop, PlainQueue)
    )


@pytest.mark.parametrize("end", [Status.GenerateInterrupted, Status.InternalError])
def test_what_was_generated_before_a_failure_is_read_too(end):
    for choices, ids in all_results(documented_loop, ResultQueue, end=end):
        assert ids == TOKENS, choices
    native = SteppedNative((), TOKENS)
    queue = ResultQueue(native)
    documented_loop(queue, native)
    assert queue.GenerateStatus() == Status.GenerateFinished


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("stop", ["none", "cd"])
def test_queues_with_text_give_all_of_it(stop):
    tokens = list("abcd\u00e9".encode())[:-1]  # ends in the middle of a letter
    expected = {"none": "abcd\N{REPLACEMENT CHARACTER}", "cd": "ab"}[stop]

    def make_queue(native):
        return TextQueue(native, Letters(), TextOptions(stop_words=(stop,)), stop=lambda: None)

    def loop(queue, native):
        out = ""
        status = queue.GenerateStatus()
        while status in RUNNING:
            elements = queue.Get()
            out += elements.text if elements is not None else ""
            status = queue.GenerateStatus()
        return out

    elements = lambda ids: NativeElements(ids_from_generate=ids)  # noqa: E731
    for choices, out in all_results(loop, make_queue, tokens=tokens, elements=elements):
        assert out == expected, choices


def test_a_reader_counts_anew_after_each_fetch():
    """However often it asks while the request runs, nothing is lost."""
    native = SteppedNative([0] * 40, TOKENS)
    queue = ResultQueue(native)
    native._step()
    assert [queue.GenerateStatus() for _ in range(9)] == [Status.Generating] * 9
    assert ids_of(queue.Get()) == TOKENS[:1]
    native.run_to_the_end()
    assert queue.GenerateStatus() == Status.Generating
    assert ids_of(queue.Get()) == TOKENS[1:]
    assert queue.GenerateStatus() == Status.GenerateFinished
    assert queue.Get() is None


@pytest.fixture(scope="module")
def running(checkpoint):
    from allspark.dashinfer_compat.engine import Engine

    engine, _ = start_engine(checkpoint, engine_type=Engine)
    yield engine
    engine.stop_model("m")


def start(engine, config=GREEDY):
    status, handle, queue = engine.start_request_ids("m", None, [1, 2, 3], config)
    assert status.name == "ALLSPARK_SUCCESS", engine.last_error()
    return handle, queue


def wait_for_the_end(queue):
    """Without fetching, and without asking for the status as scripts do."""
    while not queue.finished:
        time.sleep(0.001)


@pytest.mark.parametrize("loop", [documented_loop, benchmark_loop, worker_loop, patient_loop])
def test_a_request_that_ended_before_the_first_question_is_read(running, loop):
    handle, queue = start(running)
    wait_for_the_end(queue)
    assert len(loop(queue, None)) == GREEDY["max_new_tokens"]
    assert queue.GenerateStatus() == Status.GenerateFinished
    running.release_request("m", handle)


@pytest.mark.parametrize("how", ["one", "list", "all"])
def test_after_sync_request_the_status_is_that_of_the_request(running, how):
    handle, queue = start(running)
    running.sync_request("m", {"one": handle, "list": [handle], "all": None}[how])
    assert queue.GenerateStatus() == Status.GenerateFinished
    assert running.get_request_status("m", queue) == Status.GenerateFinished
    assert len(running.get_wait("m", queue)) == GREEDY["max_new_tokens"]
    assert running.get_wait("m", queue) == running.get_no_wait("m", queue) == []
    running.release_request("m", handle)
    assert queue.GenerateStatus() == Status.GenerateFinished


def test_waiting_for_all_leaves_readers_alone(running):
    """A thread that reads in turns loses nothing when another one calls sync_request."""
    native = SteppedNative([0] * 40, TOKENS)
    queue = ResultQueue(native)
    running._queues["m", -1] = queue
    native._step()
    assert ids_of(queue.Get()) == TOKENS[:1]
    native.run_to_the_end()
    handle, unread = start(running)
    running.sync_request("m", None)
    assert unread.GenerateStatus() == Status.GenerateFinished
    assert documented_loop(queue, native) == TOKENS[1:]
    running.release_request("m", handle)


def test_requests_may_start_while_others_are_waited_for():
    from allspark.dashinfer_compat.engine import Engine

    engine = Engine()
    ids, ends = itertools.count(), threading.Event()

    def started(*arguments):
        queue = ResultQueue(SteppedNative([0], TOKENS))
        queue._native.request_id = next(ids)
        return AsStatus.ALLSPARK_SUCCESS, None, queue

    engine._requests.start = started

    def start_all():
        queues = collections.deque(maxlen=1000)
        while not ends.is_set():
            queues.append(engine.start_request_ids("m", None, [1])[2])

    thread = threading.Thread(target=start_all)
    thread.start()
    try:
        for _ in range(1000):
            engine._queues_of("m", None)
    finally:
        ends.set()
        thread.join()


def test_sync_request_that_gives_up_says_nothing_of_the_end(running):
    assert running.unload_device_mem("m").name == "ALLSPARK_SUCCESS"  # the request waits meanwhile
    handle, queue = start(running)
    assert running.sync_request("m", handle, timeout_ms=0).name == "ALLSPARK_RUNTIME_ERROR"
    assert queue._end_is_known is False
    running.load_device_mem("m")
    running.release_request("m", handle)
