"""Streams on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import weakref

import numpy as np
import pytest
from allspark import AsStatus, CompletionSet
from allspark._allspark import ByteLevelText, ByteLevelVocabulary, EventForm, TextStreams
from allspark.aio import _Dispatcher, wait_end
from engine_fixture import GREEDY, StepwiseRequest, start_engine


@pytest.fixture
def running(checkpoint):
    engine, _ = start_engine(checkpoint, engine_max_batch=64, token_mask_timeout_ms=10**6)
    return engine


async def stream(engine, ids, config):
    _, handle, queue = engine.start_request_ids("m", None, ids, config)
    tokens = []
    async for elements in queue:
        tokens += elements.ids_from_generate
    engine.release_request("m", handle)
    assert queue.finished and len(tokens) == queue.GeneratedLength()
    return tokens


def test_a_stream_gives_every_token_in_order(running):
    async def main():
        first = await stream(running, [1, 2, 3], GREEDY)
        second = await stream(running, [1, 2, 3], GREEDY)
        return first, second

    first, second = asyncio.run(main())
    assert first == second and len(first) == 8


@pytest.mark.parametrize("queue", [None, 7, object()])
def test_a_set_takes_queues_alone(queue):
    with pytest.raises(TypeError, match="queue is a .*; it must be a ResultQueue"):
        CompletionSet().attach(queue)


def test_a_set_reads_every_token_of_its_queues_once(running):
    """Also those that come between its look at a queue's status and that at its tokens."""
    completions = CompletionSet()
    queues, found = {}, {}
    for index in range(300):
        config = {"do_sample": False, "max_new_tokens": 1 + index % 7}
        _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], config)
        queues[queue.request_id] = handle, queue
        completions.attach(queue if index % 2 else queue._native)
    poller = select.poll()
    poller.register(completions.fileno(), select.POLLIN)
    ended = set()
    while len(ended) < len(queues):
        assert poller.poll(60_000), "nothing comes"
        for request_id, ids, num_cached, elements, is_end in read(completions):
            assert elements is None and num_cached >= 0
            if request_id in ended:  # its end may be told again
                assert is_end and not ids
                continue
            found.setdefault(request_id, []).extend(ids)
            if is_end:
                ended.add(request_id)
                assert len(found[request_id]) == queues[request_id][1].GeneratedLength()
    longest = max(found.values(), key=len)
    assert len(longest) == 7
    assert all(ids == longest[: len(ids)] for ids in found.values())
    for request_id, (_, queue) in queues.items():
        assert queue._native.read() == (request_id, [], 0, None, True)


# Bytes of é and of € alone, too: many tokens make no text until the next one.
LETTERS = ["a", "\u00c3", "\u00a9", "\u00e2", "\u0124", "\u00ac", "!"]  # GPT-2's for bytes
VOCABULARY = ByteLevelVocabulary([LETTERS[i % 7] for i in range(64)], [9])
SILENT = [14, 15]
LONG = {"temperature": 100.0, "top_k": 0, "max_new_tokens": 100}


def read(completions, texts=None):
    """What changed, all of it."""
    return iter(completions.read(texts).next, None)


def text_of(ids):
    whole = ByteLevelText(VOCABULARY, True)
    return whole.put([i for i in ids if i not in SILENT]) + whole.flush()


class Stream:
    """A request with what was told of it, or offered."""

    def __init__(self, engine, texts, seed, with_ids):
        self.start(engine, {**LONG, "seed": seed})
        self.native = self.queue._native
        self.with_ids = with_ids
        self.pieces = []
        self.ids = []
        self.has_ended = False
        texts.add(self.native, ByteLevelText(VOCABULARY, True), SILENT, with_ids=with_ids)

    def start(self, engine, config):
        _, self.handle, self.queue = engine.start_request_ids("m", None, [1, 2, 3], config)

    def put(self, news):
        if len(news) <= 2:
            assert not self.has_ended and len(news) == 1 + self.with_ids
            assert news[-1]  # no step without text, or ids, is told
            self.add(*news)
        elif self.has_ended:
            assert news == [[], 0, None, True]
        else:
            ids, num_cached, elements, is_end, text, num_written = news
            assert is_end and elements is None and num_cached >= 0
            self.add(text, ids[num_written:])
            self.has_ended = True
            if not self.with_ids:
                assert num_written == 0

    def add(self, text, ids=()):
        self.pieces.append(text)
        self.ids += ids

    def offer(self, event):
        shown = json.loads(event)
        assert set(shown) == ({"text", "ids"} if self.with_ids else {"text"})
        self.add(**shown)
        return True


