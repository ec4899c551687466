"""The server against clients that send nonsense, are slow, or go away."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

pytest.importorskip("fastapi")

from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve import connection, text_work  # noqa: E402
from support.chats import SUM  # noqa: E402
from support.http_server import CHAT, COMPLETIONS, RunningServer, error_of, paused  # noqa: E402
from support.raw_http import Raw, post, request  # noqa: E402
from support.versions import is_before  # noqa: E402
from support.waiting import num_requests, wait_for_requests, wait_until  # noqa: E402

ASK = post(CHAT, messages=SUM, temperature=0)
ENDLESS = {"messages": SUM, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(demo_model):
    model = ServedModel.open(str(demo_model), EngineConfig(max_batch_size=4), "demo")
    yield model
    model.close()


@pytest.fixture(scope="module")
def hasty(model):
    """A server that gives a client half a second."""
    with RunningServer([model], client_timeout=0.5) as server:
        yield server


def text_of(answer):
    return answer.json()["choices"][0]["message"]["content"]


def sent(server, data, receive_buffer=None):
    """A connection whose data lies there when the server takes it: a hasty one would not wait for
    a thread of the test that stands still between connecting and sending."""
    with server.held():
        return Raw(server.port, receive_buffer).send(data)


def wait_until_idle(server, model):
    """Nothing of the requests is left, and the server answers."""
    wait_until(lambda: server.server.state.num_running == 0 and num_requests(model) == 0)
    with sent(server, ASK) as raw:
        assert text_of(raw.answer()) == "12 + 35 = 47"


# What is no request.


def numbered(value):
    """Short names of tests whose parameters are long."""
    return "bytes" if isinstance(value, (bytes, dict)) else str(value)[:20]


def says_that_it_closes(answer) -> bool:
    if is_before("uvicorn", 0, 54):  # Older ones close and say nothing, at least up to 0.52.
        return answer.headers.get("connection") == "close"
    return answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    "data, status, message",
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "no HTTP"),  # TLS to a port without it
        (b"hello\r\n\r\n", 400, "no HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "no HTTP"),
        (request("GET", "/health", version="3.7"), 400, "no HTTP"),
        (request("BREW", "/health"), 400, "no HTTP"),
        (b"GET /v1/models/\xff HTTP/1.1\r\nhost: a\r\n\r\n", 400, "no HTTP"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n", 400, "no HTTP"),
        (request("POST", CHAT, b"{}", transfer_encoding="chunked"), 400, "no HTTP"),
        (request("POST", CHAT, b"{}", content_length=-1), 400, "no HTTP"),
        (request("POST", CHAT, b"{}", content_length=10**30), 400, "no HTTP"),
        (request("POST", CHAT, b"{}", content_length=None, transfer_encoding="chunked"), 400, ""),
        (request("POST", CHAT, b"{}", content_length=10**10), 413, "the bound is 33554432"),
        (ASK.replace(b"content-length: ", b"content-length: 2\r\nx: "), 400, "no JSON"),
        (request("POST", CHAT, b"\x1f\x8b", content_encoding="gzip"), 415, "'gzip'"),
        (request("GET", "/health", **{f"x{i}": "y" for i in range(3000)}), 431, "16384"),
        (request("GET", "/health", x="y" * 2_000_000), 431, "65536"),
        (request("GET", "/" + "y" * 2_000_000), 431, "65536"),
        (request("GET", "/v1/models/%ff%00%0d%0a"), 404, ""),
    ],
    ids=numbered,
)
def test_what_is_no_request_is_refused(server, monkeypatch, data, status, message):
    # A client that stands still while it sends finds its connection open.
    monkeypatch.setattr(connection, "LINGER_S", 60)
    with Raw(server.port) as raw:
        answer = raw.send(data).answer()
        assert answer.status == status, answer
        assert message in answer.json()["error"]["message"]
        if status == 400:
            assert says_that_it_closes(answer) or raw.is_closed()
    assert server.client.get("/health").status_code == 200


def test_an_offer_of_another_protocol_is_not_taken(server):
    """Java's HTTP client offers HTTP/2 in every request."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAA"}
    ask = post(CHAT, messages=SUM, temperature=0, headers=offer)
    head, _, body = ask.partition(b"\r\n\r\n")
    chunked = head.replace(b"content-length", b"transfer-encoding: chunked\r\nx-length")
    with Raw(server.port) as raw:
        assert text_of(raw.send(ask).answer()) == "12 + 35 = 47"
        raw.send(head + b"\r\n\r\n")
        for i in range(0, len(body), 40):
            raw.send(body[i : i + 40])
        assert text_of(raw.answer()) == "12 + 35 = 47"
        raw.send(chunked + b"\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        assert text_of(raw.answer()) == "12 + 35 = 47"
        assert raw.send(request("GET", "/health", **offer)).answer().status == 200
        assert text_of(raw.send(ASK).answer()) == "12 + 35 = 47"


def test_requests_in_any_form(server):
    with Raw(server.port) as raw:  # one byte at a time, after empty lines
        for byte in b"\r\n\r\n" + ASK:
            raw.send(bytes([byte]))
        assert text_of(raw.answer()) == "12 + 35 = 47"
        body = ASK.partition(b"\r\n\r\n")[2]
        chunked = request("POST", CHAT, b"", transfer_encoding="chunked")
        raw.send(chunked + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert text_of(raw.answer()) == "12 + 35 = 47"
    with Raw(server.port) as raw:
        answer = raw.send(ASK.replace(b"HTTP/1.1", b"HTTP/1.0")).answer()
        assert text_of(answer) == "12 + 35 = 47"
        assert says_that_it_closes(answer) or is_before("uvicorn", 0, 54)
        assert raw.is_closed()


def test_methods(server):
    with Raw(server.port) as raw:
        for path in ("/health", "/v1/models", "/metrics", "/openapi.json"):
            whole = raw.send(request("GET", path)).answer()
            head = raw.send(request("HEAD", path)).answer(has_body=False)
            assert head.status == 200
            assert head.headers["content-type"] == whole.headers["content-type"]
        answer = raw.send(request("HEAD", CHAT)).answer(has_body=False)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert raw.send(request("TRACE", "/health")).answer().headers["allow"] == "GET"


def test_a_page_of_another_origin_reads_errors(server, model):
    client, origin = server.client, {"origin": "http://a"}
    asked = {**origin, "access-control-request-method": "POST"}
    assert client.options(CHAT, headers=asked).headers["access-control-allow-origin"] == "*"
    with RunningServer([model], api_keys=("k",)) as guarded:
        assert guarded.client.options(CHAT, headers=asked).status_code == 200
        answer = guarded.client.get("/v1/models", headers=origin)
        assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_pages_of_other_origins_may_do_what_flags_say(model):
    flags = {"allow_origins": ["http://a"], "allow_methods": ["GET"], "allow_headers": ["x-own"]}
    asked = {
        "origin": "http://a",
        "access-control-request-method": "GET",
        "access-control-request-headers": "x-own",
    }
    others = {
        "origin": "http://b",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-other",
    }
    with RunningServer([model], **flags, allow_credentials=True) as server:
        allowed = server.client.options("/v1/models", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://a"
        assert allowed.headers["access-control-allow-credentials"] == "true"
        for name, value in others.items():
            refused = server.client.options("/v1/models", headers={**asked, name: value})
            assert refused.status_code == 400, name
        answer = server.client.get("/v1/models", headers={"origin": "http://a"})
        assert answer.headers["access-control-allow-origin"] == "http://a"
        answer = server.client.get("/v1/models", headers={"origin": "http://b"})
        assert "access-control-allow-origin" not in answer.headers
    with RunningServer([model], **flags) as server:
        allowed = server.client.options("/v1/models", headers=asked)
        assert "access-control-allow-credentials" not in allowed.headers


def test_a_body_that_was_not_asked_for_is_no_request(server):
    """A client that waits for `100 Continue` and is refused sends no body."""
    with Raw(server.port) as raw:
        head = request("POST", CHAT, expect="100-continue", content_length=len(b"{}"))
        assert raw.send(head).answer().status == 100
        assert raw.send(b"{}").answer().status == 400
        head = request("POST", CHAT, expect="100-continue", content_length=10**9)
        assert raw.send(head).answer().status == 413
        assert raw.is_closed()


def test_pipelined_requests_are_answered_in_order(server):
    with Raw(server.port) as raw:
        raw.send(request("GET", "/health") + ASK + request("GET", "/is_sleeping") + ASK)
        assert raw.answer().json() == {"status": "healthy"}
        assert text_of(raw.answer()) == "12 + 35 = 47"
        assert raw.answer().json() == {"is_sleeping": False}
        assert text_of(raw.answer()) == "12 + 35 = 47"
    count = 500  # more than a connection takes at a time
    with Raw(server.port) as raw:
        sender = threading.Thread(target=raw.send, args=(request("GET", "/health") * count,))
        sender.start()
        assert [raw.answer().status for _ in range(count)] == [200] * count
        sender.join()


def test_nonsense_after_a_request_takes_nothing_from_it(server, model):
    with Raw(server.port) as raw, paused(model):
        raw.send(ASK)
        wait_for_requests(model, 1)
        raw.send(b"\0nonsense")
        # A request whose body is no body.
        with Raw(server.port) as other:
            other.send(ASK)
            wait_for_requests(model, 2)
            chunked = request("POST", CHAT, b"", transfer_encoding="chunked")
            other.send(chunked + b"nonsense\r\n")
            assert error_of(server.client.get("/nowhere"))[0] == 404  # both were read
            model.engine.load_device_mem("demo")
            assert text_of(other.answer()) == "12 + 35 = 47" and other.is_closed()
        assert text_of(raw.answer()) == "12 + 35 = 47" and raw.is_closed()
    wait_until_idle(server, model)


# Bodies.


@pytest.mark.parametrize(
    "path, fields, param",
    [
        (CHAT, {"messages": [{"role": "user", "content": "x " * 5_000_000}]}, "messages"),
        (CHAT, {"messages": "x " * 5_000_000}, "messages"),
        (COMPLETIONS, {"prompt": " " * 10_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 100_000}, "prompt"),
        ("/generate", {"prompt": "x" * 10_000_000}, "prompt"),
        ("/get_ppl", {"input": "x" * 10_000_000}, "input"),
        ("/v1/embeddings", {"input": ["x", "y" * 10_000_000]}, "input[1]"),
    ],
    ids=numbered,
)
def test_a_prompt_that_cannot_fit_is_refused(server, path, fields, param):
    status, error = error_of(server.post(path, **fields))
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "the model's length" in error["message"]
    # Texts are not read for that.
    assert ("characters" in error["message"]) == (fields != {"prompt": [1] * 100_000})


HUGE = "x" * 5000  # where LARGE is 1000


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/tokenize", {"prompt": HUGE}),
        ("/v1/encode", {"input": [HUGE]}),
        (CHAT, {"messages": [{"role": "user", "content": HUGE}]}),
        (COMPLETIONS, {"prompt": HUGE}),
        ("/generate", {"prompt": HUGE}),
        ("/get_ppl", {"input": HUGE}),
        ("/v1/embeddings", {"input": HUGE}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/v1/responses/input_tokens", {"input": HUGE}),
        ("/v1/chat/interactive", {"prompt": HUGE}),
    ],
    ids=numbered,
)
def test_a_huge_text_delays_no_other(server, model, monkeypatch, path, fields):
    """It has a thread of its own, however many there are."""
    monkeypatch.setattr(text_work, "LARGE", 1000)
    free, encode = threading.Event(), model.tokenizer.encode

    def encode_slowly(text, **options):
        assert len(text) < len(HUGE) or free.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(model.tokenizer, "encode", encode_slowly)
    huge = [threading.Thread(target=server.post, args=(path,), kwargs=fields) for _ in range(40)]
    for thread in huge:
        thread.start()
    try:
        wait_until(lambda: len(text_work._large._unfinished) == 40)
        assert server.post("/tokenize", prompt="1+1").status_code == 200
        assert text_of(server.post(CHAT, messages=SUM, temperature=0)) == "12 + 35 = 47"
    finally:
        free.set()
        for thread in huge:
            thread.join()


class Counted(list):
    """A list that counts how many of its elements were looked at."""

    def __init__(self, elements):
        super().__init__(elements)
        self.num_seen = 0

    def __iter__(self):
        for each in super().__iter__():
            self.num_seen += 1
            yield each


@pytest.mark.parametrize("element", ["", "x" * 10, [], {}, {"role": "user", "content": "x"}, [1]])
def test_the_size_of_a_body_is_found_without_reading_all_of_it(element):
    values = Counted([element] * 1_000_000)
    assert text_work.size_of({"a": [values]}, text_work.SMALL) > text_work.SMALL
    assert values.num_seen <= text_work.SMALL
    few = Counted([element] * 20)
    assert text_work.size_of(few, text_work.SMALL) <= text_work.SMALL and few.num_seen == 20


@pytest.mark.parametrize(
    "body, param",
    [
        (b'{"messages": "x", "n": 1, "n": 200}', "n"),  # the last of two counts
        (b'{"messages": "x", "seed": 99999999999999999999999999}', "seed"),
        (b'{"messages": "x", "temperature": 1e999}', None),
        (b'{"messages": "x", "temperature": 1e308}', "temperature"),
        (b'{"messages": "x", "top_p": Infinity}', None),
        (b'{"messages": "x", "logit_bias": {"5": 1e400}}', None),
        (b'{"messages": "x", "logit_bias": {"-1": 1}}', "logit_bias"),
        (b'{"messages": "x", "logit_bias": {"99999999999999999999999": 1}}', "logit_bias"),
        (b'{"messages": "x", "logit_bias": {"\xc2\xb2": 1}}', "logit_bias"),
        (b'{"messages": "x", "stop_token_ids": [18446744073709551615]}', None),
        (b'{"messages": "x", "max_tokens": 18446744073709551616}', "max_tokens"),
        (b'{"messages": "x", "stop": "\\ud83d"}', None),
        (b'\xef\xbb\xbf{"messages": "x"}', None),
    ],
    ids=numbered,
)
def test_numbers_and_texts_beyond_all_bounds(server, body, param):
    headers = {"content-type": "application/json"}
    status, error = error_of(server.client.post(CHAT, content=body, headers=headers))
    assert status == 400 and error["message"], error
    assert param is None or error["param"] == param or param in error["message"], error


LONG = "y" * 100_000


def tool_of(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    "path, fields, status",
    [
        (CHAT, {"model": LONG, "messages": SUM}, 404),
        ("/v1/messages", {"model": LONG, "messages": SUM, "max_tokens": 1}, 404),
        (CHAT, {"messages": SUM, "modalities": [LONG]}, 400),
        (CHAT, {"messages": SUM, "tools": [tool_of(name=LONG)]}, 400),
        (CHAT, {"messages": SUM, "tools": [tool_of()], "tool_choice": {"type": LONG}}, 400),
        (CHAT, {"messages": SUM, "tools": [tool_of()], "tool_choice": {"type": "function",
         "function": {"name": LONG}}}, 400),
        (CHAT, {"messages": SUM, "regex": f"({LONG}"}, 400),
        (CHAT, {"messages": SUM, "json_schema": {"type": LONG}}, 400),
        (CHAT, {"messages": SUM, "response_format": {"type": LONG}}, 400),
        ("/v1/responses", {"input": "x", "metadata": {LONG: "x"}}, 400),
        ("/v1/chat/interactive", {"prompt": "x", "adapter_name": LONG}, 404),
    ],
    ids=numbered,
)  # fmt: skip
def test_an_error_does_not_repeat_a_long_value(server, path, fields, status):
    answer = server.post(path, **fields)
    assert answer.status_code == status and len(answer.content) < 10_000, answer.text[:200]
    assert "yyy..." in answer.text


@pytest.mark.parametrize("name", ["a\r\nset-cookie: x", "\0", "\x7f", "é漢😀", "y" * 5000])
def test_any_unknown_field_is_named(server, name):
    answer = server.post("/v1/encode", input="x", **{name: 1})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-allspark-ignored"]
    assert named == name.encode("unicode_escape").decode()[:1000]
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": 7},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [7]},
        {"role": "assistant", "tool_calls": [{"id": "a"}]},
        {"role": "assistant", "tool_calls": [{"function": 7}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": 7, "arguments": 7}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "content": None},
        {"role": 7, "content": "x"},
        {"role": "nobody", "content": "x"},
        {"content": "x"},
        {},
        {"role": "user", "content": [7]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 7}]},
        {"role": "user", "content": {"a": "b"}},
    ],
)
def test_a_malformed_message_is_refused_or_read(server, message):
    for stream in (False, True):
        answer = server.post(CHAT, messages=[message, *SUM], max_tokens=2, stream=stream)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["param"] == "messages" and "messages[0]" in error["message"], error


