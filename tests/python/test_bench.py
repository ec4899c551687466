"""The command `bench`: figures are exact, requests reproducible, and failures counted."""

from __future__ import annotations

import argparse
import asyncio
import csv
import heapq
import io
import json
import re
import resource
import subprocess
import sys

import pytest

pytest.importorskip("allspark._allspark")
pytest.importorskip("httptools")

import allspark  # noqa: E402
from allspark.bench import cases as bench_cases  # noqa: E402
from allspark.bench import connection as bench_connection  # noqa: E402
from allspark.bench.cases import Case, measure  # noqa: E402
from allspark.bench.dataset import read_requests  # noqa: E402
from allspark.bench.load import Load, Run, run_load  # noqa: E402
from allspark.bench.metrics import (  # noqa: E402
    errors,
    figures,
    gaps,
    latencies,
    percentile,
    summary,
    time_per_token,
)
from allspark.bench.openai_target import Asking, OpenAITarget, body_of  # noqa: E402
from allspark.bench.outcome import Outcome, RequestFailed  # noqa: E402
from allspark.bench.report import Measurement, notes, tables  # noqa: E402
from allspark.bench.workload import (  # noqa: E402
    Lengths,
    Request,
    poisson_arrivals,
    random_requests,
    vocabulary_of,
)
from allspark.cli import bench as bench_command  # noqa: E402
from allspark.cli import main  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.remote.address import Address  # noqa: E402
from allspark.remote.events import Delta, EventReader, LineReader, delta_of, usage_of  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support.fake_openai import (  # noqa: E402
    STREAM,
    FakeClock,
    FakeServer,
    cut,
    delta,
    ended_early,
    usage,
)
from support.http_server import RunningServer  # noqa: E402
from support.ports import kept_port  # noqa: E402

# Figures.


def test_gaps_of_tokens_that_came_together_are_zero():
    assert gaps([1.0, 1.5, 3.0], 3) == [0.5, 1.5]
    assert gaps([1.0, 1.5, 3.0], 5) == [0.5, 1.5, 0.0, 0.0]
    assert gaps([1.0], 1) == [] and gaps([1.0], 3) == [0.0, 0.0]
    assert gaps([1.0, 2.0], 1) == [1.0]  # more chunks than tokens


def test_time_per_token_is_of_those_after_the_first():
    assert time_per_token([1.0, 2.0, 4.0], 4) == 1.0
    assert time_per_token([1.0], 4) is None and time_per_token([1.0, 2.0], 1) is None


def test_percentiles_are_interpolated_between_ranks():
    values = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(values, each) for each in (0, 50, 75, 100)] == [10.0, 25.0, 32.5, 40.0]
    assert percentile([7.0], 99) == 7.0
    assert summary("x", values) == {
        "x_mean": 25.0, "x_min": 10.0, "x_p50": 25.0, "x_p75": 32.5,
        "x_p95": pytest.approx(38.5), "x_p99": pytest.approx(39.7), "x_max": 40.0,
    }  # fmt: skip
    assert set(summary("x", []).values()) == {None}


OUTCOMES = [
    Outcome(4, due=0.0, sent=0.0, end=2.0, times=[0.5, 1.0, 2.0], prompt_tokens=7, output_tokens=4),
    # Without usage: a chunk is a token.
    Outcome(2, due=1.0, sent=1.25, end=4.5, times=[2.0, 4.0]),
    Outcome(9, due=2.0, sent=2.0, end=5.0, times=[3.0], error="HTTP 429:\n\tno\x1b"),
    # A server that counts fewer tokens than it sends chunks; and an answer without output.
    Outcome(2, due=2.0, sent=2.0, end=4.0, times=[3.0, 4.0], prompt_tokens=1, output_tokens=1),
    Outcome(1, due=3.0, sent=3.0, end=4.0, prompt_tokens=2, output_tokens=0),
]


