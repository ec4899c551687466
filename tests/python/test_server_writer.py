"""Tokens of a stream are written past ASGI's `send`, and as that would write them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve import connection  # noqa: E402
from allspark.serve.chat import ChatStream  # noqa: E402
from allspark.serve.choice import Choice  # noqa: E402
from allspark.serve.sse import Writer  # noqa: E402
from support.http_server import CHAT, RunningServer  # noqa: E402
from support.waiting import wait_until  # noqa: E402

QUESTION = {"messages": [{"role": "user", "content": "Count from one."}], "ignore_eos": True}


@pytest.fixture(scope="module")
def model(demo_model):
    model = ServedModel.open(str(demo_model), EngineConfig(max_batch_size=4), "demo")
    yield model
    model.close()


def content(events):
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_tokens_take_the_short_way(model, monkeypatch):
    own, written = connection.PartWriter.__call__, []

    def noted(self, data):
        written.append(own(self, data))
        return written[-1]

    fields = {**QUESTION, "max_tokens": 40, "seed": 1}
    monkeypatch.setattr(connection.PartWriter, "__call__", noted)
    with RunningServer([model]) as server:
        short = content(server.events(CHAT, **fields))
        assert written and all(written)
        monkeypatch.setattr(connection.PartWriter, "__call__", lambda self, data: False)
        assert content(server.events(CHAT, **fields)) == short != ""


class Cycle(SimpleNamespace):
    """What is looked at of uvicorn's."""

    def __init__(self, **changed):
        self.written = []
        fields = {
            "chunked_encoding": True, "disconnected": False, "response_complete": False,
            "scope": {"method": "POST"}, "flow": SimpleNamespace(write_paused=False),
            "transport": SimpleNamespace(
                write=self.written.append, close=partial(self.written.append, "closed")
            ),
        }  # fmt: skip
        super().__init__(**{**fields, **changed})


def test_a_part_is_a_chunk():
    cycle = Cycle()
    write = connection._open_parts(weakref.ref(cycle))
    assert write(b"data: x" * 3)
    assert cycle.written == [b"15\r\ndata: xdata: xdata: x\r\n"]


@pytest.mark.parametrize(
    "changed",
    [
        {"disconnected": True}, {"response_complete": True},
        {"flow": SimpleNamespace(write_paused=True)},
    ],
)  # fmt: skip
def test_what_needs_more_is_left_to_send(changed):
    cycle = Cycle(**changed)
    assert not connection._open_parts(weakref.ref(cycle))(b"x")
    assert not cycle.written


@pytest.mark.parametrize("changed", [{"chunked_encoding": None}, {"scope": {"method": "HEAD"}}])
def test_other_bodies_have_no_parts(changed):
    cycle = Cycle(**changed)
    assert connection._open_parts(weakref.ref(cycle)) is None


def test_a_cycle_that_ended_has_no_parts():
    of_cycle = weakref.ref(Cycle())
    assert connection._open_parts(of_cycle) is None


@pytest.mark.parametrize("error", [None, ValueError])
def test_what_is_written_at_once_is_one_write(error):
    cycle = Cycle()
    transport = cycle.transport
    write_part = connection._open_parts(weakref.ref(cycle))
    with pytest.raises(error) if error else contextlib.nullcontext():
        with connection._at_once(weakref.ref(cycle)):
            cycle.transport.write(b"head\r\n")
            assert write_part(b"x")
            assert not cycle.written
            if error:
                raise error
    assert cycle.written == [b"head\r\n1\r\nx\r\n"]
    assert cycle.transport is transport
    assert write_part(b"y")
    assert cycle.written[1:] == [b"1\r\ny\r\n"]


def test_a_connection_is_closed_after_what_is_held():
    cycle = Cycle()
    with connection._at_once(weakref.ref(cycle)):
        cycle.transport.write(b"all")
        cycle.transport.close()
    assert cycle.written == [b"all", "closed"]


def test_nothing_is_held_of_a_cycle_that_ended():
    with connection._at_once(weakref.ref(Cycle())):
        pass


def test_a_writer_that_is_to_go_on_is_called_once():
    async def called():
        found = []
        writer = Writer(None)
        writer.on_free = lambda: found.append(len(found))
        for _ in range(2):
            writer.call_again()
            writer.call_again()
            await asyncio.sleep(0)
        return found

    assert asyncio.run(called()) == [0, 1]


def test_a_stream_begins_with_one_write(model, monkeypatch):
    flush, held = connection._HeldWrites.flush, []

    def noted(self):
        held.append(b"".join(self._data))
        flush(self)

    monkeypatch.setattr(connection._HeldWrites, "flush", noted)
    fields = {**QUESTION, "max_tokens": 4, "seed": 1}
    with RunningServer([model]) as server:
        assert content(server.events(CHAT, **fields))
    (begin,) = held
    assert begin.startswith(b"HTTP/1.1 200 OK") and begin.count(b"assistant") == 1


def test_nothing_of_a_stream_is_left(model):
    """Python's collector need not come: a server of many streams could wait long for it."""
    gc.collect()
    gc.disable()
    try:
        with RunningServer([model]) as server:
            fields = {**QUESTION, "max_tokens": 4}
            assert content(server.events(CHAT, **fields))
            server.post(CHAT, **fields)
            kinds = ChatStream, Choice, Writer, connection.PartWriter
            wait_until(lambda: not any(type(each) in kinds for each in gc.get_objects()), 30)
    finally:
        gc.enable()