class Stepwise(Stream):
    """One that is read while it runs, however slow the reader is: its next token comes when `go_on`
    is called after the one before it was told, or offered and taken."""

    NUM_TOKENS = 10
    is_due = True

    def start(self, engine, config):
        config["max_new_tokens"] = self.NUM_TOKENS
        self.request = StepwiseRequest(engine, [1, 2, 3], **config)
        self.handle, self.queue = self.request.handle, self.request.queue

    def add(self, text, ids=()):
        super().add(text, ids)
        self.is_due = True

    def go_on(self):
        if self.is_due:
            self.is_due = False
            self.request.go_on()

    def check(self):
        assert len(self.pieces) >= len(self.ids) == self.NUM_TOKENS
        assert "".join(self.pieces) == text_of(self.ids)


def run(streams, completions, texts, stepwise):
    """Reads until all have ended."""
    stepwise.go_on()
    by_id = {stream.queue.request_id: stream for stream in streams}
    poller = select.poll()
    poller.register(completions.fileno(), select.POLLIN)
    while not all(stream.has_ended for stream in streams):
        assert poller.poll(60_000), "nothing comes"
        for request_id, *news in read(completions, texts):
            by_id[request_id].put(news)
        stepwise.go_on()


def test_a_set_reads_the_text_of_streams_that_are_nothing_else(running):
    completions, texts = CompletionSet(), TextStreams()
    stepwise = Stepwise(running, texts, 0, True)
    # So many that some of them, too, are usually read while they run.
    streams = [Stream(running, texts, seed, seed % 2 == 1) for seed in range(600)]
    for stream in [stepwise, *streams]:
        completions.attach(stream.native)
    run([stepwise, *streams], completions, texts, stepwise)
    stepwise.check()
    for stream in streams:
        assert len(stream.ids) == LONG["max_new_tokens"]
        assert "".join(stream.pieces) == text_of(stream.ids)
    assert len({tuple(stream.ids) for stream in streams}) > 50

    stream = streams.pop()
    texts.add(stream.native, ByteLevelText(VOCABULARY, True), SILENT)
    texts.remove(stream.native)
    texts.remove(stream.native)  # a second call has no effect
    completions.attach(stream.native)
    assert [len(news) for news in read(completions, texts)] == [5]
    handles = [each.handle for each in (stepwise, stream, *streams)]
    running.release_request("m", handles)


FORMS = EventForm('{"text":', None, "}"), EventForm('{"text":', ',"ids":', "}")


def test_events_are_offered_and_what_is_not_taken_waits(running):
    completions, texts = CompletionSet(), TextStreams()
    slow = []  # do not take every event

    class Slow(Stream):
        is_free = True

        def offer(self, event):
            if not self.is_free:
                assert self not in slow, "offered before it is resumed"
                slow.append(self)
                return False
            self.is_free = False
            return super().offer(event)

    class SlowAndStepwise(Slow, Stepwise):
        def offer(self, event):
            is_taken = super().offer(event)
            if not is_taken:
                slow.insert(0, slow.pop())  # the next to be resumed
            return is_taken

    stepwise = SlowAndStepwise(running, texts, 0, True)
    streams = [
        (Slow if seed % 3 == 0 else Stream)(running, texts, seed, seed % 2 == 1)
        for seed in range(600)
    ]
    streams.insert(0, stepwise)
    for number, stream in enumerate(streams):
        if number % 5:  # the others begin with what is told
            texts.write_events(stream.native, FORMS[stream.with_ids], stream.offer)
        completions.attach(stream.native)
    by_id = {stream.queue.request_id: stream for stream in streams}
    poller = select.poll()
    poller.register(completions.fileno(), select.POLLIN)
    num_resumed = 0
    stepwise.go_on()
    while not all(stream.has_ended for stream in streams):
        assert poller.poll(60_000), "nothing comes"
        for request_id, *news in read(completions, texts):
            stream = by_id[request_id]
            stream.put(news)
            texts.write_events(stream.native, FORMS[stream.with_ids], stream.offer)
        for stream in slow[::2]:
            slow.remove(stream)
            stream.is_free = True
            size = len(stream.pieces)
            texts.resume(stream.native)
            # One event with all that waited; nothing where the end has told it.
            assert len(stream.pieces) == size + (not stream.has_ended)
            num_resumed += stream is stepwise
        stepwise.go_on()
    stepwise.check()
    streams.remove(stepwise)
    for stream in streams:
        assert len(stream.ids) == LONG["max_new_tokens"]
        assert "".join(stream.pieces) == text_of(stream.ids)
    # Its first token was told, the second one taken, and the last one perhaps told with the end.
    assert num_resumed >= Stepwise.NUM_TOKENS - 3
    running.release_request("m", [stream.handle for stream in [stepwise, *streams]])


