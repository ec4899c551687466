"""Tokens of a stream are written past ASGI's `send`, and as that would write them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from allspark.pipeline import EngineConfig  # noqa: E402
from allspark.pipeline.served_model import ServedModel  # noqa: E402
from allspark.serve import connection  # noqa: E402
from support.http_server import CHAT, RunningServer  # noqa: E402

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
    own, written = connection._write_part, []

    def noted(of_cycle, data):
        written.append(own(of_cycle, data))
        return written[-1]

    fields = {**QUESTION, "max_tokens": 40, "seed": 1}
    monkeypatch.setattr(connection, "_write_part", noted)
    with RunningServer([model]) as server:
        short = content(server.events(CHAT, **fields))
        assert written and all(written)
        monkeypatch.setattr(connection, "_write_part", lambda of_cycle, data: False)
        assert content(server.events(CHAT, **fields)) == short != ""


class Cycle(SimpleNamespace):
    """What is looked at of uvicorn's."""

    def __init__(self, **changed):
        self.written = []
        fields = {
            "chunked_encoding": True, "disconnected": False, "response_complete": False,
            "scope": {"method": "POST"}, "flow": SimpleNamespace(write_paused=False),
            "transport": SimpleNamespace(write=self.written.append),
        }  # fmt: skip
        super().__init__(**{**fields, **changed})


def test_a_part_is_a_chunk():
    cycle = Cycle()
    assert connection._write_part(weakref.ref(cycle), b"data: x" * 3)
    assert cycle.written == [b"15\r\ndata: xdata: xdata: x\r\n"]


@pytest.mark.parametrize(
    "changed",
    [
        {"chunked_encoding": None}, {"disconnected": True}, {"response_complete": True},
        {"scope": {"method": "HEAD"}}, {"flow": SimpleNamespace(write_paused=True)},
    ],
)  # fmt: skip
def test_what_needs_more_is_left_to_send(changed):
    cycle = Cycle(**changed)
    assert not connection._write_part(weakref.ref(cycle), b"x")
    assert not cycle.written


def test_a_cycle_that_ended_writes_nothing():
    of_cycle = weakref.ref(Cycle())
    assert not connection._write_part(of_cycle, b"x")