# Clients that are slow.


@pytest.mark.parametrize(
    "first, again, part",
    [
        (b"GET /health HTT", b"", "headers"),
        (b"GET /health HTTP/1.1\r\n", b"x: y\r\n", "headers"),
        (request("POST", CHAT, b"{", content_length=10**6), b"", "body"),
        (request("POST", CHAT, b"{", content_length=10**6), b" ", "body"),
        (request("POST", "/nowhere", b"", transfer_encoding="chunked"), b"1\r\n \r\n", None),
    ],
    ids=numbered,
)
def test_a_request_that_does_not_come_is_ended(hasty, model, first, again, part):
    with sent(hasty, first) as raw:
        stop = threading.Event()

        def go_on():
            while not stop.wait(0.02):
                try:
                    raw.send(again)
                except OSError:
                    return

        sender = threading.Thread(target=go_on)
        sender.start()
        try:
            answer = raw.answer()
            if part is not None:
                assert answer.status == 408 and answer.headers["connection"] == "close"
                assert f"the {part} did not come within" in answer.json()["error"]["message"]
            assert raw.is_closed()
        finally:
            stop.set()
            sender.join()
    wait_until_idle(hasty, model)


def test_a_silent_connection_is_closed(hasty):
    with Raw(hasty.port) as raw:
        assert raw.answer() is None