def test_figures_of_outcomes():
    assert latencies(OUTCOMES) == {
        "ttft_ms": [500.0, 1000.0, 1000.0],
        "tpot_ms": [500.0, 2000.0],
        "gap_ms": [500.0, 1000.0, 0.0, 2000.0, 1000.0],
        "e2e_ms": [2000.0, 3500.0, 2000.0, 1000.0],
    }
    values = figures(OUTCOMES, client_cpu_s=1.0)
    expected = {
        "requests": 5, "completed": 4, "failed": 1, "duration_s": 5.0, "rps": 0.8, "rpm": 48.0,
        "input_tokens": 10, "output_tokens": 7, "input_tok_s": 2.0, "output_tok_s": 1.4,
        "total_tok_s": 3.4, "ttft_ms_p50": 1000.0, "ttft_ms_min": 500.0, "gap_ms_p75": 1000.0,
        "e2e_ms_mean": 2125.0, "chunks": 7, "tokens_per_chunk": 1.0, "without_usage": 1,
        "more_chunks_than_tokens": 1, "without_output": 1, "shorter_than_asked": 2,
        "late_ms_max": 250.0, "client_cpu_s": 1.0, "client_cpu_share": 0.2,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert errors(OUTCOMES) == {"HTTP 429:\n\tno\x1b": 1}


def test_a_run_in_which_all_failed_has_no_latencies():
    values = figures([Outcome(1, error="x", end=0.0)])
    assert values["rps"] is None and values["ttft_ms_p50"] is None and values["failed"] == 1


def test_notes_say_what_a_reader_should_know():
    run = Run(OUTCOMES, client_cpu_s=4.5)
    found = notes(Measurement.of_run({"concurrency": 2}, run))
    assert found == [
        "1 failed: HTTP 429: no\ufffd",
        "1 of 4 answers have no output",
        "1 of 4 answers have no usage: their tokens are counted as chunks",
        "1 of 4 answers came in more chunks than the usage has tokens",
        "2 of 4 answers are shorter than they were allowed to be",
        "1.00 tokens in a chunk: 7 tokens by the counts, 7 chunks with output",
        "requests were sent at most 250.0 ms late",
        "the client took 90 % of a core",
        "WARNING: the client was as busy as it can be; it limits these figures",
    ]
    measured = Measurement.of_run({}, run, peak_rss_mb=5.4)
    assert notes(measured)[-3] == "this process has taken at most 5 MB so far"
    text = tables([Measurement.of_run({"rate": None, "concurrency": 2}, run, peak_rss_mb=5.0)])
    assert re.search(r"^concurrency 2 +4 +1 +5.00 +0.800 +48.00 +2.00 +1.40 +3.40$", text, re.M)
    assert re.search(r"^concurrency 2  TTFT +833.3 +500.0 +1000 ", text, re.M)


# Streams of events.

EVENTS = b": hello\n\ndata: 1\n\nevent: x\r\ndata:2\r\ndata: 3\r\n\r\nid: 4\n\ndata: [DONE]\n\n"


@given(st.lists(st.integers(0, len(EVENTS)), max_size=8).map(sorted))
def test_events_may_be_cut_anywhere(cuts):
    reader, found = EventReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(EVENTS)], strict=True):
        found += reader.feed(EVENTS[begin:end])
    assert found == [b"1", b"2\n3", b"[DONE]"] and reader.end() == []


@given(st.lists(st.integers(0, 24), max_size=4).map(sorted))
def test_lines_may_be_cut_anywhere(cuts):
    text, reader, found = b': hello\n\n{"a": 1}\r\n{"b":2}', LineReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.feed(text[begin:end])
    assert found + reader.end() == [b'{"a": 1}', b'{"b":2}'] and reader.end() == []


def test_a_stream_may_end_without_an_empty_line():
    reader = EventReader()
    assert reader.feed(b"data: 1\n") == [] and reader.end() == [b"1"]
    assert reader.feed(b"data: 2") == [] and reader.end() == [b"2"]


@pytest.mark.parametrize(
    "chunk, expected",
    [
        (delta("a"), Delta("a", "", True, None)),
        (delta("", role="assistant"), Delta()),
        (delta(None, "stop"), Delta("", "", False, "stop")),
        (delta(reasoning_content="r"), Delta("", "r", True, None)),
        (delta(reasoning="r"), Delta("", "r", True, None)),
        (delta(tool_calls=[{"index": 0}]), Delta("", "", True, None)),
        ({"choices": [{"text": "t", "finish_reason": "length"}]}, Delta("t", "", True, "length")),
        ({"choices": [{"message": {"content": "m"}}]}, Delta("m", "", True, None)),
        (usage(1, 2), Delta()),
        ({}, Delta()),
    ],
)
def test_what_a_chunk_adds(chunk, expected):
    assert delta_of(chunk) == expected


def test_usage():
    details = {"prompt_tokens_details": {"cached_tokens": 3}}
    counts = {"prompt_tokens": 7, "completion_tokens": 2, **details}
    assert usage_of({"usage": counts}) == (7, 2, 3)
    odd = {"prompt_tokens": "7", "prompt_tokens_details": None}
    assert usage_of({"usage": odd}) == (None, None, None)
    assert usage_of({"usage": None}) is None and usage_of({}) is None


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("h:8000/", "http://h:8000/v1"),
        ("https://h/openai/v1/", "https://h/openai/v1"),
        ("http://[::1]:5/v1", "http://[::1]:5/v1"),
        ("https://h:443", "https://h/v1"),
        ("http://h/a b/\u00e9%20/v1", "http://h/a%20b/%C3%A9%20/v1"),
    ],
)
def test_addresses(url, expected):
    assert Address.parse(url).url == expected


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://h", "http://h:99999", "http://h?x=1", "http://me:x@h"]
)
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="the URL"):
        Address.parse(url)


# Requests.


def test_lengths():
    assert Lengths.parse("7") == Lengths(7, 7) and str(Lengths.parse("3:5")) == "3:5"
    for text in ("0", "5:3", "x", "1:", "-1:4"):
        with pytest.raises(ValueError, match="must be N or LOW:HIGH"):
            Lengths.parse(text)


def test_arrivals_are_poisson_and_reproducible():
    found = poisson_arrivals(4, 2.0, seed=0)
    # RandomState is frozen: these never change.
    assert found == pytest.approx([0.0, 0.7272603282, 0.8164151534, 0.9611484816])
    assert found == poisson_arrivals(4, 2.0, seed=0) != poisson_arrivals(4, 2.0, seed=1)
    many = poisson_arrivals(20001, 4.0, seed=3)
    between = [after - before for before, after in zip(many, many[1:], strict=False)]
    mean = sum(between) / len(between)
    variance = sum((gap - mean) ** 2 for gap in between) / len(between)
    assert mean == pytest.approx(0.25, rel=0.03) and variance == pytest.approx(0.0625, rel=0.06)
    assert poisson_arrivals(0, 1.0, 0) == [] and poisson_arrivals(1, 1.0, 0) == [0.0]