def test_an_event_that_cannot_be_offered_is_told(running):
    class Broken(Stream):
        def offer(self, event):
            texts.remove(self.native)  # a stream may go while it is read
            raise ValueError("it broke")

        def put(self, news):
            self.has_ended = True
            if len(news) == 1:
                errors.append(news[0])

    class BrokenAndStepwise(Broken, Stepwise): ...

    completions, texts, errors = CompletionSet(), TextStreams(), []
    streams = [BrokenAndStepwise(running, texts, 0, True)]
    streams += [Broken(running, texts, seed, True) for seed in range(600)]
    for stream in streams:
        texts.write_events(stream.native, FORMS[1], stream.offer)
        completions.attach(stream.native)
    run(streams, completions, texts, streams[0])
    assert errors and all(type(each) is ValueError for each in errors)
    assert {str(each) for each in errors} == {"it broke"}
    errors.clear()
    for stream in streams:
        texts.remove(stream.native)
    running.release_request("m", [stream.handle for stream in streams])
    references = [weakref.ref(stream) for stream in streams]
    del streams, stream
    assert not any(reference() for reference in references)


def test_a_stream_has_one_form_of_events(running):
    texts = TextStreams()
    stream = Stream(running, texts, 2, False)
    with pytest.raises(ValueError, match="form: .* must both have ids, or both have none"):
        texts.write_events(stream.native, FORMS[1], stream.offer)
    texts.remove(stream.native)
    texts.write_events(stream.native, FORMS[0], stream.offer)  # no effect: it is none of them
    texts.resume(stream.native)
    assert not stream.pieces
    running.release_request("m", stream.handle)


def test_the_end_and_the_tokens_of_one_queue_may_be_waited_for(running):
    async def main(end_first):
        config = {"do_sample": False, "max_new_tokens": 30}
        _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], config)
        tokens = []

        async def read():
            async for elements in queue:
                tokens.extend(elements.ids_from_generate)

        async def end():
            await wait_end(queue._native)
            assert queue.finished and queue.GeneratedLength() == 30

        await asyncio.gather(*((end(), read()) if end_first else (read(), end())))
        await wait_end(queue._native)  # of what has ended: at once
        running.release_request("m", handle)
        return tokens

    first, second = (asyncio.run(main(end_first)) for end_first in (False, True))
    assert first == second and len(first) == 30


def test_a_queue_is_attached_for_its_end_until_another_wants_its_tokens(running):
    class Recorder:
        def attach(self, queue, only_end):
            calls.append(only_end)

    calls = []
    _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], GREEDY)
    loop = asyncio.new_event_loop()
    dispatcher = _Dispatcher(loop)
    dispatcher._completions = Recorder()
    for only_end in (True, True, False, False, True):
        dispatcher._attach(queue._native, only_end)
    assert calls == [True, False]
    loop.close()
    running.release_request("m", handle)