def test_slow_is_not_too_slow(hasty, model):
    """A request that waits for the one before it is not late."""
    with contextlib.ExitStack() as stack:
        with paused(model):
            raw = stack.enter_context(sent(hasty, ASK + ASK[:-1]))
            wait_for_requests(model, 1)
            with Raw(hasty.port) as other:  # closed, so the time has passed here, too
                assert other.answer() is None
                time.sleep(0.6)
        assert text_of(raw.answer()) == "12 + 35 = 47"


def test_an_idle_connection_is_closed(model):
    with RunningServer([model], idle_timeout=0.2) as server, Raw(server.port) as raw:
        assert raw.send(request("GET", "/health")).answer().status == 200
        assert raw.is_closed()


def test_a_reader_that_takes_nothing_is_gone(hasty, model, started):
    body = {**ENDLESS, "n": 8, "logprobs": True, "top_logprobs": 20, "stream": True}
    with sent(hasty, post(CHAT, **body), receive_buffer=4096):  # read by nobody
        wait_until(lambda: started)
        wait_until_idle(hasty, model)


def test_a_thousand_idle_connections_are_no_trouble(server, model):
    raws = []
    try:
        for _ in range(1000):
            raws.append(Raw(server.port))
        assert text_of(server.post(CHAT, messages=SUM, temperature=0)) == "12 + 35 = 47"
        assert text_of(raws[500].send(ASK).answer()) == "12 + 35 = 47"
    finally:
        for raw in raws:
            raw.close()