def test_random_requests_are_reproducible():
    sizes = (Lengths(2, 5), Lengths(1, 3))
    found = random_requests(50, *sizes, 7, [10, 11, 12])
    assert found == random_requests(50, *sizes, 7, [10, 11, 12])
    assert found != random_requests(50, *sizes, 8, [10, 11, 12])
    assert found != random_requests(50, *sizes, 7, [10, 11, 12], "warm-up")
    assert {len(each.prompt) for each in found} == {2, 3, 4, 5}
    assert {each.num_output for each in found} == {1, 2, 3}
    assert {token for each in found for token in each.prompt} == {10, 11, 12}
    texts = random_requests(2, *sizes, 7)
    assert [each.prompt for each in texts] == [
        "end question father game", "system line man hand case",
    ]  # fmt: skip


def test_random_ids_are_no_special_tokens(demo_model):
    from allspark.pipeline.model_source import open_tokenizer

    tokenizer = open_tokenizer(str(demo_model))
    ids = vocabulary_of(tokenizer)
    assert ids and not {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()} & {*ids}


def conversation(*turns):
    return {"conversations": [{"from": who, "value": value} for who, value in turns]}


def test_conversations_of_sharegpt(tmp_path):
    path = tmp_path / "share.json"
    usual = [
        conversation(("human", f"q{i} b c d"), ("gpt", "w " * (4 + i)), ("human", "more"))
        for i in range(6)
    ]
    others = [
        conversation(("human", "short"), ("gpt", "w w w w")),
        conversation(("human", "w " * 1025), ("gpt", "w w w w")),
        conversation(("human", "w " * 1000), ("gpt", "w " * 1049)),
        conversation(("gpt", "w w w w"), ("human", "w w w w")),
        conversation(("human", "alone")),
    ]
    path.write_text(json.dumps(others + usual))

    def read(count=99, seed=0, **more):
        return read_requests(str(path), count, seed, Lengths(9, 9), **more)

    def count(text):
        return len(text.split())

    found = read(count_tokens=count)
    assert sorted((each.prompt, each.num_output) for each in found) == [
        (f"q{i} b c d", 4 + i) for i in range(6)
    ]
    assert found == read(count_tokens=count) != read(seed=1, count_tokens=count)
    assert read(count=2, count_tokens=count) == found[:2]
    # Without a tokenizer nobody knows how long an answer is.
    assert len(read()) == 9 and {each.num_output for each in read()} == {9}
    given = read(count_tokens=count, is_output_given=True)
    assert given == [Request(each.prompt, 9) for each in found]
    path.write_text(json.dumps([{**each, "max_tokens": 7} for each in others + usual]))
    assert read(count_tokens=count) == [Request(each.prompt, 7) for each in found]


def test_prompts_of_json_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "m"}]
    lines = [{"prompt": "a", "max_tokens": 3}, {"messages": messages}]
    path.write_text("\ufeff" + "\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    found = read_requests(str(path), 9, 0, Lengths(5, 5))
    assert sorted(found, key=str) == sorted([Request("a", 3), Request(messages, 5)], key=str)
    given = read_requests(str(path), 9, 0, Lengths(5, 5), is_output_given=True)
    assert {each.num_output for each in given} == {5}


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", r"x.json:1 is no JSON"),
        ('{"prompt": "a"}\nx', r"x.json:2 is no JSON"),
        ("[1]", r"x.json\[0\] is a int; it must be"),
        ("[1", r"x.json is no JSON"),
        ('{"question": "a"}', "has the fields question; it must be"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0; it must be an integer above 0"),
        ('{"messages": ["a"]}', "messages must be a list of objects"),
        ('{"conversations": [{"role": "a"}]}', 'must have "from" and "value"'),
        ('{"prompt": "a"}\n{"prompt": "\\ud800"}', "x.json:2 has a lone surrogate"),
        ("\xff", "x.json: byte 0 is 0xff .*; the file must be a text in UTF-8"),
        ("", "has no request"),
    ],
)
def test_files_that_are_no_dataset(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        read_requests(str(path), 9, 0, Lengths(5, 5))


# The load, in a time that goes on only where all wait for it.


class VirtualTime:
    def __init__(self):
        self.now = 0.0
        self._sleepers = []

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, len(self._sleepers), future))
        await future

    async def run(self, work):
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(50):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                self.now, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    future.set_result(None)
        return task.result()


class SlowTarget:
    """A request takes as many seconds as it has output tokens; one of 13 fails halfway."""

    def __init__(self, time):
        self._time = time
        self.num_running = self.most_running = 0

    async def serve(self, request, outcome, now):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self._time.sleep(request.num_output / 2)
            if request.num_output == 13:
                raise RequestFailed("unlucky")
            await self._time.sleep(request.num_output / 2)
            outcome.times.append(now())
        finally:
            self.num_running -= 1


def run_virtually(seconds, load):
    time = VirtualTime()
    target = SlowTarget(time)
    requests = [Request("", each) for each in seconds]
    ended = []
    work = run_load(target, requests, load, lambda: ended.append(time.now), time, time.sleep)
    run = asyncio.run(time.run(work))
    assert ended == sorted(each.end for each in run.outcomes)
    return target, run.outcomes


def test_concurrency_bounds_what_runs():
    target, outcomes = run_virtually([4, 13, 2, 2], Load(concurrency=2))
    assert target.most_running == 2
    assert [(each.due, each.sent, each.end) for each in outcomes] == [
        (0, 0, 4), (0, 0, 6.5), (4, 4, 6), (6, 6, 8),
    ]  # fmt: skip
    assert [each.error for each in outcomes] == [None, "unlucky", None, None]


