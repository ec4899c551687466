"""Limits for requests: deadlines, priorities, and starts when too many wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time

import pytest
from allspark import AsStatus, CompletionSet, GenerateRequestStatus
from engine_fixture import (
    GREEDY,
    MAX_LENGTH,
    VOCAB_SIZE,
    install_engine,
    read_all,
    start_endless,
    start_engine,
)
from support.waiting import wait_until

OK = AsStatus.ALLSPARK_SUCCESS


def test_a_deadline_ends_a_request_with_what_it_has(checkpoint):
    engine, _ = start_engine(checkpoint)
    whole = {"do_sample": False, "max_new_tokens": MAX_LENGTH - 3}
    _, _, queue = engine.start_request_ids("m", None, [1, 2, 3], whole)
    tokens = read_all(queue)
    assert queue.finish_reason == "length"
    # Many requests, so that they take longer than a millisecond on any machine.
    timed = {**whole, "timeout_ms": 1}
    queues = [engine.start_request_ids("m", None, [1, 2, 3], timed)[2] for _ in range(64)]
    for queue in queues:
        ids = read_all(queue)
        assert ids == tokens[: len(ids)]
        assert queue.GenerateStatus() == GenerateRequestStatus.GenerateFinished
    assert queues[-1].finish_reason == "deadline" and queues[-1].error is None
    assert engine.sync_request("m", timeout_ms=10000) == OK
    assert engine.get_as_engine_stat("m").used_span == 0


def test_a_larger_priority_begins_earlier(checkpoint):
    engine, _ = start_engine(checkpoint, engine_max_batch=1, token_mask_timeout_ms=10**6)
    running = start_endless(engine)
    # They run one after another, and so end in the order in which they begin.
    ended, priorities, found = CompletionSet(), {}, []
    for priority in (0, 3, -3, 7):
        config = {**GREEDY, "max_new_tokens": 20, "priority": priority}
        _, _, queue = engine.start_request_ids("m", None, [1, 2], config)
        ended.attach(queue, only_end=True)
        priorities[queue.request_id] = queue, priority
    assert engine.release_request("m", running) == OK

    def have_all_ended():
        found.extend(priorities[request_id][1] for request_id in ended.drain())
        return len(found) == 4

    wait_until(have_all_ended)
    assert found == [7, 3, 0, -3]


class FullQueue:
    """One request runs until it is stopped; one more waits, and `room` more may."""

    def __init__(self, checkpoint, policy="block", room=0):
        self.engine, self.loader = start_engine(
            checkpoint, engine_max_batch=1, max_waiting_requests=1 + room,
            queue_full_policy=policy, token_mask_timeout_ms=10**6,
        )  # fmt: skip
        running = start_endless(self.engine)
        status, waiting, _ = self.engine.start_request_ids("m", None, [1, 2], GREEDY)
        assert status == OK, self.engine.last_error()
        # End the waiting one first, so that it never runs.
        self.handles = [waiting, *running]

    def make_room(self):
        assert self.engine.release_request("m", self.handles) == OK

    def end_and_expect_that_nothing_ran(self):
        self.make_room()
        assert self.engine.sync_request("m", timeout_ms=30000) == OK
        while True:  # A released request exists until the engine's own thread has ended it.
            stat = self.engine.get_as_engine_stat("m")
            if stat.blocked_request == stat.pending_request == stat.running_request == 0:
                break
            time.sleep(0.001)
        assert stat.total_generated_token == 0, "a request ran that was withdrawn"

    def num_blocked(self):
        return self.engine.get_as_engine_stat("m").blocked_request

    def start_threads(self, count):
        """Starts this many threads that wait for room, and collects their results."""
        results = []
        threads = [
            threading.Thread(
                target=lambda: results.append(
                    (*self.engine.start_request_ids("m", None, [1], GREEDY),
                     self.engine.last_error())
                )
            )
            for _ in range(count)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        while self.num_blocked() < count:
            time.sleep(0.001)
        return threads, results


def join_all(threads):
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_start_waits_for_room(checkpoint):
    full = FullQueue(checkpoint)
    threads, results = full.start_threads(3)
    assert not results
    full.make_room()
    join_all(threads)
    assert [(status, len(read_all(queue))) for status, _, queue, _ in results] == [(OK, 8)] * 3


def test_a_stop_denies_starts_that_wait(checkpoint):
    full = FullQueue(checkpoint)
    threads, results = full.start_threads(3)
    assert full.engine.stop_model("m") == OK
    join_all(threads)
    for status, handle, _, message in results:
        # There may have been room before all were ended.
        assert status == OK or (handle is None and "stopping" in message), message


def test_a_deadline_ends_the_wait(checkpoint):
    full = FullQueue(checkpoint)
    config = {**GREEDY, "timeout_ms": 20}
    status, handle, queue = full.engine.start_request_ids("m", None, [1], config)
    assert status == AsStatus.ALLSPARK_REQUEST_DENIED and handle is queue is None
    assert "timeout_ms was over" in full.engine.last_error()
    assert full.num_blocked() == 0


@contextlib.contextmanager
def interrupted_where_it_blocks(full):
    """Ctrl-C comes once a start waits for room."""

    def interrupt():
        while full.num_blocked() == 0:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, old)


def test_ctrl_c_ends_the_wait(checkpoint):
    full = FullQueue(checkpoint)
    with interrupted_where_it_blocks(full):
        full.engine.start_request_ids("m", None, [1], GREEDY)
    assert full.num_blocked() == 0


def test_ctrl_c_leaves_none_of_several_requests(checkpoint):
    full = FullQueue(checkpoint, room=1)  # of two sequences the second waits
    with interrupted_where_it_blocks(full):
        full.engine.start_request_ids("m", None, [1], {"max_new_tokens": 8, "n": 2})
    full.end_and_expect_that_nothing_ran()


def test_an_event_loop_is_not_blocked(checkpoint):
    full = FullQueue(checkpoint)
    order = []

    async def stream(number):
        status, handle, queue = await full.engine.start_request_ids_async(
            "m", None, [1, number], GREEDY
        )
        assert status == OK, full.engine.last_error()
        order.append(number)
        tokens = [token async for elements in queue for token in elements.ids_from_generate]
        full.engine.release_request("m", handle)
        return len(tokens)

    async def main():
        streams = asyncio.gather(*[stream(number) for number in range(20)])
        while full.num_blocked() == 0:
            await asyncio.sleep(0)
        assert not order
        full.make_room()
        return await streams

    assert asyncio.run(main()) == [8] * 20
    assert order == list(range(20))


def test_a_cancelled_start_leaves_no_request(checkpoint):
    full = FullQueue(checkpoint)

    async def main():
        starts = [
            asyncio.create_task(full.engine.start_request_ids_async("m", None, [1], GREEDY))
            for _ in range(8)
        ]
        while full.num_blocked() == 0:
            await asyncio.sleep(0)
        for start in starts:
            start.cancel()
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)

    asyncio.run(main())
    full.end_and_expect_that_nothing_ran()


@pytest.mark.parametrize("end", ["release", "delete"])
def test_a_model_has_one_thread_of_starts_until_it_ends(checkpoint, end):
    engine, _ = start_engine(checkpoint)
    before = set(threading.enumerate())

    async def main():
        for index in range(10):
            status, _, queue = await engine.start_request_ids_async("m", None, [1], GREEDY)
            assert status == OK and len(read_all(queue)) == 8
            unknown = engine.start_request_ids_async(f"unknown {index}", None, [1], GREEDY)
            status, handle, queue = await unknown
            assert status == AsStatus.ALLSPARK_PARAM_ERROR and handle is queue is None
            assert f"unknown {index}" in engine.last_error()

    asyncio.run(main())
    [thread] = set(threading.enumerate()) - before
    if end == "release":
        assert engine.stop_model("m") == engine.release_model("m") == OK
    else:
        del engine, main
        gc.collect()
    join_all([thread])


def test_an_async_start_says_why_it_failed(checkpoint):
    full = FullQueue(checkpoint, policy="refuse")

    async def main():
        return await full.engine.start_request_ids_async("m", None, [1, 2], GREEDY)

    status, handle, queue = asyncio.run(main())
    assert status == AsStatus.ALLSPARK_REQUEST_DENIED and handle is queue is None
    assert "max_waiting_requests is 1" in full.engine.last_error()


def test_tensors_of_all_requests_are_bounded(checkpoint):
    engine, _ = start_engine(checkpoint, max_output_tensor_bytes=4 * VOCAB_SIZE * 4)
    config = {**GREEDY, "output_logits": "generation"}
    status, _, _ = engine.start_request_ids("m", None, [1], config)
    assert status == AsStatus.ALLSPARK_REQUEST_DENIED
    assert engine.last_error() == (
        f"the output tensors of this request take {8 * VOCAB_SIZE * 4} bytes, beside 0 of others; "
        f"max_output_tensor_bytes is {4 * VOCAB_SIZE * 4}"
    )
    status, _, queue = engine.start_request_ids("m", None, [1], {**config, "max_new_tokens": 4})
    assert status == OK and len(read_all(queue)) == 4


def test_a_bad_policy_is_refused(checkpoint):
    with pytest.raises(ValueError, match="queue_full_policy is .drop."):
        install_engine(checkpoint, queue_full_policy="drop")