# Clients that go away.


@pytest.mark.parametrize("leave", [Raw.close, Raw.reset])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_go_at_any_moment(server, model, started, leave, stream):
    ask = post(CHAT, **ENDLESS, stream=stream)
    with paused(model):
        first = [Raw(server.port).send(ask) for _ in range(4)]
        wait_for_requests(model, 4)
        # These wait for room in a step.
        waiting = [Raw(server.port).send(ask) for _ in range(4)]
        wait_for_requests(model, 8)
        for raw in waiting:
            leave(raw)
        wait_for_requests(model, 4)
        for raw in first:  # before their first token
            leave(raw)
        wait_for_requests(model, 0)
    wait_until_idle(server, model)
    count = len(started)
    raws = [Raw(server.port).send(post(CHAT, **ENDLESS, stream=stream)) for _ in range(8)]
    wait_until(lambda: len(started) > count)
    for raw in raws:  # while tokens come
        leave(raw)
    wait_until_idle(server, model)
    for size in (0, 1, 20, len(ask) // 2, len(ask) - 1, len(ask)):
        leave(Raw(server.port).send(ask[:size]))
    wait_until_idle(server, model)


def test_a_client_may_go_while_its_prompt_is_read(server, model, monkeypatch):
    template = type(model.template)
    encode = template.encode
    reading, gone = threading.Event(), threading.Event()

    def slow(*arguments):
        reading.set()
        assert gone.wait(30)
        return encode(*arguments)

    for stream in (False, True):
        reading.clear()
        gone.clear()
        with monkeypatch.context() as patch, paused(model):
            patch.setattr(template, "encode", slow)
            raw = Raw(server.port).send(post(CHAT, **ENDLESS, stream=stream))
            assert reading.wait(30)
            raw.reset()
            assert server.client.get("/health").status_code == 200
            gone.set()
            wait_until(lambda: server.server.state.num_running == 0)
            wait_for_requests(model, 0)
    wait_until_idle(server, model)


@pytest.mark.parametrize("stream", [False, True])
def test_who_pipelines_may_go_too(server, model, stream):
    ask = post(CHAT, **ENDLESS, stream=stream)
    with paused(model):
        raw = Raw(server.port).send(ask * 3)
        wait_for_requests(model, 1)
        raw.reset()
        wait_for_requests(model, 0)
    wait_until_idle(server, model)


def test_an_error_in_the_middle_of_a_stream_ends_it(model, monkeypatch):
    """Also one of the server itself: no client waits for what never comes."""
    from allspark.serve.sse import Writer
    from allspark.text_queue import TextQueue

    with RunningServer([model]) as server:
        for path, fields in (
            (CHAT, ENDLESS),
            (COMPLETIONS, {"prompt": "1+1=", "ignore_eos": True, "max_tokens": 500}),
            ("/generate", {"prompt": "1+1=", "ignore_eos": True}),
            ("/v1/messages", {"messages": SUM, "max_tokens": 500}),
        ):
            for stream in (True, False):
                with monkeypatch.context() as patch:
                    with paused(model):
                        raw = Raw(server.port).send(post(path, **fields, stream=stream))
                        wait_for_requests(model, 1)

                        def broken(self, *arguments):
                            raise RuntimeError("it broke")

                        patch.setattr(TextQueue, "_put", broken)
                        patch.setattr(Writer, "write", broken)
                    with raw:
                        if stream:
                            assert raw.head().status == 200
                            with pytest.raises((ValueError, OSError)):  # it has no end
                                list(iter(raw.chunk, b""))
                        else:
                            assert raw.answer().status == 500
                wait_until_idle(server, model)


def test_nothing_is_left_of_many_clients(server, model):
    """No descriptor, whatever clients did."""

    def held():
        return len(os.listdir("/proc/self/fd"))

    def rush():
        raws = [Raw(server.port).send(post(CHAT, **ENDLESS, stream=True)) for _ in range(30)]
        for raw in raws[::3]:
            raw.reset()
        for raw in raws[1::3]:
            raw.close()
        for raw in raws[2::3]:
            assert raw.head().status == 200
            raw.reset()
        wait_until_idle(server, model)

    rush()
    before = held()
    for _ in range(3):
        rush()
    wait_until(lambda: held() <= before)