def test_requests_are_sent_when_they_are_due():
    target, outcomes = run_virtually([4, 4, 2], Load(due=[0.0, 1.0, 1.5]))
    assert target.most_running == 3
    assert [(each.due, each.sent, each.end) for each in outcomes] == [
        (0, 0, 4), (1, 1, 5), (1.5, 1.5, 3.5),
    ]  # fmt: skip


def test_what_a_bound_holds_back_waits_since_it_was_due():
    target, outcomes = run_virtually([4, 4, 2], Load(concurrency=1, due=[0.0, 1.0, 1.5]))
    assert target.most_running == 1
    assert [(each.due, each.sent, each.end) for each in outcomes] == [
        (0, 0, 4), (1, 4, 8), (1.5, 8, 10),
    ]  # fmt: skip
    assert latencies(outcomes)["ttft_ms"] == [4000, 7000, 8500]


@pytest.mark.parametrize("load", [Load(3), Load(due=[0.0, 0.0, 0.0])])
def test_a_fault_of_the_target_ends_the_run(load):
    ended = []

    class Broken:
        async def serve(self, request, outcome, now):
            if request.num_output == 1:
                await asyncio.sleep(0)
                raise ZeroDivisionError
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(request.num_output)

    async def run():
        with pytest.raises(ZeroDivisionError):
            await run_load(Broken(), [Request("", each) for each in (2, 1, 3)], load)

    asyncio.run(run())
    assert sorted(ended) == [2, 3]


# A server that says what the test wants.


def ask(server, requests=1, concurrency=1, clock=None, **asking):
    """The outcomes of some requests."""
    target = OpenAITarget(Address.parse(server.url), {}, Asking("m", **asking))
    prompts = [Request(f"prompt {index}", 4) for index in range(requests)]
    more = {} if clock is None else {"clock": clock}

    async def run():
        try:
            return await run_load(target, prompts, Load(concurrency), **more)
        finally:
            await target.close()

    return asyncio.run(run()).outcomes


def test_chunks_have_the_times_at_which_they_came():
    clock = FakeClock()

    def answer(request, connection):
        connection.send(STREAM)
        clock.at(0.5, lambda: connection.event(delta("", role="assistant")))
        clock.at(1.0, lambda: connection.event(delta("a")))
        clock.at(1.25, lambda: connection.event(delta("b c")))
        clock.at(2.0, lambda: connection.event(delta(None, "length")))
        clock.at(2.5, lambda: connection.event(usage(9, 4)))
        clock.at(3.0, connection.finish)

    with FakeServer(answer) as server:
        (outcome,) = ask(server, clock=clock)
    assert outcome == Outcome(4, 0.0, 0.0, 3.0, [1.0, 1.25], 9, 4)
    values = figures([outcome])
    assert (values["ttft_ms_p50"], values["e2e_ms_p50"]) == (1000, 3000)
    assert values["tpot_ms_p50"] == pytest.approx(250 / 3)
    assert values["gap_ms_max"] == 250 and values["tokens_per_chunk"] == 2
    assert server.requests[0]["path"] == "/v1/chat/completions"
    assert server.requests[0]["body"] == {
        "model": "m", "max_tokens": 4, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "prompt 0"}],
    }  # fmt: skip


def test_events_of_one_read_came_together():
    clock = FakeClock()

    def answer(request, connection):
        connection.send(STREAM)
        both = b"\n\ndata: ".join(json.dumps(delta(text)).encode() for text in "ab")
        clock.at(1.0, lambda: connection.event(both))
        clock.at(2.0, lambda: connection.event(delta("c", "stop")))
        connection.finish()

    with FakeServer(answer) as server:
        (outcome,) = ask(server, clock=clock)
    assert outcome.times == [1.0, 1.0, 2.0] and outcome.output_tokens is None
    assert outcome.num_output == 3


def good(request, connection):
    connection.send(STREAM)
    connection.event(delta("a", "stop"))
    connection.event(usage(2, 1))
    connection.finish()


def failed_within(request, connection):
    connection.send(STREAM)
    connection.event(delta("a"))
    connection.event({"error": {"message": "out of memory", "code": 503}})
    connection.finish()


def nonsense(request, connection):
    connection.send(STREAM)
    connection.event(b"{nonsense")
    connection.finish()


def another_form(request, connection):
    connection.send(STREAM)
    connection.event({"choices": ["a"]})
    connection.finish()


def no_http(request, connection):
    connection.send(b"220 mail.example ESMTP\r\n\r\n")


def gone(request, connection):
    connection.close()


def cut_head(request, connection):
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-")
    connection.close()


def whole(status, body, kind="application/json"):
    return lambda request, connection: connection.whole(status, body, kind)


FAILURES = [
    (whole(401, {"error": {"message": "no such key"}}), "HTTP 401: no such key"),
    (whole(429, {"detail": "too many"}), "HTTP 429: too many"),
    (whole(500, b"<h1>oops</h1>", "text/html"), "HTTP 500: <h1>oops</h1>"),
    (whole(503, b""), "HTTP 503: no reason is given"),
    (whole(200, b"<h1>hi</h1>", "text/html; charset=utf-8"),
     "the answer is text/html; charset=utf-8, not a stream of events"),
    (whole(200, {"choices": []}), "the answer is application/json, not a stream of events"),
    (cut, "the connection ended in the middle of the answer"),
    (ended_early, "the stream ended before the answer did"),
    (failed_within, "in the stream: out of memory"),
    (nonsense, "the server sent what is no JSON object: '{nonsense'"),
    (another_form, "the server sent choices of another form: ['a']"),
    (no_http, "the answer is no HTTP: "),
    (gone, "the server closed the connection without an answer"),
    (cut_head, "the server closed the connection without an answer"),
]  # fmt: skip