@pytest.mark.parametrize("second", ["reads", "gives up"])
def test_one_queue_may_be_read_on_two_loops(running, second):
    config = {"do_sample": False, "max_new_tokens": 8}
    running.unload_device_mem("m")
    _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], config)
    loops = [asyncio.new_event_loop() for _ in range(2)]
    reads = [loop.create_task(queue.get()) for loop in loops]

    def finish(index):
        return loops[index].run_until_complete(asyncio.wait_for(reads[index], 30))

    for loop in loops:  # now both wait
        loop.run_until_complete(asyncio.sleep(0))
    if second == "gives up":
        reads[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            finish(1)
    running.load_device_mem("m")
    running.sync_request("m", handle)
    found = [finish(1), finish(0)] if second == "reads" else [finish(0)]
    assert [len(elements.ids_from_generate) for elements in found if elements] == [8]
    for loop in loops:
        loop.close()
    running.release_request("m", handle)


def test_a_queue_may_be_read_on_two_loops_in_turn(running):
    running.unload_device_mem("m")
    _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], GREEDY)
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def begin_to_read():
        read = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)

    for loop in (*loops, loops[0]):
        loop.run_until_complete(begin_to_read())
    read = loops[0].create_task(queue.get())
    loops[0].run_until_complete(asyncio.sleep(0))
    running.load_device_mem("m")
    elements = loops[0].run_until_complete(asyncio.wait_for(read, 30))
    assert elements.ids_from_generate
    for loop in loops:
        loop.close()
    running.release_request("m", handle)


def test_what_comes_beside_tokens_is_read_as_elements(running):
    config = {"do_sample": False, "max_new_tokens": 3, "logprobs": True}
    _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], config)
    running.sync_request("m", handle)
    _, ids, _, elements, is_end = queue._native.read()
    assert is_end and len(ids) == 3 == len(elements.token_logprobs_list)
    assert elements.ids_from_generate == ids
    running.release_request("m", handle)


def test_a_thousand_streams_with_random_stops_on_one_loop(running):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, size=rng.integers(1, 30)).tolist() for _ in range(20)]

    async def one(index, action):
        ids = prompts[index % len(prompts)]
        _, handle, queue = running.start_request_ids(
            "m", None, ids, {"do_sample": False, "max_new_tokens": 1 + index % 13}
        )
        tokens = []
        async for elements in queue:
            tokens += elements.ids_from_generate
            if action == 1:
                running.stop_request("m", handle)
            elif action == 2:
                running.release_request("m", handle)
                action = 3
        if action != 3:
            assert running.release_request("m", handle) == AsStatus.ALLSPARK_SUCCESS
        assert queue.finished
        return index, tokens, action

    async def main():
        expected = [
            await stream(running, ids, {"do_sample": False, "max_new_tokens": 13})
            for ids in prompts
        ]
        results = await asyncio.gather(*(one(i, int(rng.integers(3))) for i in range(1000)))
        return expected, results

    expected, results = asyncio.run(main())
    assert len(results) == 1000
    for index, tokens, action in results:
        assert tokens == expected[index % len(prompts)][: len(tokens)]
        if action == 0:
            assert len(tokens) == 1 + index % 13
    assert running.get_as_engine_stat("m").used_span == 0


def test_cancelling_a_task_leaves_the_request_to_the_caller(running):
    async def main():
        _, handle, queue = running.start_request_ids("m", None, [1], {"max_new_tokens": 500})
        task = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # it may have had its tokens already
            await task
        running.release_request("m", handle)
        async for _ in queue:
            pass
        return queue.finish_reason

    assert asyncio.run(main()) in ("cancelled", "length")


def test_two_loops_in_two_threads_and_two_engines(checkpoint, running):
    other, _ = start_engine(checkpoint)

    async def main():
        a = [stream(running, [1, 2], GREEDY) for _ in range(20)]
        b = [stream(other, [1, 2], GREEDY) for _ in range(20)]
        return await asyncio.gather(*a, *b)

    import threading

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    flat = [tokens for result in results for tokens in result]
    assert len(flat) == 80 and all(tokens == flat[0] for tokens in flat)


def test_a_stream_of_the_server_that_raises_is_told_no_more(running):
    from allspark.serve.hub import Hub, Watched

    async def main():
        failure = asyncio.get_running_loop().create_future()

        def changed():
            raise RuntimeError("it broke")

        _, handle, queue = running.start_request_ids("m", None, [1, 2, 3], GREEDY)
        hub = Hub.current()
        hub.watch(Watched(queue, lambda news: True, changed, failure.set_result))
        assert str(await failure) == "it broke"
        running.release_request("m", handle)
        return hub._watched

    assert asyncio.run(main()) == {}