@pytest.mark.parametrize("answer, message", FAILURES)
def test_failures_are_counted_and_explained(answer, message):
    """Every other request fails, and touches none of the others."""

    def every_other(request, connection):
        number = int(request["body"]["messages"][0]["content"].split()[1])
        (answer if number % 2 else good)(request, connection)

    with FakeServer(every_other) as server:
        outcomes = ask(server, requests=8, concurrency=3)
    failures = [each.error for each in outcomes[1::2]]
    assert all(each.startswith(message) for each in failures), failures
    assert [(each.error, each.output_tokens) for each in outcomes[::2]] == [(None, 1)] * 4
    values = figures(outcomes)
    assert (values["completed"], values["failed"], values["output_tokens"]) == (4, 4, 4)


def test_a_server_that_is_away():
    with kept_port() as port:
        server = type("Away", (), {"url": f"http://127.0.0.1:{port}"})
        (outcome,) = ask(server)
    assert outcome.error.startswith("cannot connect: ")


def test_a_request_has_a_time_limit(monkeypatch):
    open_one = bench_connection.Connections._open

    async def open_slowly(self, limit):
        return await open_one(self, limit._replace(end=limit.end + 60))

    # A limit that ends before there is a connection says so in other words.
    monkeypatch.setattr(bench_connection.Connections, "_open", open_slowly)

    def silent(request, connection):
        connection.send(STREAM)
        connection.event(delta("a"))
        connection.sock.recv(1)  # until the client closes

    with FakeServer(silent) as server:
        outcomes = ask(server, requests=2, concurrency=2, timeout=0.05)
    assert [each.error for each in outcomes] == ["no whole answer within 0.05 s"] * 2


def test_connections_are_kept():
    with FakeServer(good) as server:
        outcomes = ask(server, requests=9, concurrency=3)
    assert errors(outcomes) == {} and 1 <= server.num_connections <= 3


def test_a_connection_is_not_used_again_before_its_answer_has_ended():
    received = []

    def answer(request, connection):
        if len(server.requests) > 1:
            good(request, connection)
            return
        connection.send(STREAM)
        connection.event({"error": {"message": "no memory"}})
        received.append(connection.sock.recv(1))
        connection.close()

    with FakeServer(answer) as server:
        outcomes = ask(server, requests=2)
    assert [each.error for each in outcomes] == ["in the stream: no memory", None]
    assert received == [b""] and server.num_connections == 2


def test_a_connection_that_was_closed_meanwhile_is_opened_anew(monkeypatch):
    def answer(request, connection):
        good(request, connection)
        connection.close()

    monkeypatch.setattr(bench_connection, "_STALE_S", 60.0)  # the server's thread may be late
    with FakeServer(answer) as server:
        outcomes = ask(server, requests=5)
    assert errors(outcomes) == {} and server.num_connections == 5


@pytest.mark.parametrize("stale_s, sent", [(0.0, b""), (60.0, b"HTTP/1.1 2")])
def test_a_request_that_the_server_has_had_is_not_sent_again(stale_s, sent, monkeypatch):
    """It has had it where the connection is lost late, or in the middle of an answer."""

    def answer(request, connection):
        if len(server.requests) == 1:
            good(request, connection)
        elif len(server.requests) == 2:
            connection.send(sent)
            connection.close()
        else:
            good(request, connection)

    monkeypatch.setattr(bench_connection, "_STALE_S", stale_s)
    with FakeServer(answer) as server:
        outcomes = ask(server, requests=3)
    message = "the server closed the connection without an answer"
    assert [each.error for each in outcomes] == [None, message, None]
    assert len(server.requests) == 3 and server.num_connections == 2


def test_a_second_connection_is_part_of_the_time_limit(monkeypatch):
    """The limit begins before a connection is looked for."""
    limits = []

    async def exchange(self, data, reader, limit):
        limits.append(limit)
        if len(limits) == 2:
            raise bench_connection.Stale("closed")

    monkeypatch.setattr(bench_connection.Connection, "exchange", exchange)

    with FakeServer(good) as server:
        outcomes = ask(server, requests=2, timeout=50.0)
    assert errors(outcomes) == {} and len(limits) == 3
    assert limits[1] == limits[2] != limits[0] and limits[1].seconds == 50.0


def test_answers_without_a_length_and_with_interim_heads():
    def answer(request, connection):
        connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        connection.send(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(delta("a")).encode())
        connection.close()

    with FakeServer(answer) as server:
        outcomes = ask(server, requests=2)
    assert [(each.error, len(each.times)) for each in outcomes] == [(None, 1)] * 2


def test_whole_answers_have_no_first_token():
    body = {"choices": [{"text": "a b"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    with FakeServer(whole(200, body)) as server:
        (outcome,) = ask(server, is_streamed=False, endpoint="completions")
    assert (outcome.times, outcome.prompt_tokens, outcome.output_tokens) == ([], 3, 2)
    assert server.requests[0]["path"] == "/v1/completions"
    assert "stream_options" not in server.requests[0]["body"]
    values = figures([outcome])
    assert values["ttft_ms_p50"] is None and values["e2e_ms_p50"] > 0


def test_whole_answers_without_usage_are_not_counted():
    def answer(request, connection):
        text = "a b" if len(server.requests) == 1 else ""
        connection.whole(200, {"choices": [{"message": {"content": text}}]})

    with FakeServer(answer) as server:
        outcomes = ask(server, requests=2, is_streamed=False)
    found = notes(Measurement.of_run({}, Run(outcomes, 0.0)))
    assert found[:3] == [
        "1 of 2 answers have no output",
        "2 of 2 answers have neither usage nor chunks: their tokens are not counted",
        "the client took 0 % of a core",
    ]
    with FakeServer(whole(200, {"choices": ["a"]})) as server:
        (outcome,) = ask(server, is_streamed=False)
    assert outcome.error == "the server sent choices of another form: ['a']"


def test_chunks_do_not_say_that_an_answer_is_short():
    """Without usage: a chunk may hold several tokens."""
    assert figures([Outcome(9, end=1.0, times=[0.5, 1.0])])["shorter_than_asked"] == 0


def test_bodies():
    extra = {"max_tokens": None, "top_k": 3, "temperature": 1}
    body = body_of(Request([5, 6], 8), Asking("m", "completions", False, extra))
    assert body == {"model": "m", "prompt": [5, 6], "temperature": 1, "stream": False, "top_k": 3}
    messages = [{"role": "system", "content": "s"}]
    assert body_of(Request(messages, 8), Asking("m"))["messages"] == messages


# The commands.


@pytest.fixture(scope="module")
def server(demo_model):
    model = ServedModel.open(str(demo_model), name="demo")
    with RunningServer([model], api_keys=("a key",)) as running:
        yield f"127.0.0.1:{running.port}"
    model.close()


def bench_server(server, *arguments, key="a key"):
    return main(["bench", "serve", "--base-url", server, "--api-key", key, *arguments])


RESULT = {
    "type": "object",
    "required": ["benchmark", "version", "date", "settings", "measurements"],
    "properties": {
        "measurements": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["of", "values", "errors", "requests"],
                "properties": {
                    "values": {"additionalProperties": {"type": ["number", "null"]}},
                    "errors": {"additionalProperties": {"type": "integer"}},
                    "requests": {
                        "type": "array",
                        "items": {
                            "additionalProperties": {"type": ["number", "null", "string"]},
                            "required": [
                                "due_s", "sent_s", "first_s", "last_s", "end_s", "chunks",
                                "prompt_tokens", "output_tokens", "asked_tokens", "error",
                            ],
                        },
                    },
                },
            },
        }
    },
}  # fmt: skip


def test_serve_measures_a_server(server, tmp_path, capsys):
    jsonschema = pytest.importorskip("jsonschema")
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "png")}
    arguments = ["-n", "6", "-c", "1", "3", "--input-len", "5:9", "--output-len", "4",
                 "--ignore-eos", "--json", str(files["json"]), "--csv", str(files["csv"]),
                 "--plot", str(files["png"])]  # fmt: skip
    assert bench_server(server, *arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"^concurrency 3 +6 +0 ", out, re.M) and "TTFT" in out
    record = json.loads(files["json"].read_text())
    jsonschema.validate(record, RESULT)
    assert [each["of"]["concurrency"] for each in record["measurements"]] == [1, 3]
    for each in record["measurements"]:
        values = each["values"]
        assert (values["completed"], values["output_tokens"], each["errors"]) == (6, 24, {})
        assert values["shorter_than_asked"] == values["without_usage"] == 0
        assert 0 < values["chunks"] <= 24
        for request in each["requests"]:
            assert 0 <= request["due_s"] <= request["sent_s"] <= request["first_s"]
            assert request["first_s"] <= request["last_s"] <= request["end_s"]
    assert "a key" not in files["json"].read_text()
    assert record["settings"]["seed"] == 0 and record["settings"]["input_len"] == "5:9"
    assert record["settings"]["model"] == "demo" and record["version"] == allspark.__version__
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert [row["concurrency"] for row in rows] == ["1", "3"]
    assert {"benchmark", "rate", *record["measurements"][0]["values"]} == {*rows[0]} - {
        "concurrency"
    }
    assert float(rows[0]["output_tok_s"]) == record["measurements"][0]["values"]["output_tok_s"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_serve_sends_ids_at_a_rate(server, demo_model, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--endpoint", "completions", "--tokenizer", str(demo_model), "--request-rate",
                 "200", "-n", "5", "--input-len", "7", "--output-len", "3"]  # fmt: skip
    assert bench_server(server, *arguments, "--model", "demo", "--json", str(path)) == 0
    (measurement,) = json.loads(path.read_text())["measurements"]
    assert [each["prompt_tokens"] for each in measurement["requests"]] == [7] * 5
    dues = [each["due_s"] for each in measurement["requests"]]
    assert dues == poisson_arrivals(5, 200.0, 0)


def test_serve_sends_conversations(server, demo_model, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "What is 3+4?"}]}\n')
    arguments = ["--dataset", str(path), "--no-stream", "--output-len", "64"]
    assert bench_server(server, *arguments) == 0
    found = capsys.readouterr()
    assert "prompts.jsonl gives 1 of 100 requests" in found.err
    assert "1 of 1 answers are shorter than they were allowed to be" in found.out
    assert bench_server(server, *arguments, "--endpoint", "completions") == 1
    assert "--endpoint completions takes texts" in capsys.readouterr().err
    # A random prompt of ids is sent to chat as its text.
    chat = ("--tokenizer", str(demo_model), "-n", "2", "--input-len", "4", "--output-len", "2")
    assert bench_server(server, *chat) == 0


def parts_of_a_file(tmp_path, num_prompts, num_lines):
    """The prompts of four measurements over a file of so many lines."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(num_lines)))
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    arguments = ["--base-url", "x", "--dataset", str(path), "-n", str(num_prompts),
                 "-c", "1", "2", "--request-rate", "5", "9"]  # fmt: skip
    cases = bench_command._serve_cases(parser.parse_args(["serve", *arguments]))
    return [[request.prompt for request in case.requests] for case in cases]


def test_no_request_of_a_file_is_in_two_measurements(tmp_path, capsys):
    """A prefix cache would know it."""
    parts = parts_of_a_file(tmp_path, num_prompts=3, num_lines=12)
    assert [len(part) for part in parts] == [3] * 4 and len({*sum(parts, [])}) == 12
    assert capsys.readouterr().err == ""


def test_measurements_share_a_short_file_evenly(tmp_path, capsys):
    parts = parts_of_a_file(tmp_path, num_prompts=3, num_lines=11)
    assert [len(part) for part in parts] == [2] * 4 and len({*sum(parts, [])}) == 8
    expected = "prompts.jsonl gives 2 of 3 requests for each of 4 measurements"
    assert expected in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"gives 3 request\(s\); 4 measurements need at least as"):
        parts_of_a_file(tmp_path, num_prompts=3, num_lines=3)


def test_tls(demo_model, tmp_path, capsys, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
               "-nodes", "-days", "2", "-subj", "/CN=here", "-addext",
               "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/set temperature 0\nWhat is 3+4?\n\n"))
    model = ServedModel.open(str(demo_model), name="demo")
    with RunningServer([model], ssl_keyfile=str(key), ssl_certfile=str(certificate)) as running:
        url = f"https://127.0.0.1:{running.port}"
        command = ["bench", "serve", "--base-url", url, "-n", "1", "--output-len", "2"]
        assert main([*command, "--model", "demo"]) == 1
        assert "certificate verify failed" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert main(command) == 0
        assert main(["client", url]) == 0
        assert capsys.readouterr().out.endswith("3 + 4 = 7\n")
    model.close()


def test_a_wrong_key_is_an_error_before_anything_is_measured(server, capsys):
    assert bench_server(server, key="wrong") == 1
    assert "/v1/models: 401: the key is missing or wrong" in capsys.readouterr().err
    assert bench_server(server, "--model", "demo", key="wrong") == 1
    found = capsys.readouterr()
    assert "which are not counted, failed: HTTP 401" in found.err and found.out == ""


def test_a_measurement_without_an_answer_is_a_failure(server, capsys):
    """Without a warm-up every request is counted."""
    assert bench_server(server, "--model", "other", "--warm-up", "0", "-n", "3") == 1
    assert "3 failed: HTTP 404: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--base-url", "ftp://x"], "the URL is 'ftp://x'"),
        (["--base-url", "127.0.0.1:1"], "no server at http://127.0.0.1:1/v1"),
        (["--json", "/no/such/folder/x"], "--json is '/no/such/folder/x'; there is no such"),
        (["--csv", "/tmp"], "--csv is '/tmp', which is a folder"),
        (["--plot", "x.html"], "--plot is 'x.html'; its ending must be one of"),
        (["--dataset", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["--api-key", "a\nb"], "the API key must be printable ASCII"),
    ],
)
def test_serve_says_what_is_wrong(arguments, message, capsys):
    given = [] if "--base-url" in arguments else ["--base-url", "127.0.0.1:1", "--model", "m"]
    assert main(["bench", "serve", *given, *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-c", "0"], "0 is not at least 1"),
        (["--warm-up", "-1"], "-1 is not at least 0"),
        (["-n", "many"], "argument -n/--num-prompts: 'many' is no integer"),
        (["--timeout", "soon"], "'soon' is no number above 0"),
        (["--request-rate", "-1"], "'-1' is no number above 0"),
        (["--request-rate", "inf"], "'inf' is no number above 0"),
        (["--input-len", "4:2"], "'4:2' must be N or LOW:HIGH"),
        (["--extra-body", "[1]"], "argument --extra-body: '[1]' is no JSON object"),
        (["--extra-body", "{"], "argument --extra-body: '{' is no JSON: "),
    ],
)
def test_serve_refuses_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", "--base-url", "127.0.0.1:1", *arguments])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_more_connections_than_files(monkeypatch, capsys):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    away = ("--base-url", "127.0.0.1:1", "--model", "m")
    assert main(["bench", "serve", *away, "-c", "500"]) == 1
    assert "need 564 open files; this process may have 512" in capsys.readouterr().err
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: limits.append(found))
    bench_cases.allow_connections(448)
    bench_cases.allow_connections(100)
    bench_cases.allow_connections(500, is_bound=False)
    assert limits == [(512, 512)] * 2


@pytest.mark.parametrize(
    "module, arguments, message",
    [
        ("httptools", [], "bench serve needs the extra 'serve' (docs/quick_start.md#inst"),
        ("matplotlib.figure", ["--plot", "x.png"], "--plot needs matplotlib: pip install"),
    ],
)
def test_what_is_not_installed_is_named(module, arguments, message, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("openai_target", "connection"):
        monkeypatch.delitem(sys.modules, f"allspark.bench.{name}", raising=False)
    assert main(["bench", "serve", "--base-url", "127.0.0.1:1", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_latency_measures_a_model(demo_model, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["-c", "1", "2", "-pt", "3", "9", "-ct", "5", "-tr", "2", "--json", str(path)]
    assert main(["bench", "latency", str(demo_model), *arguments]) == 0
    assert "concurrency 2, prompt 9, output 5" in capsys.readouterr().out
    found = json.loads(path.read_text())["measurements"]
    assert [tuple(each["of"].values()) for each in found] == [
        (1, 3, 5), (1, 9, 5), (2, 3, 5), (2, 9, 5),
    ]  # fmt: skip
    for each in found:
        num = 2 * each["of"]["concurrency"]
        values = each["values"]
        assert (values["completed"], values["output_tokens"]) == (num, 5 * num)
        assert values["input_tokens"] == num * each["of"]["prompt"] and values["peak_rss_mb"] > 1
        assert values["shorter_than_asked"] == 0


@pytest.mark.parametrize("kind", ["latency", "throughput"])
@pytest.mark.parametrize("speculation", [["--prompt-lookup-num-tokens", "8"],
    ["--speculative-algorithm", "ngram", "--speculative-num-draft-tokens", "8"]])  # fmt: skip
def test_what_a_model_drafts_and_adapts_is_measured(
    demo_model, repo_root, tmp_path, monkeypatch, kind, speculation
):
    fields = []
    start = allspark.Engine.start_request_ids

    def start_seen(self, name, model, ids, config):
        fields.append(config)
        return start(self, name, model, ids, config)

    monkeypatch.setattr(allspark.Engine, "start_request_ids", start_seen)
    adapters = ["--adapters", f"threes={repo_root}/examples/demo_adapter"]
    path = tmp_path / "out.json"
    sizes = {"latency": ["-pt", "9", "-ct", "5"], "throughput": ["-n", "2", "--output-len", "5"]}
    arguments = ["bench", kind, str(demo_model), *sizes[kind], "-c", "1", "--json", str(path)]
    assert main([*arguments, *speculation, *adapters]) == 0
    assert {config["prompt_lookup_num_tokens"] for config in fields} == {8}
    assert {config["lora_name"] for config in fields} == {"threes"}
    assert json.loads(path.read_text())["settings"]["adapter_name"] == "threes"
    fields.clear()
    assert main(arguments) == 0
    assert {config["prompt_lookup_num_tokens"] for config in fields} == {0}
    assert not any("lora_name" in config for config in fields)
    assert main([*arguments, *adapters, "--adapter-name", "other"]) == 1


def test_latency_says_what_is_wrong(demo_model, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "latency", str(demo_model), "-pt", "1", "2", "-ct", "1", "2", "3"])
    assert "--prompt-tokens has 2 numbers and --completion-tokens 3" in capsys.readouterr().err
    many = ("-pt", "100", "-ct", "100", "--session-len", "150")
    assert main(["bench", "latency", str(demo_model), *many]) == 1
    assert "have 200 tokens; the model's length is 150" in capsys.readouterr().err
    assert main(["bench", "latency", "/no/such/model"]) == 1
    assert "/no/such/model" in capsys.readouterr().err


def test_throughput_measures_a_model(demo_model, tmp_path, capsys):
    path, dataset = tmp_path / "out.json", tmp_path / "share.json"
    turns = [conversation(("human", "What is 3+4? " * 3), ("gpt", "3 + 4 = 7")) for _ in range(4)]
    dataset.write_text(json.dumps(turns))
    more = ["--session-len", "512", "--json", str(path)]
    for arguments in (["-n", "6", "--input-len", "4:9", "--output-len", "2:3"],
                      ["-n", "4", "--dataset", str(dataset)]):  # fmt: skip
        assert main(["bench", "throughput", str(demo_model), "-c", "3", *arguments, *more]) == 0
        (found,) = json.loads(path.read_text())["measurements"]
        values = found["values"]
        assert values["failed"] == values["shorter_than_asked"] == 0
        assert values["completed"] == int(arguments[1]) and values["rpm"] > 0


def test_a_prompt_that_is_too_long_fails_alone(demo_model, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hi"}\n' + json.dumps({"prompt": "hi " * 200}) + "\n")
    arguments = ["--dataset", str(path), "--session-len", "64", "--output-len", "4"]
    assert main(["bench", "throughput", str(demo_model), *arguments]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^concurrency 64 +1 +1 ", out, re.M) and "1 failed: " in out


def test_what_was_measured_before_the_user_ended_it_is_reported(monkeypatch, capsys, demo_model):
    made = []

    async def measure_once(target, cases, done, *more):
        await measure(target, cases[:1], done)
        made.append(cases)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_cases, "measure", measure_once)
    arguments = ["-c", "1", "2", "-pt", "3", "-ct", "2"]
    assert main(["bench", "latency", str(demo_model), *arguments]) == 130
    found = capsys.readouterr()
    assert "concurrency 1, prompt 3" in found.out and "concurrency 2" not in found.out
    assert "ended by the user" in found.err


def test_a_warm_up_is_not_counted():
    served = []

    class Target:
        async def serve(self, request, outcome, now):
            served.append(request.prompt)

        async def close(self):
            served.append("closed")

    done = []
    case = Case({"a": 1}, [Request("counted", 1)], Load(1), [Request("warm", 1)] * 2)
    asyncio.run(measure(Target(), [case], done.append, more=lambda: {"extra": 2.0}))
    assert served == ["warm", "warm", "counted", "closed"]
    assert done[0].values["requests"] == 1 and done[0].values["extra"] == 2.0
